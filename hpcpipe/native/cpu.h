// Running a call on the CPU: picks the instruction set, splits the flat buffer into ranges, and walks the slots.
#pragma once

#include "call.h"

#include <vector>

namespace hpcpipe {

// Name of the instruction set in use: avx512, avx2 or generic.
const char* cpu_target();

// Use this instruction set from now on; false where this processor or this build does not have it.
bool select_cpu_target(const char* name);

// Bytes above which buffers that are only written bypass the caches: the size of the last-level cache.
int64_t stream_threshold_bytes();

// `gradients`: one per slot. The slots are in ascending order of offset.
void run_on_cpu(const Call& call, const std::vector<Slot>& slots, int64_t numel, const std::vector<Group>& groups,
                const std::vector<Gradient>& gradients);

// One pass over buffers of `count` elements (a multiple of 16, buffers aligned to 64 bytes) with the streams of an update.
void triad_on_cpu(const float* g, float* v, const float* w, float* next, float* output, int64_t count);

}  // namespace hpcpipe
