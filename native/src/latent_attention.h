// Attention of a flat batch of tokens over a paged cache of latents, one entry a token that all heads share.
#pragma once

#include <cstdint>

#include "attention.h"

namespace jaxis {

// Writes the step's entries into the cache, then attends: scores are products with whole entries, values are their
// first V elements. T tokens of R requests, H query heads, entries of D elements; D and V are multiples of 16. Request
// r's tokens are rows query_start_loc[r] to [r + 1] of the flat batch and the last of its seq_lens[r] positions; rows
// past the last request's are padding and become 0.
//
// With `selected`, a token at position num_selected or later sees only the tokens whose positions its row lists, in
// ascending order, up to the first -1. Earlier tokens see all before them, and nothing reads their rows.
//
// The cache is [num_blocks][block_size] entries. An int8 entry has after its D elements two float32 scales: of the
// first V elements, and of the rest.
struct LatentAttention {
  const float* q;        // [T, H, D]
  const float* entries;  // [T, D]
  void* cache;
  const int32_t* seq_lens;         // [R]
  const int32_t* block_tables;     // [R, max_blocks]
  const int32_t* query_start_loc;  // [R + 1]
  float* out;                      // [T, H, V]
  CacheType type;
  int64_t num_tokens;
  int64_t num_requests;
  int64_t num_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t block_size;
  int64_t max_blocks;
  float scale;
  const float* sinks = nullptr;       // [H]; exp(sink) is added to the sum that the softmax divides by
  const int32_t* selected = nullptr;  // [T, num_selected]
  int64_t num_selected = 0;
};

}  // namespace jaxis
