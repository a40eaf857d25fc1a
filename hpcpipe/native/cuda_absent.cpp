// Stands in for cuda.cu in a build without CUDA.
#include "cuda.h"

#include <stdexcept>

namespace hpcpipe {

struct CudaTable::State {};

std::string cuda_problem() { return "built without CUDA"; }

CudaTable::CudaTable(const std::vector<Slot>&, int, int) { throw std::runtime_error(cuda_problem()); }
CudaTable::~CudaTable() = default;

void CudaTable::run(const Call&, const std::vector<Group>&, const std::vector<Gradient>&, uintptr_t) {
  throw std::runtime_error(cuda_problem());
}

void triad_on_cuda(const float*, float*, const float*, float*, float*, int64_t, int, uintptr_t) {
  throw std::runtime_error(cuda_problem());
}

}  // namespace hpcpipe
