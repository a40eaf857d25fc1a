// CPU kernels for AVX-512; empty where the compiler does not target it.
#include "kernels.h"

#if defined(__AVX512F__) && defined(__FMA__)

#define HPCPIPE_TARGET avx512
#include "kernels.inc"

namespace hpcpipe {

const Kernels* avx512_kernels() {
  static const Kernels kernels{"avx512", avx512::segment, avx512::triad};
  return &kernels;
}

}  // namespace hpcpipe

#else

namespace hpcpipe {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace hpcpipe

#endif
