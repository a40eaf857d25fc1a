// The CUDA side: one kernel per rule over chunks of slots, in the manner of multi-tensor-apply.
#define HPCPIPE_TARGET cuda
#include "cuda.h"
#include "quad.h"
// After the number type.
#include "arithmetic.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace hpcpipe {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;  // elements of a Quad
// Elements of one block: a multiple of kThreads * kPerThread, and of the slot alignment.
constexpr int64_t kChunk = 8 * kThreads * kPerThread;

// Part of a slot, worked on by one block. Slots longer than a chunk have several.
struct Chunk {
  int32_t slot;
  int64_t begin;  // within the slot
};

// What changes from call to call, copied to the device in one piece: gradients of all slots, then the groups.
struct Tables {
  const Slot* slots;
  const Chunk* chunks;
  const Gradient* gradients;
  const Group* groups;
};

struct Access {
  static HPCPIPE_INLINE float load(const float* source, float) { return *source; }
  static HPCPIPE_INLINE float load(const uint16_t* source, float) {
    const uint32_t bits = static_cast<uint32_t>(*source) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  // Flat buffers are aligned, a gradient may lie anywhere.
  template <class Source>
  static HPCPIPE_INLINE Quad load(const Source* source, Quad) {
    if (sizeof(Source) == sizeof(float) && reinterpret_cast<uintptr_t>(source) % sizeof(Quad) == 0) {
      return *reinterpret_cast<const Quad*>(source);
    }
    return each([&](int i) { return load(source + i, float{}); });
  }

  static HPCPIPE_INLINE void store(float* target, float value) { *target = value; }
  static HPCPIPE_INLINE void store(float* target, Quad value) { *reinterpret_cast<Quad*>(target) = value; }
  template <class T>
  static HPCPIPE_INLINE void store_weights(float* target, T value) {
    store(target, value);
  }
  template <class T>
  static HPCPIPE_INLINE void store_output(float* target, T value) {
    store(target, value);
  }

  static HPCPIPE_INLINE uint32_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return round_to_bfloat16(bits);
  }
  static HPCPIPE_INLINE void store_bfloat16(uint16_t* target, float value) {
    *target = static_cast<uint16_t>(to_bfloat16(value));
  }
  static HPCPIPE_INLINE void store_bfloat16(uint16_t* target, Quad value) {
    struct alignas(8) Packed {
      uint32_t low, high;
    };
    *reinterpret_cast<Packed*>(target) = Packed{to_bfloat16(value.x[0]) | to_bfloat16(value.x[1]) << 16,
                                                to_bfloat16(value.x[2]) | to_bfloat16(value.x[3]) << 16};
  }
};

// Neighbouring threads take neighbouring elements, so that accesses coalesce; what does not fill a Quad comes last.
template <Rule rule, Mode mode, class Element>
__device__ void chunk_loop(const Call& call, const Group& group, const Element* gradient, int64_t offset,
                           int64_t count) {
  int64_t done = 0;
  if (call.aligned) {
    done = count / kPerThread * kPerThread;
    for (int64_t i = threadIdx.x * kPerThread; i < done; i += kThreads * kPerThread) {
      element<rule, mode, Quad, Access>(call, group, gradient + i, offset + i);
    }
  }
  for (int64_t i = done + threadIdx.x; i < count; i += kThreads) {
    element<rule, mode, float, Access>(call, group, gradient + i, offset + i);
  }
}

template <Rule rule>
__global__ void __launch_bounds__(kThreads) update_kernel(Call call, Tables tables) {
  const Chunk chunk = tables.chunks[blockIdx.x];
  const Slot slot = tables.slots[chunk.slot];
  const Group group = tables.groups[slot.group];
  const Gradient gradient = call.predict_only ? Gradient{} : tables.gradients[chunk.slot];
  const int64_t count = min(kChunk, slot.numel - chunk.begin);
  const int64_t offset = slot.offset + chunk.begin;
  if (gradient.data == nullptr) {
    chunk_loop<rule, Mode::kKeepWeights>(call, group, call.weights, offset, count);
  } else if (gradient.bfloat16) {
    const auto* data = static_cast<const uint16_t*>(gradient.data) + chunk.begin;
    chunk_loop<rule, Mode::kUpdate>(call, group, data, offset, count);
  } else {
    const auto* data = static_cast<const float*>(gradient.data) + chunk.begin;
    chunk_loop<rule, Mode::kUpdate>(call, group, data, offset, count);
  }
}

