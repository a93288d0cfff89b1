// Attention of tokens to others of the same array, and its derivative: that of training, where there is no cache.
#pragma once

#include <cstdint>

namespace jaxis {

// T tokens, H query heads, K key-value heads of D elements, D a multiple of 16. Token t sees tokens first[t] to last[t]
// of the array, both included, and at least one. Sequences and windows are such ranges.
struct SequenceAttention {
  const float* q;        // [T, H, D]
  const float* k;        // [T, K, D]
  const float* v;        // [T, K, D]
  const int32_t* first;  // [T]
  const int32_t* last;   // [T]
  float* out;            // [T, H, D]
  float* log_sums;       // [T, H]: logarithms of the sums that the softmaxes divide by
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;  // of scores
};

// From the derivative by the output those by queries, keys and values. Weights are computed again from log_sums
// (arXiv:2205.14135), so that nothing of the size of T * T is kept.
struct SequenceAttentionGradient {
  SequenceAttention forward;  // with its results
  const float* out_gradient;  // [T, H, D]
  float* q_gradient;          // [T, H, D]
  float* k_gradient;          // [T, K, D]
  float* v_gradient;          // [T, K, D]
};

}  // namespace jaxis
