// The arithmetic of the update rules, one element (or one vector of elements) at a time.
//
// Written once for all targets: T is float on CUDA and in scalar tails, a vector elsewhere. Operations and their order
// are those of torch's CPU kernels; `fused` stands exactly where those use a fused multiply-add, and compilers are told
// not to contract anything else, so that all targets with FMA give equal bits.
//
// Include after the target's own number type (vector.h on the CPU), whose operations the templates must find.
#pragma once

#include "call.h"
#include "number.h"

namespace hpcpipe {
namespace HPCPIPE_TARGET {

// --- The rules ------------------------------------------------------------------------------------------------------

// Round the bits of a float to bfloat16, to nearest even; the result is in the low half.
template <class Bits>
HPCPIPE_INLINE Bits round_to_bfloat16(Bits bits) {
  const Bits nan = nan_mask(bits);
  const Bits rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) >> 16;
  return (rounded & ~nan) | (nan & 0x7fc0u);
}

template <class T>
HPCPIPE_INLINE T prepared_gradient(T g, const Group& group) {
  if (group.flags & kScale) g = g * splat(group.grad_scale, T{});
  if (group.flags & kMaximize) g = -g;
  return g;
}

// torch.optim.SGD: returns the new weight; `buffer` is the momentum buffer.
template <class T>
HPCPIPE_INLINE T sgd(T g, T w, T& buffer, const Group& group) {
  g = prepared_gradient(g, group);
  if (group.flags & kWeightDecay) g = fused(w, splat(group.weight_decay, T{}), g);
  if (group.flags & kMomentum) {
    const T momentum = splat(group.momentum, T{});
    buffer = (group.flags & kFirst) ? g : fused(g, splat(group.blend, T{}), buffer * momentum);
    g = (group.flags & kNesterov) ? fused(buffer, momentum, g) : buffer;
  } else if (group.flags & kKeep) {
    buffer = g;
  }
  return fused(g, splat(group.minus_rate, T{}), w);
}

// sqrt(v_hat) + eps of Adam.
template <class T>
HPCPIPE_INLINE T adam_denominator(T exp_avg_sq, const Group& group) {
  return root(exp_avg_sq) / splat(group.correction, T{}) + splat(group.eps, T{});
}

// torch.optim.Adam and AdamW: returns the new weight.
template <class T>
HPCPIPE_INLINE T adam(T g, T w, T& exp_avg, T& exp_avg_sq, const Group& group) {
  g = prepared_gradient(g, group);
  if (group.flags & kDecoupled) w = w * splat(group.decay, T{});
  if (group.flags & kWeightDecay) g = fused(w, splat(group.weight_decay, T{}), g);
  exp_avg = fused(splat(group.lerp, T{}), g - exp_avg, (group.flags & kLerpFromEnd) ? g : exp_avg);
  exp_avg_sq = fused(splat(group.blend, T{}) * g, g, exp_avg_sq * splat(group.momentum, T{}));
  return w + (splat(group.minus_rate, T{}) * exp_avg) / adam_denominator(exp_avg_sq, group);
}

// Output i: factor * w - coef * direction.
template <class T>
HPCPIPE_INLINE T predicted(T w, T direction, const Group& group, int i) {
  if (group.flags & (kFactor0 << i)) w = w * splat(group.factor[i], T{});
  if (group.flags & (kCoef0 << i)) w = fused(direction, splat(group.minus_coef[i], T{}), w);
  return w;
}

// --- One element of a call ------------------------------------------------------------------------------------------

enum class Mode { kUpdate, kKeepWeights };  // kKeepWeights: no gradient, or predict_only

// Update (or carry over) the element(s) at flat index i and write all outputs. Memory is reached through Access<T>,
// which knows how the target loads, stores, and writes past the caches.
template <Rule rule, Mode mode, class T, class Access, class Element>
HPCPIPE_INLINE void element(const Call& call, const Group& group, const Element* gradient, int64_t i) {
  T w = Access::load(call.weights + i, T{});
  T first{}, second{};
  if (call.state[0] != nullptr) first = Access::load(call.state[0] + i, T{});
  if (rule == Rule::kAdam) second = Access::load(call.state[1] + i, T{});
  if (mode == Mode::kUpdate) {
    const T g = Access::load(gradient, T{});
    if (rule == Rule::kSgd) {
      w = sgd(g, w, first, group);
      if (group.flags & (kMomentum | kKeep)) Access::store(call.state[0] + i, first);
    } else {
      w = adam(g, w, first, second, group);
      Access::store(call.state[0] + i, first);
      Access::store(call.state[1] + i, second);
    }
  }
  if (call.next != nullptr) Access::store_weights(call.next + i, w);
  if (call.outputs == 0) return;
  T direction = first;
  if (rule == Rule::kAdam) direction = first / adam_denominator(second, group);
  for (int k = 0; k < call.outputs; ++k) {
    const T value = predicted(w, direction, group, k);
    if (call.output[k].bfloat16) {
      Access::store_bfloat16(static_cast<uint16_t*>(call.output[k].data) + i, value);
    } else {
      Access::store_output(static_cast<float*>(call.output[k].data) + i, value);
    }
  }
}

}  // namespace HPCPIPE_TARGET
}  // namespace hpcpipe
