// Table of the CPU kernels of one instruction set; cpu.cpp picks the best one that this processor runs.
#pragma once

#include "call.h"

namespace hpcpipe {

struct Triad {
  const float* g;
  float* v;
  const float* w;
  float* next;
  float* output;
};

struct Kernels {
  const char* name;
  // Flat elements [begin, begin + count) of one slot; `gradient` starts at that of element `begin`.
  void (*segment)(const Call&, const Group&, Gradient gradient, int64_t begin, int64_t count);
  // The streams of an out-of-place SGD step with one prediction: reads g, v, w; writes v, next, output.
  void (*triad)(const Triad&, int64_t begin, int64_t count);
};

// Null where the compiler could not target the instruction set.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace hpcpipe
