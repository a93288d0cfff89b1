// The experts of a mixture-of-experts block, from hidden states to hidden states: in each step only the weights of the
// experts hit are read, each once.
#pragma once

#include <cstdint>

#include "matmul.h"
#include "team.h"

namespace jaxis {

// One matrix [n, k] for each expert: the panels of matmul.h, one expert after the other.
struct ExpertMatrices {
  const uint8_t* data;
  const float* bias;  // [num_experts, n], or null
  WeightFormat format;
  int64_t n;

  const uint8_t* of(int64_t expert) const { return data + expert * num_panels(n) * panel_bytes(format); }
};

// out[t] = sum over slots s of weights[t, s] * down(activation(gate(x[t]), up(x[t]))), with the matrices of expert
// ids[t, s], summed in the order of the experts. A slot whose id is not in [0, num_experts) adds nothing.
//
// Addends are added to what gate and up give each slot, biases included. `hidden` is what each slot's `down` gets.
//
// A token's result does not depend on the other tokens: its sums have the same order in any batch.
struct Experts {
  const float* x;        // [tokens, gate.format.k]
  const int32_t* ids;    // [tokens, slots]
  const float* weights;  // [tokens, slots]
  int64_t tokens, slots, num_experts;
  ExpertMatrices gate, up, down;  // gate and up have one n, which is down.format.k; kReluSquared does not read gate
  bool quantize_activations;      // to int8, in groups
  Activation activation;          // not kNone
  float alpha;                    // of kClampedSwiglu and kSitu
  float limit;                    // of kClampedSwiglu, kCappedSwiglu, kLimitedSwiglu and kSitu
  const float* gate_addend;       // [tokens, slots, gate.n], as up_addend; null: nothing is added
  const float* up_addend;
  float* out;     // [tokens, down.n]
  float* hidden;  // [tokens, slots, gate.n], zeros of slots without an expert; null: it is not wanted
};

}  // namespace jaxis
