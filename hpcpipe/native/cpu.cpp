#include "cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "kernels.h"
#include "pool.h"

namespace hpcpipe {
namespace {

// Below this many elements a second thread costs more than it brings.
constexpr int64_t kSmallestPart = 32 * 1024;
// Parts per thread: enough that a thread on a busy core can take fewer of them.
constexpr int64_t kPartsPerThread = 8;

bool runs_here(const Kernels* kernels) {
  if (kernels == nullptr) return false;
#if defined(__x86_64__)
  if (std::strcmp(kernels->name, "avx512") == 0) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
  }
  if (std::strcmp(kernels->name, "avx2") == 0) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return true;
}

const Kernels* best_kernels() {
  for (const Kernels* kernels : {avx512_kernels(), avx2_kernels()}) {
    if (runs_here(kernels)) return kernels;
  }
  return generic_kernels();
}

std::atomic<const Kernels*>& selected() {
  static std::atomic<const Kernels*> kernels{best_kernels()};
  return kernels;
}

void over_ranges(int64_t numel, const std::function<void(int64_t, int64_t)>& task) {
  const int64_t threads = get_threads();
  if (threads == 1 || numel <= kSmallestPart) {
    if (numel > 0) task(0, numel);
    return;
  }
  int64_t length = std::max(kSmallestPart, numel / (threads * kPartsPerThread));
  length = (length + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  const int parts = static_cast<int>((numel + length - 1) / length);
  parallel(parts, [&](int part) { task(part * length, std::min(numel, (part + 1) * length)); });
}

}  // namespace

const char* cpu_target() { return selected().load()->name; }

bool select_cpu_target(const char* name) {
  for (const Kernels* kernels : {avx512_kernels(), avx2_kernels(), generic_kernels()}) {
    if (runs_here(kernels) && std::strcmp(kernels->name, name) == 0) {
      selected().store(kernels);
      return true;
    }
  }
  return false;
}

int64_t stream_threshold_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) return cache;
#endif
  return 32 * 1024 * 1024;
}

void run_on_cpu(const Call& call, const std::vector<Slot>& slots, int64_t numel, const std::vector<Group>& groups,
                const std::vector<Gradient>& gradients) {
  const Kernels* kernels = selected().load();
  const bool in_place = call.next == nullptr || call.next == call.weights;
  over_ranges(numel, [&](int64_t begin, int64_t end) {
    auto slot = std::upper_bound(slots.begin(), slots.end(), begin,
                                 [](int64_t at, const Slot& s) { return at < s.offset + s.numel; });
    for (; slot != slots.end() && slot->offset < end; ++slot) {
      const int64_t from = std::max(begin, slot->offset);
      const int64_t to = std::min(end, slot->offset + slot->numel);
      if (from >= to) continue;
      Gradient gradient{};
      if (!call.predict_only) gradient = gradients[slot - slots.begin()];
      if (gradient.data != nullptr) {
        const int64_t bytes = (from - slot->offset) * (gradient.bfloat16 ? 2 : 4);
        gradient.data = static_cast<const char*>(gradient.data) + bytes;
      } else if (in_place && call.outputs == 0) {
        continue;
      }
      kernels->segment(call, groups[slot->group], gradient, from, to - from);
    }
  });
}

void triad_on_cpu(const float* g, float* v, const float* w, float* next, float* output, int64_t count) {
  const Kernels* kernels = selected().load();
  const Triad triad{g, v, w, next, output};
  over_ranges(count, [&](int64_t begin, int64_t end) { kernels->triad(triad, begin, end - begin); });
}

}  // namespace hpcpipe
