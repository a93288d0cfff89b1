// The two products of attention, queries by keys and weights by values, blocked so that sums stay in registers.
//
// Each sum runs in one chain in order of its terms (along D, and along the context), however the work is blocked, so a
// query's result does not depend on which other queries share its tile.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "attention_cache.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

#if defined(JAXIS_SIMD_AVX512)
constexpr int kScoreRows = 12;
constexpr int kValueRows = 6;
constexpr int score_vectors(int rows) { return rows <= 6 ? 4 : 2; }
constexpr int value_vectors(int rows) { return rows <= 3 ? 8 : 4; }
#else
constexpr int kScoreRows = 6;
constexpr int kValueRows = 3;
constexpr int score_vectors(int rows) { return rows <= 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int value_vectors(int rows) { return rows <= 1 ? 4 : 2; }
#endif

// Tiles of entries in the order of reading. While one is read, the one `ahead` places further on is fetched from memory
// (0: none): blocks are scattered, so that the processor cannot foresee where the next one lies.
template <typename T>
struct Tiles {
  const T* const* data;
  int64_t ahead;

  Tiles operator+(int64_t i) const { return {data + i, ahead}; }
};

constexpr int64_t kCacheLine = 64;

// Fetches the line at p + offset, if a new one begins there.
template <typename T>
JAXIS_INLINE void prefetch(const T* p, int64_t offset) {
  constexpr int64_t line = kCacheLine / static_cast<int64_t>(sizeof(T));
  if (offset % line == 0) __builtin_prefetch(p + offset);
}

// Scores of R queries against V tiles of 16 keys.
//   q       [D][R], scaled
//   keys    V tiles
//   scores  R rows of [V * 16], `stride` apart
template <int R, int V, typename T>
void score_block(const float* q, Tiles<T> keys, int64_t head_dim, float* scores, int64_t stride) {
  F32x16 sums[R][V];
  const T* key_tiles[V];
  const T* ahead[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    key_tiles[v] = keys.data[v];
    ahead[v] = keys.data[v + keys.ahead];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r][v] = zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    F32x16 key[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) key[v] = load_entry(key_tiles[v] + d * kKeyTile);
    if (keys.ahead != 0) {
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) prefetch(ahead[v], d * kKeyTile);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 query = broadcast(q[d * R + r]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] = fma(query, key[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(scores + r * stride + v * kKeyTile, sums[r][v]);
  }
}

template <int R, typename T>
void score_tiles(const float* q, Tiles<T> keys, int64_t num_tiles, int64_t head_dim, float* scores, int64_t stride) {
  constexpr int V = score_vectors(R);
  int64_t t = 0;
  for (; t + V <= num_tiles; t += V) score_block<R, V>(q, keys + t, head_dim, scores + t * kKeyTile, stride);
  for (; t < num_tiles; ++t) score_block<R, 1>(q, keys + t, head_dim, scores + t * kKeyTile, stride);
}

// Scores of `rows` (at most kScoreRows) queries against `num_tiles` tiles; see score_block.
template <typename T>
void score(int rows, const float* q, Tiles<T> keys, int64_t num_tiles, int64_t head_dim, float* scores,
           int64_t stride) {
  with_count<kScoreRows>(rows, [&](auto r) { score_tiles<r()>(q, keys, num_tiles, head_dim, scores, stride); });
}

// Adds to V * 16 elements of each of R rows the values of the context's tokens `first` to `last`, by their weights.
//   weights  R rows, `stride` apart, indexed by token
//   values   tiles of [16][D], indexed by token / 16
//   sums     R rows of [D]
template <int R, int V, typename T>
void weigh_block(const float* weights, int64_t stride, Tiles<T> values, int64_t first, int64_t last, int64_t head_dim,
                 int64_t d, float* sums) {
  F32x16 sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = load(sums + r * head_dim + d + v * kLanes);
  }
  for (int64_t token = first; token < last;) {
    const int64_t end = (token / kKeyTile + 1) * kKeyTile < last ? (token / kKeyTile + 1) * kKeyTile : last;
    const T* const* tile = values.data + token / kKeyTile;
    for (int64_t i = token % kKeyTile * head_dim + d; token < end; ++token, i += head_dim) {
      F32x16 terms[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) terms[v] = load_entry(tile[0] + i + v * kLanes);
      if (values.ahead != 0) {
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) prefetch(tile[values.ahead], i + v * kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const F32x16 weight = broadcast(weights[r * stride + token]);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[r][v] = fma(weight, terms[v], sum[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(sums + r * head_dim + d + v * kLanes, sum[r][v]);
  }
}

// As many vectors of D at once as registers hold, then the rest in smaller pieces.
template <int R, int V, typename T>
void weigh_rows(const float* weights, int64_t stride, Tiles<T> values, int64_t first, int64_t last, int64_t head_dim,
                int64_t d, float* sums) {
  for (; d + V * kLanes <= head_dim; d += V * kLanes) {
    weigh_block<R, V>(weights, stride, values, first, last, head_dim, d, sums);
  }
  if constexpr (V > 1) weigh_rows<R, V / 2>(weights, stride, values, first, last, head_dim, d, sums);
}

// For `rows` (at most kValueRows) queries; see weigh_block.
template <typename T>
void weigh(int rows, const float* weights, int64_t stride, Tiles<T> values, int64_t first, int64_t last,
           int64_t head_dim, float* sums) {
  with_count<kValueRows>(rows, [&](auto r) {
    weigh_rows<r(), value_vectors(r())>(weights, stride, values, first, last, head_dim, 0, sums);
  });
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
