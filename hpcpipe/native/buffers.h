// What Python hands over: tensors as DLPack capsules, read without taking them, and checked before any pointer is used.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

namespace hpcpipe {

// The struct behind a capsule named "dltensor" (DLPack's DLManagedTensor).
struct ManagedTensor {
  nanobind::dlpack::dltensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

enum class Element { kFloat32, kBfloat16, kOther };

// A tensor in a capsule; valid while the capsule lives.
struct TensorView {
  explicit TensorView(nanobind::handle capsule) {
    const auto* managed = static_cast<const ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    if (managed == nullptr) throw nanobind::python_error();
    const nanobind::dlpack::dltensor& t = managed->tensor;
    data = static_cast<char*>(t.data) + t.byte_offset;
    device_type = t.device.device_type;
    device = t.device.device_id;
    numel = 1;
    contiguous = true;
    for (int i = t.ndim - 1; i >= 0; --i) {
      contiguous = contiguous && (t.strides == nullptr || t.shape[i] == 1 || t.strides[i] == numel);
      numel *= t.shape[i];
    }
    contiguous = contiguous || numel == 0;
    element = Element::kOther;
    if (t.dtype.lanes == 1 && t.dtype.code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Float)) {
      if (t.dtype.bits == 32) element = Element::kFloat32;
    } else if (t.dtype.lanes == 1 && t.dtype.code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Bfloat)) {
      if (t.dtype.bits == 16) element = Element::kBfloat16;
    }
  }

  bool on_cuda() const { return device_type == nanobind::device::cuda::value; }
  bool same_device(const TensorView& other) const {
    return device_type == other.device_type && device == other.device;
  }

  char* data;
  int64_t numel;
  bool contiguous;
  Element element;
  int device_type;
  int device;
};

// The flat buffers of one call: each of the layout's length, all on one device, none that is written overlapping another.
class Buffers {
 public:
  explicit Buffers(int64_t numel) : numel_(numel) {}

  TensorView add(nanobind::handle capsule, const char* name, bool bfloat16_allowed, bool written) {
    const TensorView view(capsule);
    const bool fits = view.element == Element::kFloat32 || (bfloat16_allowed && view.element == Element::kBfloat16);
    if (!fits) fail(name, bfloat16_allowed ? "must be float32 or bfloat16" : "must be float32");
    if (!view.contiguous) fail(name, "must be contiguous");
    if (view.numel != numel_) {
      fail(name, "has " + std::to_string(view.numel) + " elements, the layout has " + std::to_string(numel_));
    }
    if (view.device_type != nanobind::device::cpu::value && !view.on_cuda()) {
      fail(name, "must live on the CPU or on a CUDA device");
    }
    if (!entries_.empty() && !view.same_device(entries_[0].view)) fail(name, "is on another device than the weights");
    const int64_t bytes = view.numel * (view.element == Element::kBfloat16 ? 2 : 4);
    for (const Entry& other : entries_) {
      const bool apart = view.data + bytes <= other.view.data || other.view.data + other.bytes <= view.data;
      if (!apart && (written || other.written)) fail(name, std::string("overlaps ") + other.name);
    }
    aligned_ = aligned_ && reinterpret_cast<uintptr_t>(view.data) % 64 == 0;
    bytes_ += bytes;
    entries_.push_back({view, bytes, name, written});
    return view;
  }

  float* add_floats(nanobind::handle capsule, const char* name, bool written) {
    return reinterpret_cast<float*>(add(capsule, name, false, written).data);
  }

  const TensorView& first() const { return entries_.front().view; }
  bool aligned() const { return aligned_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    TensorView view;
    int64_t bytes;
    const char* name;
    bool written;
  };

  [[noreturn]] static void fail(const char* name, const std::string& what) {
    throw nanobind::value_error((std::string(name) + " " + what).c_str());
  }

  int64_t numel_;
  int64_t bytes_ = 0;
  bool aligned_ = true;
  std::vector<Entry> entries_;
};

}  // namespace hpcpipe
