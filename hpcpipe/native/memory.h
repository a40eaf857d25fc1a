// How the CPU kernels reach memory: loads at any alignment, bfloat16 both ways, and stores past the caches.
#pragma once

#include "vector.h"
// After the number type.
#include "arithmetic.h"

namespace hpcpipe {
namespace HPCPIPE_TARGET {

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

HPCPIPE_INLINE Floats load(const float* source, Floats) {
  Floats value;
  __builtin_memcpy(&value, source, sizeof(value));
  return value;
}

HPCPIPE_INLINE Floats load(const uint16_t* source, Floats) {
  Halves halves;
  __builtin_memcpy(&halves, source, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

HPCPIPE_INLINE void store(float* target, Floats value) { __builtin_memcpy(target, &value, sizeof(value)); }

HPCPIPE_INLINE void store(uint16_t* target, Halves value) { __builtin_memcpy(target, &value, sizeof(value)); }

HPCPIPE_INLINE Halves to_bfloat16(Floats value) {
  return __builtin_convertvector(round_to_bfloat16((Words)value), Halves);
}

// The target is aligned to the size of the value.
HPCPIPE_INLINE void stream(float* target, Floats value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(target, (__m512)value);
#elif defined(__AVX2__)
  _mm256_stream_ps(target, (__m256)value);
#elif defined(__x86_64__)
  _mm_stream_ps(target, (__m128)value);
#elif defined(__clang__)
  __builtin_nontemporal_store(value, reinterpret_cast<Floats*>(target));
#else
  store(target, value);
#endif
}

HPCPIPE_INLINE void stream(uint16_t* target, Halves value) {
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), (__m256i)value);
#elif defined(__AVX2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(target), (__m128i)value);
#elif defined(__x86_64__)
  _mm_stream_si64(reinterpret_cast<long long*>(target), (long long)value);
#else
  store(target, value);
#endif
}

// Streamed stores are not ordered with later ones: call before another thread may read them.
HPCPIPE_INLINE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// --- Scalar tails ---------------------------------------------------------------------------------------------------

HPCPIPE_INLINE float load(const float* source, float) { return *source; }

HPCPIPE_INLINE float load(const uint16_t* source, float) {
  const uint32_t bits = static_cast<uint32_t>(*source) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

HPCPIPE_INLINE void store(float* target, float value) { *target = value; }

HPCPIPE_INLINE uint16_t to_bfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(round_to_bfloat16(bits));
}

HPCPIPE_INLINE void store(uint16_t* target, uint16_t value) { *target = value; }

// A tail shares its cache line with nothing that is streamed later, so it may go through the caches.
HPCPIPE_INLINE void stream(float* target, float value) { *target = value; }
HPCPIPE_INLINE void stream(uint16_t* target, uint16_t value) { *target = value; }

template <bool stream_weights, bool stream_outputs>
struct Access {
  template <class Source, class T>
  static HPCPIPE_INLINE T load(const Source* source, T kind) {
    return HPCPIPE_TARGET::load(source, kind);
  }
  template <class T>
  static HPCPIPE_INLINE void store(float* target, T value) {
    HPCPIPE_TARGET::store(target, value);
  }
  template <class T>
  static HPCPIPE_INLINE void store_weights(float* target, T value) {
    stream_weights ? stream(target, value) : HPCPIPE_TARGET::store(target, value);
  }
  template <class T>
  static HPCPIPE_INLINE void store_output(float* target, T value) {
    stream_outputs ? stream(target, value) : HPCPIPE_TARGET::store(target, value);
  }
  template <class T>
  static HPCPIPE_INLINE void store_bfloat16(uint16_t* target, T value) {
    const auto halves = to_bfloat16(value);
    stream_outputs ? stream(target, halves) : HPCPIPE_TARGET::store(target, halves);
  }
};

}  // namespace HPCPIPE_TARGET
}  // namespace hpcpipe
