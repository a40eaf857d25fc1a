// The SIMD number type of the CPU kernels, with the operations that arithmetic.h asks for. The width follows
// the instruction set that the including translation unit is compiled for.
#pragma once

#include "number.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace hpcpipe {
namespace HPCPIPE_TARGET {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Signed __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

// Subtracting zero keeps the sign of a zero, which adding it would not.
HPCPIPE_INLINE Floats splat(float value, Floats zero) { return value - zero; }

HPCPIPE_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

HPCPIPE_INLINE Floats root(Floats a) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)a);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)a);
#elif defined(__x86_64__)
  return (Floats)_mm_sqrt_ps((__m128)a);
#elif defined(__aarch64__)
  return (Floats)vsqrtq_f32((float32x4_t)a);
#else
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
#endif
}

HPCPIPE_INLINE Words nan_mask(Words bits) { return (Words)((Signed)(bits & 0x7fffffffu) > 0x7f800000); }

}  // namespace HPCPIPE_TARGET
}  // namespace hpcpipe
