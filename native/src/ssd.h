// Mamba2's recurrence.
#pragma once

#include <cstdint>

#include "state_slots.h"

namespace jaxis {

// T tokens, H heads, of which H / G in a row share b and c. For each head, token by token:
//
//   S = exp(dt * a) * S + (dt * x) b^T;  y = S c + d * x
//
// The rows of S are independent of each other, and each sum over N has one order.
struct Ssd {
  const float* x;   // [T, H, P]
  const float* dt;  // [T, H]
  const float* a;   // [H]
  const float* b;   // [T, G, N]
  const float* c;   // [T, G, N]
  const float* d;   // [H], or null: zeros
  float* state;     // [num_slots, H, P, N]
  float* y;         // [T, H, P]
  StateSlots slots;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_groups;
  int64_t head_dim;    // P
  int64_t state_size;  // N
};

}  // namespace jaxis
