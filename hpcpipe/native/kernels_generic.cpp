// CPU kernels for the instruction set that every processor of the platform has (SSE2, NEON, or plain C++).
#define HPCPIPE_TARGET generic
#include "kernels.inc"

namespace hpcpipe {

const Kernels* generic_kernels() {
  static const Kernels kernels{"generic", generic::segment, generic::triad};
  return &kernels;
}

}  // namespace hpcpipe
