// The operations that arithmetic.h asks of a number type, here for float.
//
// Define HPCPIPE_TARGET before including this: every target gets its own copy in a namespace of that name. The linker
// keeps one copy of a shared inline function, and that might be the one compiled for AVX-512.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define HPCPIPE_INLINE __host__ __device__ __forceinline__
#else
#define HPCPIPE_INLINE inline __attribute__((always_inline))
#endif

namespace hpcpipe {
namespace HPCPIPE_TARGET {

HPCPIPE_INLINE float splat(float value, float) { return value; }

HPCPIPE_INLINE float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

HPCPIPE_INLINE float root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

// All bits set where the float with these bits is a NaN.
HPCPIPE_INLINE uint32_t nan_mask(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : 0u; }

}  // namespace HPCPIPE_TARGET
}  // namespace hpcpipe
