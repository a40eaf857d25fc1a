// Python's way in: turns a layout into a slot table once, and per call fills in a Call and runs it without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "buffers.h"
#include "call.h"
#include "cpu.h"
#include "cuda.h"
#include "pool.h"

namespace nb = nanobind;

namespace hpcpipe {
namespace {

constexpr uint32_t kAnyCoef = kCoef0 | kCoef0 << 1 | kCoef0 << 2;

class SlotTable {
 public:
  SlotTable(const std::vector<int64_t>& offsets, const std::vector<int64_t>& numels, const std::vector<int>& groups,
            int64_t numel, int group_count)
      : numel_(numel), group_count_(group_count) {
    if (offsets.size() != numels.size() || offsets.size() != groups.size()) {
      throw nb::value_error("offsets, numels and groups differ in length");
    }
    int64_t end = 0;
    for (size_t i = 0; i < offsets.size(); ++i) {
      if (offsets[i] < end || offsets[i] % kSlotAlignment != 0 || numels[i] < 0 || groups[i] < 0 ||
          groups[i] >= group_count) {
        throw nb::value_error(("slot " + std::to_string(i) + " is misplaced or of an unknown group").c_str());
      }
      end = offsets[i] + numels[i];
      slots_.push_back({offsets[i], numels[i], groups[i]});
    }
    if (end > numel) throw nb::value_error("the last slot ends behind the buffer");
  }

  SlotTable(const SlotTable&) = delete;
  SlotTable& operator=(const SlotTable&) = delete;

  // Run one call. All tensors are DLPack capsules.
  //   gradients      one per slot, None allowed; None instead of the list for predictions alone
  //   next_weights   None for predictions alone; may be in the place of weights
  //   constants      per group: flags, then the floats of Group up to eps
  //   outputs        (buffer, factors, minus_coefs), the latter two with one entry per group
  //   stream_stores  1 or 0 forces stores past the caches on or off, -1 decides by size
  // Returns the indices of gradients that have to be converted first (type, strides, length or device do not fit); where
  // there are any, nothing has been done.
  std::vector<int> run(int rule, nb::object gradients, nb::handle weights, nb::object next_weights, nb::list states,
                       const std::vector<std::vector<double>>& constants, nb::list outputs, int stream_stores,
                       uintptr_t cuda_stream) {
    Call call{};
    call.rule = static_cast<Rule>(rule);
    call.predict_only = gradients.is_none();
    if (call.predict_only != next_weights.is_none()) {
      throw nb::value_error("gradients and next_weights come together");
    }
    Buffers buffers(numel_);
    bool in_place = false;
    if (!call.predict_only) in_place = TensorView(next_weights).data == TensorView(weights).data;
    float* weights_data = buffers.add_floats(weights, "weights", in_place);
    call.weights = weights_data;
    if (!call.predict_only) {
      call.next = in_place ? weights_data : buffers.add_floats(next_weights, "next_weights", true);
    }
    read_states(states, call, buffers);
    std::vector<Group> groups = read_groups(constants);
    call.outputs = static_cast<int>(outputs.size());
    if (call.outputs > kMaxOutputs) throw nb::value_error("too many outputs");
    for (int i = 0; i < call.outputs; ++i) {
      call.output[i] = read_output(nb::cast<nb::tuple>(outputs[i]), i, buffers, groups);
    }
    for (const Group& group : groups) {
      if (call.state[0] == nullptr && numel_ > 0 && (group.flags & (kMomentum | kKeep | kAnyCoef))) {
        throw nb::value_error("these options need a momentum buffer");
      }
    }
    std::vector<Gradient> pointers;
    if (!call.predict_only) {
      std::vector<int> unfit = read_gradients(nb::cast<nb::list>(gradients), buffers.first(), pointers);
      if (!unfit.empty()) return unfit;
    }
    call.aligned = buffers.aligned();
    const bool streamed =
        call.aligned && (stream_stores < 0 ? buffers.bytes() > stream_threshold_bytes() : stream_stores == 1);
    call.stream_weights = streamed && call.next != nullptr && !in_place;
    call.stream_outputs = streamed && call.outputs > 0;
    if (buffers.first().on_cuda()) {
      CudaTable& table = cuda_table(buffers.first().device);
      nb::gil_scoped_release release;
      table.run(call, groups, pointers, cuda_stream);
    } else {
      nb::gil_scoped_release release;
      run_on_cpu(call, slots_, numel_, groups, pointers);
    }
    return {};
  }

 private:
  static void read_states(const nb::list& states, Call& call, Buffers& buffers) {
    const bool fits = call.rule == Rule::kAdam ? states.size() == 2 : states.size() <= 1;
    if (!fits) throw nb::value_error("wrong number of state buffers");
    for (size_t i = 0; i < states.size(); ++i) {
      call.state[i] = buffers.add_floats(states[i], "a state buffer", !call.predict_only);
    }
  }

  std::vector<Group> read_groups(const std::vector<std::vector<double>>& constants) const {
    if (static_cast<int>(constants.size()) != group_count_) throw nb::value_error("wrong number of groups");
    std::vector<Group> groups;
    for (const std::vector<double>& values : constants) {
      if (values.size() != 10) throw nb::value_error("a group has ten constants");
      Group group{};
      group.flags = static_cast<uint32_t>(values[0]);
      group.grad_scale = static_cast<float>(values[1]);
      group.weight_decay = static_cast<float>(values[2]);
      group.minus_rate = static_cast<float>(values[3]);
      group.momentum = static_cast<float>(values[4]);
      group.blend = static_cast<float>(values[5]);
      group.lerp = static_cast<float>(values[6]);
      group.decay = static_cast<float>(values[7]);
      group.correction = static_cast<float>(values[8]);
      group.eps = static_cast<float>(values[9]);
      if (group.lerp >= 0.5f) {
        group.flags |= kLerpFromEnd;
        group.lerp -= 1.0f;
      }
      groups.push_back(group);
    }
    return groups;
  }

