// Which tokens of a paged context each token attends to: those that an indexer scores best.
#pragma once

#include <cstdint>

#include "attention.h"

namespace jaxis {

// Writes the step's index keys into their cache, then selects the num_selected best tokens up to each token itself. The
// score of a key is the sum over heads of weight * max(0, q . key); of equal scores the earlier token's counts as
// better. The first num_first and the last num_last tokens that a token sees, at most num_selected together, are always
// selected. T tokens of R requests, H heads, keys of D elements; D is a multiple of 16. Requests as in LatentAttention.
//
// With a group_size G over 1, G consecutive tokens share a key, which is in the cache already: a token sees the groups
// whose last token is `delay` tokens before it or more, and their numbers are selected.
//
// Without weights, each head selects for itself blocks of G consecutive tokens, which have a key each: those with the
// best q . key of the tokens up to the query, and in any case its own block. Blocks' numbers are selected.
//
// The cache is [num_blocks][block_size] keys. An int8 key has its float32 scale after its D elements.
struct IndexSelection {
  const float* q;        // [T, H, D]
  const float* weights;  // [T, H]; null if heads select blocks
  const float* keys;     // [T, D]; null if groups share keys
  void* cache;
  const int32_t* seq_lens;         // [R]
  const int32_t* block_tables;     // [R, max_blocks]
  const int32_t* query_start_loc;  // [R + 1]
  int32_t*
      selected;  // [T, num_selected], or [T, H, num_selected]: ascending numbers; -1 after them, and in padding rows
  CacheType type;
  int64_t num_tokens;
  int64_t num_requests;
  int64_t num_heads;
  int64_t head_dim;
  int64_t block_size;  // keys of a block
  int64_t max_blocks;
  int64_t num_selected;
  int64_t group_size = 1;
  int64_t delay = 0;
  int64_t num_first = 0;
  int64_t num_last = 0;
};

}  // namespace jaxis
