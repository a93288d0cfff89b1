// Attention of a flat batch of tokens over a paged cache of keys and values.
#pragma once

#include <cstdint>

namespace jaxis {

// Tokens whose keys are transposed together, and what dimensions of heads are multiples of.
constexpr int64_t kAttentionTile = 16;
constexpr int64_t kMaxHeadDim = 512;  // of paged attention and of attention without a cache

enum class CacheType { kFloat32, kBfloat16, kInt8 };

// Writes the step's keys and values into the cache, unless they are there already, then attends. T tokens of R
// requests, H query heads, K key-value heads of D elements; D and block_size are multiples of 16. Request r's tokens
// are rows query_start_loc[r] to [r + 1] of the flat batch and the last of its seq_lens[r] positions; rows past the
// last request's are padding and become 0.
//
// The cache is an array of blocks, each of K heads, each of which has in one piece:
//   keys    [block_size / 16][D][16]: transposed in tiles of 16 tokens, so that a vector holds 16 keys;
//   values  [block_size][D];
//   int8 only: float32 scales of the keys [block_size] and of the values [block_size], one a token.
struct PagedAttention {
  const float* q;  // [T, H, D]
  const float* k;  // [T, K, D], or null: another call has written the step's keys and values
  const float* v;  // [T, K, D], or null with k
  void* cache;
  const int32_t* seq_lens;         // [R]
  const int32_t* block_tables;     // [R, max_blocks]
  const int32_t* query_start_loc;  // [R + 1]
  const float* sinks;              // [H] or [T, H], or null; exp(sink) is added to the sum that the softmax divides by
  const float* bias;               // [T, H, bias_extent], or null; added to scores of the keys so many tokens before
  float* out;                      // [T, H, D]
  CacheType type;
  int64_t num_tokens;
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t max_blocks;
  int64_t sinks_stride;  // from a token's sinks to the next one's; 0: all have the same
  int64_t bias_extent;
  int64_t window;      // a token sees itself and this many - 1 before it,
  int64_t chunk_size;  // but nothing before the last multiple of this,
  int64_t lookahead;   // and this many after it, up to the end of its sequence
  float scale;
  float soft_cap;  // 0: none
};

}  // namespace jaxis
