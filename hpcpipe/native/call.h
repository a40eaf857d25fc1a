// One update call as plain data: what the bindings fill in, and what the CPU and CUDA kernels read.
// Holds no code, so that every translation unit may include it whatever instruction set it is compiled for.
#pragma once

#include <cstdint>

namespace hpcpipe {

constexpr int kMaxOutputs = 3;
constexpr int kMaxStates = 2;

// A slot starts on a multiple of this many elements in every buffer of a layout.
constexpr int64_t kSlotAlignment = 16;

enum class Rule : int { kSgd = 0, kAdam = 1 };

enum Flag : uint32_t {
  kScale = 1u << 0,         // multiply the gradient by grad_scale
  kMaximize = 1u << 1,      // negate the gradient
  kWeightDecay = 1u << 2,   // add weight_decay * w to the gradient
  kDecoupled = 1u << 3,     // multiply w by decay first
  kMomentum = 1u << 4,      // SGD: a momentum buffer is applied
  kFirst = 1u << 5,         // SGD: the first update, the buffer becomes the gradient
  kNesterov = 1u << 6,      // SGD
  kKeep = 1u << 7,          // SGD without momentum: keep the gradient in the buffer
  kLerpFromEnd = 1u << 8,   // Adam: 1 - beta1 >= 0.5, torch's lerp then starts from the gradient
  kFactor0 = 1u << 16,      // output i: factor differs from 1 (kFactor0 << i)
  kCoef0 = 1u << 20,        // output i: the direction takes part (kCoef0 << i)
};

// Constants of one parameter group, rounded to float once as torch rounds its scalars.
struct Group {
  uint32_t flags;
  float grad_scale;
  float weight_decay;
  float minus_rate;         // SGD: -lr; Adam: -(lr / bias correction 1)
  float momentum;           // SGD: momentum; Adam: beta2
  float blend;              // SGD: 1 - dampening; Adam: 1 - beta2
  float lerp;               // Adam: weight of the lerp (less 1 under kLerpFromEnd)
  float decay;              // AdamW: 1 - lr * weight_decay
  float correction;         // Adam: sqrt of bias correction 2
  float eps;                // Adam
  float factor[kMaxOutputs];
  float minus_coef[kMaxOutputs];  // Adam: already divided by bias correction 1
};

struct Slot {
  int64_t offset;  // elements
  int64_t numel;
  int32_t group;
};

// Where the gradient of a slot lies; null without one.
struct Gradient {
  const void* data;
  bool bfloat16;
};

struct OutputBuffer {
  void* data;
  bool bfloat16;
};

struct Call {
  Rule rule;
  bool predict_only;
  bool aligned;             // all flat buffers start on a cache line
  bool stream_weights;      // CPU: write next past the caches (never where it is also read)
  bool stream_outputs;      // CPU: write the outputs past the caches
  int outputs;
  const float* weights;
  float* next;              // null when predict_only
  float* state[kMaxStates]; // null where the rule keeps none
  OutputBuffer output[kMaxOutputs];
};

}  // namespace hpcpipe