// `quads` groups of four elements, streamed as an update streams them.
__global__ void __launch_bounds__(kThreads)
    triad_kernel(const Quad* g, Quad* v, const Quad* w, Quad* next, Quad* output, int64_t quads) {
  const Quad half = splat(0.5f, Quad{});
  const int64_t begin = blockIdx.x * (kChunk / kPerThread);
  const int64_t end = min(begin + kChunk / kPerThread, quads);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const Quad velocity = g[i] + half * v[i];
    const Quad weight = w[i] - half * velocity;
    v[i] = velocity;
    next[i] = weight;
    output[i] = weight - velocity;
  }
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Makes a device current for a scope; torch's own choice is back in place afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// A piece of device memory with a life.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t size) { check(cudaMalloc(&data_, std::max<size_t>(size, 1)), "cudaMalloc"); }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  char* get() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace
}  // namespace cuda

struct CudaTable::State {
  State(const std::vector<Slot>& slots, const std::vector<cuda::Chunk>& chunks, int groups)
      : slot_count(slots.size()),
        chunk_count(chunks.size()),
        fixed(slots.size() * sizeof(Slot) + chunks.size() * sizeof(cuda::Chunk)),
        changing(slots.size() * sizeof(Gradient) + groups * sizeof(Group)),
        host(slots.size() * sizeof(Gradient) + groups * sizeof(Group)) {
    cuda::check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreate");
    cuda::check(cudaMemcpy(fixed.get(), slots.data(), slots.size() * sizeof(Slot), cudaMemcpyHostToDevice),
                "copy of the slot table");
    cuda::check(cudaMemcpy(fixed.get() + slots.size() * sizeof(Slot), chunks.data(),
                           chunks.size() * sizeof(cuda::Chunk), cudaMemcpyHostToDevice),
                "copy of the chunk table");
  }
  ~State() { cudaEventDestroy(done); }

  int device = 0;
  size_t slot_count, chunk_count;
  cuda::DeviceBytes fixed;     // slots, then chunks
  cuda::DeviceBytes changing;  // gradients, then groups
  std::vector<char> host;      // the same, before its copy
  cudaEvent_t done = nullptr;
};

CudaTable::CudaTable(const std::vector<Slot>& slots, int group_count, int device) {
  cuda::OnDevice on_device(device);
  std::vector<cuda::Chunk> chunks;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    for (int64_t begin = 0; begin < slots[slot].numel; begin += cuda::kChunk) {
      chunks.push_back({static_cast<int32_t>(slot), begin});
    }
  }
  state_ = std::make_unique<State>(slots, chunks, group_count);
  state_->device = device;
}

CudaTable::~CudaTable() = default;

void CudaTable::run(const Call& call, const std::vector<Group>& groups, const std::vector<Gradient>& gradients,
                    uintptr_t stream_handle) {
  State& state = *state_;
  if (state.chunk_count == 0) return;
  cuda::OnDevice on_device(state.device);
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  const size_t gradient_bytes = state.slot_count * sizeof(Gradient);
  if (!gradients.empty()) std::memcpy(state.host.data(), gradients.data(), gradient_bytes);
  std::memcpy(state.host.data() + gradient_bytes, groups.data(), groups.size() * sizeof(Group));
  // The last call may run on another stream and still read the table. The source is pageable memory, so it may be
  // reused as soon as the copy has been queued.
  cuda::check(cudaStreamWaitEvent(stream, state.done, 0), "cudaStreamWaitEvent");
  cuda::check(cudaMemcpyAsync(state.changing.get(), state.host.data(), state.host.size(), cudaMemcpyHostToDevice,
                              stream),
              "copy of the gradient table");
  cuda::Tables tables;
  tables.slots = reinterpret_cast<const Slot*>(state.fixed.get());
  tables.chunks = reinterpret_cast<const cuda::Chunk*>(state.fixed.get() + state.slot_count * sizeof(Slot));
  tables.gradients = reinterpret_cast<const Gradient*>(state.changing.get());
  tables.groups = reinterpret_cast<const Group*>(state.changing.get() + gradient_bytes);
  const auto blocks = static_cast<unsigned>(state.chunk_count);
  if (call.rule == Rule::kSgd) {
    cuda::update_kernel<Rule::kSgd><<<blocks, cuda::kThreads, 0, stream>>>(call, tables);
  } else {
    cuda::update_kernel<Rule::kAdam><<<blocks, cuda::kThreads, 0, stream>>>(call, tables);
  }
  cuda::check(cudaGetLastError(), "launch of the update kernel");
  cuda::check(cudaEventRecord(state.done, stream), "cudaEventRecord");
}

