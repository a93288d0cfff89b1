// Rotary position embedding of queries and keys.
#pragma once

#include <cstdint>

namespace jaxis {

// Rotates the first 2 * pairs of each head's head_dim elements: pair i by the angle whose cosine and sine, for token t,
// are cos[t, i] and sin[t, i]. Before that each head gets its RMS norm if there are weights for it. It may be done in
// place.
struct RotaryEmbedding {
  const float* q;  // [tokens, q_heads, head_dim]
  const float* k;  // [tokens, k_heads, head_dim]
  const float* cos;
  const float* sin;
  const float* q_norm;  // [head_dim], null without
  const float* k_norm;
  float* q_out;
  float* k_out;
  int64_t tokens;
  int64_t q_heads;
  int64_t k_heads;
  int64_t head_dim;
  int64_t pairs;
  bool interleaved;  // pairs are elements (2i, 2i + 1); otherwise (i, i + pairs)
  float epsilon;
};

}  // namespace jaxis
