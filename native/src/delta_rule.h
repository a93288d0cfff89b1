// The gated delta rule.
#pragma once

#include <cstdint>

#include "state_slots.h"

namespace jaxis {

// T tokens, Hv value heads, of which Hv / Hk in a row share a key head. For each value head, token by token:
//
//   S = decay * S;  u = beta * (v - k S);  S += k^T u;  out = q S
//
// where q and k are divided by sqrt(sum(x ** 2) + epsilon) first if has_norm is set, and q is multiplied by scale. The
// columns of S are independent of each other, and each sum goes over the rows of S in order.
struct GatedDeltaRule {
  const float* q;          // [T, Hk, key_dim]
  const float* k;          // [T, Hk, key_dim]
  const float* v;          // [T, Hv, value_dim]
  const float* log_decay;  // [T, Hv, num_decays]
  const float* beta;       // [T, Hv]
  float* state;            // [num_slots, Hv, key_dim, value_dim]
  float* out;              // [T, Hv, value_dim]
  StateSlots slots;
  int64_t num_tokens;
  int64_t num_key_heads;
  int64_t num_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t num_decays;  // 1, or key_dim: one for each row of S
  bool has_norm;
  float epsilon;
  float scale;
};

}  // namespace jaxis