void triad_on_cuda(const float* g, float* v, const float* w, float* next, float* output, int64_t count, int device,
                   uintptr_t stream) {
  cuda::OnDevice on_device(device);
  const auto blocks = static_cast<unsigned>((count + cuda::kChunk - 1) / cuda::kChunk);
  cuda::triad_kernel<<<blocks, cuda::kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<const cuda::Quad*>(g), reinterpret_cast<cuda::Quad*>(v),
      reinterpret_cast<const cuda::Quad*>(w), reinterpret_cast<cuda::Quad*>(next),
      reinterpret_cast<cuda::Quad*>(output), count / cuda::kPerThread);
  cuda::check(cudaGetLastError(), "launch of the triad kernel");
}

std::string cuda_problem() {
  try {
    int devices = 0;
    cuda::check(cudaGetDeviceCount(&devices), "no usable CUDA device");
    if (devices == 0) return "no CUDA device";
    int device = 0;
    cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    constexpr int kCount = 40;
    std::vector<float> gradient(kCount), buffer(kCount), weights(kCount), expected(kCount), got(kCount);
    Group group{};
    group.flags = kMomentum | kWeightDecay;
    group.momentum = 0.9f, group.blend = 1.0f, group.weight_decay = 0.01f, group.minus_rate = -0.1f;
    for (int i = 0; i < kCount; ++i) {
      gradient[i] = 0.3f * i - 5.0f, buffer[i] = 1.0f / (i + 1), weights[i] = 0.7f * i;
      float v = buffer[i];
      expected[i] = cuda::sgd(gradient[i], weights[i], v, group);
    }
    const size_t bytes = kCount * sizeof(float);
    cuda::DeviceBytes memory(3 * bytes);
    float* on_device = reinterpret_cast<float*>(memory.get());
    cuda::check(cudaMemcpy(on_device, gradient.data(), bytes, cudaMemcpyHostToDevice), "copy to the device");
    cuda::check(cudaMemcpy(on_device + kCount, buffer.data(), bytes, cudaMemcpyHostToDevice), "copy to the device");
    cuda::check(cudaMemcpy(on_device + 2 * kCount, weights.data(), bytes, cudaMemcpyHostToDevice),
                "copy to the device");
    CudaTable table({Slot{0, kCount, 0}}, 1, device);
    Call call{};
    call.rule = Rule::kSgd;
    call.aligned = bytes % 16 == 0;
    call.weights = call.next = on_device + 2 * kCount;
    call.state[0] = on_device + kCount;
    table.run(call, {group}, {Gradient{on_device, false}}, 0);
    cuda::check(cudaDeviceSynchronize(), "self-test of the update kernel");
    cuda::check(cudaMemcpy(got.data(), call.next, bytes, cudaMemcpyDeviceToHost), "copy from the device");
    for (int i = 0; i < kCount; ++i) {
      if (!(std::fabs(got[i] - expected[i]) <= 1e-5f * (1.0f + std::fabs(expected[i])))) {
        return "self-test of the update kernel gave a wrong result";
      }
    }
    return "";
  } catch (const std::exception& error) {
    cudaGetLastError();
    return error.what();
  }
}

}  // namespace hpcpipe
