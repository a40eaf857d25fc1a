// CPU kernels for AVX2; empty where the compiler does not target it.
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__)

#define HPCPIPE_TARGET avx2
#include "kernels.inc"

namespace hpcpipe {

const Kernels* avx2_kernels() {
  static const Kernels kernels{"avx2", avx2::segment, avx2::triad};
  return &kernels;
}

}  // namespace hpcpipe

#else

namespace hpcpipe {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace hpcpipe

#endif
