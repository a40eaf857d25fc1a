// The number type of the CUDA kernels: four elements, with the operations that arithmetic.h asks for.
#pragma once

#include "number.h"

namespace hpcpipe {
namespace HPCPIPE_TARGET {

// Four neighbouring elements, loaded and stored as one.
struct alignas(16) Quad {
  float x[4];
};

template <class Operation>
HPCPIPE_INLINE Quad each(Operation operation) {
  return Quad{{operation(0), operation(1), operation(2), operation(3)}};
}

HPCPIPE_INLINE Quad operator+(Quad a, Quad b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
HPCPIPE_INLINE Quad operator-(Quad a, Quad b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
HPCPIPE_INLINE Quad operator*(Quad a, Quad b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
HPCPIPE_INLINE Quad operator/(Quad a, Quad b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
HPCPIPE_INLINE Quad operator-(Quad a) {
  return each([&](int i) { return -a.x[i]; });
}
HPCPIPE_INLINE Quad splat(float value, Quad) {
  return each([&](int) { return value; });
}
HPCPIPE_INLINE Quad fused(Quad a, Quad b, Quad c) {
  return each([&](int i) { return fused(a.x[i], b.x[i], c.x[i]); });
}
HPCPIPE_INLINE Quad root(Quad a) {
  return each([&](int i) { return root(a.x[i]); });
}

}  // namespace HPCPIPE_TARGET
}  // namespace hpcpipe
