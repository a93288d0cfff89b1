// Short causal convolution of channels over a request's tokens.
#pragma once

#include <cstdint>

#include "matmul.h"
#include "quantize.h"
#include "state_slots.h"

namespace jaxis {

constexpr int64_t kMaxConvWidth = 8;

// y[t] = activation(bias + sum over j of weight[j] * x[t - W + 1 + j]), for each channel, summed in the taps' order.
// Before a request's first token, x is what its slot holds: the last W - 1 inputs as they were, oldest first.
struct CausalConv {
  const void* x;        // [T, C]
  const float* weight;  // [C, W]
  const float* bias;    // [C], or null: zeros
  void* state;          // [num_slots, W - 1, C], of x's type
  float* y;             // [T, C]
  FloatType type;       // of x and state
  StateSlots slots;
  int64_t num_tokens;
  int64_t num_channels;
  int64_t width;          // W, from 2 to kMaxConvWidth
  Activation activation;  // kNone or kSilu
};

}  // namespace jaxis