  static OutputBuffer read_output(const nb::tuple& output, int i, Buffers& buffers, std::vector<Group>& groups) {
    const auto factors = nb::cast<std::vector<double>>(output[1]);
    const auto minus_coefs = nb::cast<std::vector<double>>(output[2]);
    if (factors.size() != groups.size() || minus_coefs.size() != groups.size()) {
      throw nb::value_error("an output needs one factor and one coef per group");
    }
    for (size_t k = 0; k < groups.size(); ++k) {
      groups[k].factor[i] = static_cast<float>(factors[k]);
      groups[k].minus_coef[i] = static_cast<float>(minus_coefs[k]);
      if (factors[k] != 1.0) groups[k].flags |= kFactor0 << i;
      if (minus_coefs[k] != 0.0) groups[k].flags |= kCoef0 << i;
    }
    const TensorView view = buffers.add(output[0], "an output", true, true);
    return {view.data, view.element == Element::kBfloat16};
  }

  std::vector<int> read_gradients(const nb::list& list, const TensorView& weights,
                                  std::vector<Gradient>& gradients) const {
    if (list.size() != slots_.size()) throw nb::value_error("wrong number of gradients");
    gradients.resize(slots_.size());
    std::vector<int> unfit;
    for (size_t i = 0; i < slots_.size(); ++i) {
      const nb::handle capsule = list[i];
      if (capsule.is_none()) continue;
      const TensorView view(capsule);
      if (view.element == Element::kOther || !view.contiguous || view.numel != slots_[i].numel ||
          !view.same_device(weights)) {
        unfit.push_back(static_cast<int>(i));
      }
      gradients[i] = {view.data, view.element == Element::kBfloat16};
    }
    return unfit;
  }

  CudaTable& cuda_table(int device) {
    std::unique_ptr<CudaTable>& table = cuda_tables_[device];
    if (table == nullptr) table = std::make_unique<CudaTable>(slots_, group_count_, device);
    return *table;
  }

  std::vector<Slot> slots_;
  int64_t numel_;
  int group_count_;
  std::map<int, std::unique_ptr<CudaTable>> cuda_tables_;
};

void triad(nb::handle g, nb::handle v, nb::handle w, nb::handle next, nb::handle output, uintptr_t cuda_stream) {
  const int64_t count = TensorView(g).numel;
  Buffers buffers(count);
  const float* g_data = buffers.add_floats(g, "g", false);
  float* v_data = buffers.add_floats(v, "v", true);
  const float* w_data = buffers.add_floats(w, "w", false);
  float* next_data = buffers.add_floats(next, "next", true);
  float* output_data = buffers.add_floats(output, "output", true);
  if (count % kSlotAlignment != 0 || !buffers.aligned()) {
    throw nb::value_error("the triad needs buffers aligned to 64 bytes, of a multiple of 16 elements");
  }
  const bool on_cuda = buffers.first().on_cuda();
  const int device = buffers.first().device;
  nb::gil_scoped_release release;
  if (on_cuda) {
    triad_on_cuda(g_data, v_data, w_data, next_data, output_data, count, device, cuda_stream);
  } else {
    triad_on_cpu(g_data, v_data, w_data, next_data, output_data, count);
  }
}

nb::dict flags() {
  nb::dict flags;
  flags["scale"] = static_cast<uint32_t>(kScale);
  flags["maximize"] = static_cast<uint32_t>(kMaximize);
  flags["weight_decay"] = static_cast<uint32_t>(kWeightDecay);
  flags["decoupled"] = static_cast<uint32_t>(kDecoupled);
  flags["momentum"] = static_cast<uint32_t>(kMomentum);
  flags["first"] = static_cast<uint32_t>(kFirst);
  flags["nesterov"] = static_cast<uint32_t>(kNesterov);
  flags["keep"] = static_cast<uint32_t>(kKeep);
  return flags;
}

}  // namespace
}  // namespace hpcpipe

NB_MODULE(_core, module) {
  using namespace hpcpipe;
  nb::class_<SlotTable>(module, "SlotTable")
      .def(nb::init<const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<int>&, int64_t, int>(),
           nb::arg("offsets"), nb::arg("numels"), nb::arg("groups"), nb::arg("numel"), nb::arg("group_count"))
      .def("run", &SlotTable::run, nb::arg("rule"), nb::arg("gradients").none(), nb::arg("weights"),
           nb::arg("next_weights").none(), nb::arg("states"), nb::arg("constants"), nb::arg("outputs"),
           nb::arg("stream_stores"), nb::arg("cuda_stream"));
  module.def("triad", &triad, nb::arg("g"), nb::arg("v"), nb::arg("w"), nb::arg("next"), nb::arg("output"),
             nb::arg("cuda_stream") = 0);
  module.def("set_threads", &set_threads, nb::arg("count"));
  module.def("get_threads", &get_threads);
  module.def("cpu_target", &cpu_target);
  module.def("select_cpu_target", &select_cpu_target, nb::arg("name"));
  module.def("cuda_problem", &cuda_problem);
  module.attr("FLAGS") = flags();
  module.attr("SOURCES") = HPCPIPE_SOURCES;
  module.attr("VERSION") = HPCPIPE_VERSION;
}
