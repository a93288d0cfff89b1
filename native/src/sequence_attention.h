// Attention of tokens to others of the same array, and its derivative: that of training, where there is no cache.
#pragma once

#include <cstdint>

namespace jaxis {

// Q queries of T tokens, H query heads, K key-value heads of D elements, D a multiple of 16. Query t sees tokens
// first[t] to last[t], both included, and at least one. Sequences and windows are such ranges. A head's tokens lie
// together: rows that are a multiple of 4 KiB apart, as those of [T, H, D] often are, share few lines of the cache.
struct SequenceAttention {
  const float* q;        // [H, Q, D]
  const float* k;        // [K, T, D]
  const float* v;        // [K, T, D]
  const int32_t* first;  // [Q]
  const int32_t* last;   // [Q]
  float* out;            // [H, Q, D]
  float* log_sums;       // [H, Q]: logarithms of the sums that the softmaxes divide by
  int64_t num_queries;
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
  const float* out_gradient;  // [H, Q, D]
  float* q_gradient;          // [H, Q, D]
  float* k_gradient;          // [K, T, D]
  float* v_gradient;          // [K, T, D]
};

}  // namespace jaxis
