// Running a call on a CUDA device: one kernel launch over a slot table that lives on the device.
#pragma once

#include "call.h"

#include <memory>
#include <string>
#include <vector>

namespace hpcpipe {

// Empty where updates can run on the current device: a small update is computed there and compared with the host.
std::string cuda_problem();

// The device side of one layout on one device. Calls on several streams are ordered one after another.
class CudaTable {
 public:
  CudaTable(const std::vector<Slot>& slots, int group_count, int device);
  ~CudaTable();
  CudaTable(const CudaTable&) = delete;
  CudaTable& operator=(const CudaTable&) = delete;

  // Queue the call on `stream` (a cudaStream_t as an integer); throws std::runtime_error with CUDA's own words.
  void run(const Call& call, const std::vector<Group>& groups, const std::vector<Gradient>& gradients,
           uintptr_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

void triad_on_cuda(const float* g, float* v, const float* w, float* next, float* output, int64_t count, int device,
                   uintptr_t stream);

}  // namespace hpcpipe
