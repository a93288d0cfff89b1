// Attention of a tile of query rows to a piece of a paged context of latents.
//
// A row is one head of one query. A vector holds one element of 16 rows while scores are computed, so that entries are
// read as they lie in the cache, and 16 elements of an entry while values are summed. Each sum runs in one chain, along
// D and along the context, whatever else is in the tile: a row's result depends on its own request only.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention_cache.h"
#include "latent_attention.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {
namespace latent {

constexpr int64_t kTileRows = 48;
// The context is cut at multiples of this many tokens for every query, so that pieces can be computed in any order.
constexpr int64_t kChunk = 192;
// Tokens that go through all stages together: their float32 entries stay in the second-level cache.
constexpr int64_t kPiece = 48;
// A score far below all others, which, unlike infinity, can be subtracted from itself.
constexpr float kLowest = -1e30f;

// Tokens whose scores are computed together, for `vectors` vectors of rows; and blocks of the sums of values.
#if defined(JAXIS_SIMD_AVX512)
constexpr int kRowVectors = 3;
constexpr int score_tokens(int vectors) { return vectors <= 2 ? 12 : 8; }
constexpr int kValueRows = 8;
constexpr int kValueVectors = 2;
#else
constexpr int kRowVectors = 1;
constexpr int score_tokens(int) { return 6; }
constexpr int kValueRows = 4;
constexpr int kValueVectors = 1;
#endif

// Consecutive rows of one request; of one query, if it sees selected tokens only.
struct Tile {
  const int32_t* block_table;
  const int32_t* selected;  // the positions that the rows see; null: all up to their own
  int64_t num_selected;
  int64_t first_row;  // of the flat batch's T * H
  int64_t rows;
  int64_t padded_rows;  // a multiple of 16
  int64_t first_row_of_request;
  int64_t first_position;  // of the request's first query

  int64_t position(int64_t row, int64_t num_heads) const {
    return first_position + (first_row - first_row_of_request + row) / num_heads;
  }
};

// Sums over some context, relative to exp(peak).
struct Sums {
  float* peak;    // [rows]
  float* total;   // [rows]
  float* values;  // [rows][V]

  static int64_t size(int64_t rows, int64_t value_dim) { return rows * (value_dim + 2); }
  static Sums at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
};

struct Workspace {
  float* q;                // [D][rows], scaled
  float* limits;           // [rows]: tokens that each row sees
  float* scores;           // [kPiece][rows]
  float* correction;       // [rows]
  float* float32_entries;  // [kPiece][D]
  Sums chunk;
  Sums sum;

  static int64_t size(int64_t rows, int64_t head_dim, int64_t value_dim) {
    return rows * (head_dim + kPiece + 2) + kPiece * head_dim + 2 * Sums::size(rows, value_dim);
  }
  // `rows` is a multiple of 16, so that every part begins at a cache line.
  static Workspace at(float* memory, int64_t rows, int64_t head_dim, int64_t value_dim) {
    Workspace w;
    const auto take = [&](int64_t size) {
      float* begin = memory;
      memory += size;
      return begin;
    };
    w.q = take(rows * head_dim);
    w.limits = take(rows);
    w.scores = take(kPiece * rows);
    w.correction = take(rows);
    w.float32_entries = take(kPiece * head_dim);
    w.chunk = Sums::at(take(Sums::size(rows, value_dim)), rows);
    w.sum = Sums::at(take(Sums::size(rows, value_dim)), rows);
    return w;
  }
};

template <typename T>
JAXIS_INLINE int64_t entry_bytes(const LatentAttention& a) {
  const int64_t scales = IsQuantized<T>::value ? 2 * static_cast<int64_t>(sizeof(float)) : 0;
  return a.head_dim * static_cast<int64_t>(sizeof(T)) + scales;
}

template <typename T>
JAXIS_INLINE char* find_entry(const LatentAttention& a, const int32_t* block_table, int64_t position) {
  const int64_t slot = block_table[position / a.block_size] * a.block_size + position % a.block_size;
  return static_cast<char*>(a.cache) + slot * entry_bytes<T>(a);
}

template <typename T>
void write_entry(const LatentAttention& a, const int32_t* block_table, int64_t row, int64_t position) {
  T* to = reinterpret_cast<T*>(find_entry<T>(a, block_table, position));
  const float* from = a.entries + row * a.head_dim;
  const float scales[2] = {encode(from, a.value_dim, to),
                           encode(from + a.value_dim, a.head_dim - a.value_dim, to + a.value_dim)};
  if (IsQuantized<T>::value) std::memcpy(to + a.head_dim, scales, sizeof scales);
}

// The entry as float32: where it lies, or in `memory`.
JAXIS_INLINE const float* upcast(const LatentAttention&, const float* entry, float*) { return entry; }
JAXIS_INLINE const float* upcast(const LatentAttention& a, const bf16_t* entry, float* memory) {
  for (int64_t d = 0; d < a.head_dim; d += kLanes) store(memory + d, load_bf16(entry + d));
  return memory;
}
JAXIS_INLINE const float* upcast(const LatentAttention& a, const int8_t* entry, float* memory) {
  float scales[2];
  std::memcpy(scales, entry + a.head_dim, sizeof scales);
  const F32x16 of_value = broadcast(scales[0]), of_rest = broadcast(scales[1]);
  int64_t d = 0;
  for (; d < a.value_dim; d += kLanes) store(memory + d, load_i8(entry + d) * of_value);
  for (; d < a.head_dim; d += kLanes) store(memory + d, load_i8(entry + d) * of_rest);
  return memory;
}

void pack_rows(const LatentAttention& a, const Tile& tile, const Workspace& w) {
  const int64_t rows = tile.padded_rows;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t seen = tile.selected == nullptr ? tile.position(r, a.num_heads) + 1 : tile.num_selected;
    w.limits[r] = r < tile.rows ? static_cast<float>(seen) : 0.0f;
    const float* q = a.q + (tile.first_row + r) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) w.q[d * rows + r] = r < tile.rows ? q[d] * a.scale : 0.0f;
  }
}

// Scores of 16 * V rows against N entries: [N][rows].
template <int V, int N>
void score_block(const float* q, int64_t rows, const float* const* entries, int64_t head_dim, float* scores) {
  F32x16 sums[N][V];
  const float* entry[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    entry[n] = entries[n];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[n][v] = zero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    F32x16 query[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) query[v] = load(q + d * rows + v * kLanes);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const F32x16 element = broadcast(entry[n][d]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[n][v] = fma(query[v], element, sums[n][v]);
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(scores + n * rows + v * kLanes, sums[n][v]);
  }
}

template <int V>
void score_rows(const float* q, int64_t rows, const float* const* entries, int64_t count, int64_t head_dim,
                float* scores) {
  constexpr int N = score_tokens(V);
  int64_t t = 0;
  for (; t + N <= count; t += N) score_block<V, N>(q, rows, entries + t, head_dim, scores + t * rows);
  for (; t + 3 <= count; t += 3) score_block<V, 3>(q, rows, entries + t, head_dim, scores + t * rows);
  for (; t < count; ++t) score_block<V, 1>(q, rows, entries + t, head_dim, scores + t * rows);
}

void score(const float* q, int64_t rows, const float* const* entries, int64_t count, int64_t head_dim, float* scores) {
  int64_t r = 0;
  if constexpr (kRowVectors == 3) {
    for (; r + 3 * kLanes <= rows; r += 3 * kLanes) {
      score_rows<3>(q + r, rows, entries, count, head_dim, scores + r);
    }
    for (; r + 2 * kLanes <= rows; r += 2 * kLanes) {
      score_rows<2>(q + r, rows, entries, count, head_dim, scores + r);
    }
  }
  for (; r < rows; r += kLanes) score_rows<1>(q + r, rows, entries, count, head_dim, scores + r);
}

// Scores of `count` tokens from context position `first` on become weights; rows that do not see a token give it 0. Of
// selected tokens, their places in the list count as positions.
void softmax(const Workspace& w, int64_t rows, int64_t first, int64_t count) {
  const Sums& sums = w.chunk;
  for (int64_t r = 0; r < rows; r += kLanes) {
    const F32x16 limits = load(w.limits + r), before = load(sums.peak + r);
    F32x16 peak = before;
    for (int64_t t = 0; t < count; ++t) {
      const F32x16 token = broadcast(static_cast<float>(first + t + 1));
      const F32x16 hidden = keep_at_least(limits, token, broadcast(-kLowest)) + broadcast(kLowest);
      peak = max(peak, load(w.scores + t * rows + r) + hidden);
    }
    const F32x16 correction = exp(before - peak);
    F32x16 total = load(sums.total + r) * correction;
    for (int64_t t = 0; t < count; ++t) {
      const F32x16 token = broadcast(static_cast<float>(first + t + 1));
      const F32x16 weight = keep_at_least(limits, token, exp(load(w.scores + t * rows + r) - peak));
      total = total + weight;
      store(w.scores + t * rows + r, weight);
    }
    store(sums.peak + r, peak);
    store(sums.total + r, total);
    store(w.correction + r, correction);
  }
}

// Adds `count` entries by their weights [count][rows] to V * 16 elements of R rows' values.
template <int R, int V>
void weigh_block(const float* weights, int64_t rows, const float* const* entries, int64_t count, int64_t d,
                 int64_t value_dim, float* values) {
  F32x16 sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[r][v] = load(values + r * value_dim + d + v * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    F32x16 elements[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) elements[v] = load(entries[t] + d + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 weight = broadcast(weights[t * rows + r]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sums[r][v] = fma(weight, elements[v], sums[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(values + r * value_dim + d + v * kLanes, sums[r][v]);
  }
}

void weigh(const Workspace& w, int64_t rows, const float* const* entries, int64_t count, int64_t value_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = w.correction[r];
    if (factor == 1.0f) continue;
    float* values = w.chunk.values + r * value_dim;
    for (int64_t d = 0; d < value_dim; d += kLanes) store(values + d, load(values + d) * broadcast(factor));
  }
  // All rows take the same elements of the entries, while those are in the first-level cache.
  int64_t d = 0;
  for (; d + kValueVectors * kLanes <= value_dim; d += kValueVectors * kLanes) {
    for (int64_t r = 0; r < rows; r += kValueRows) {
      weigh_block<kValueRows, kValueVectors>(w.scores + r, rows, entries, count, d, value_dim,
                                             w.chunk.values + r * value_dim);
    }
  }
  for (; d < value_dim; d += kLanes) {
    for (int64_t r = 0; r < rows; r += kValueRows) {
      weigh_block<kValueRows, 1>(w.scores + r, rows, entries, count, d, value_dim, w.chunk.values + r * value_dim);
    }
  }
}

void clear(const Sums& sums, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    store(sums.peak + r, broadcast(kLowest));
    store(sums.total + r, zero());
  }
  std::memset(sums.values, 0, static_cast<size_t>(rows * value_dim) * sizeof(float));
}

// Attends to context tokens [first, last), into w.chunk.
template <typename T>
void attend(const LatentAttention& a, const Tile& tile, int64_t first, int64_t last, const Workspace& w) {
  const int64_t rows = tile.padded_rows;
  clear(w.chunk, rows, a.value_dim);
  for (; first < last; first += kPiece) {
    const int64_t count = last - first < kPiece ? last - first : kPiece;
    const float* entries[kPiece];
    for (int64_t t = 0; t < count; ++t) {
      const int64_t position = tile.selected == nullptr ? first + t : tile.selected[first + t];
      const T* entry = reinterpret_cast<const T*>(find_entry<T>(a, tile.block_table, position));
      entries[t] = upcast(a, entry, w.float32_entries + t * a.head_dim);
    }
    score(w.q, rows, entries, count, a.head_dim, w.scores);
    softmax(w, rows, first, count);
    weigh(w, rows, entries, count, a.value_dim);
  }
}

JAXIS_INLINE float exp_of(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

// Adds a chunk's sums to those of the chunks before it.
void merge(const Sums& sum, const Sums& chunk, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    // The row saw nothing of the chunk.
    if (chunk.total[r] == 0.0f) continue;
    const float peak = sum.peak[r] > chunk.peak[r] ? sum.peak[r] : chunk.peak[r];
    const float old_factor = exp_of(sum.peak[r] - peak), new_factor = exp_of(chunk.peak[r] - peak);
    sum.peak[r] = peak;
    sum.total[r] = sum.total[r] * old_factor + chunk.total[r] * new_factor;
    float* to = sum.values + r * value_dim;
    const float* from = chunk.values + r * value_dim;
    for (int64_t d = 0; d < value_dim; d += kLanes) {
      store(to + d, fma(load(from + d), broadcast(new_factor), load(to + d) * broadcast(old_factor)));
    }
  }
}

// Divides by the sums of weights, sinks among them, and writes the tile's rows of the output.
void write_output(const LatentAttention& a, const Tile& tile, const Sums& sum) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float total = sum.total[r], factor = 1.0f;
    if (a.sinks != nullptr) {
      const float sink = a.sinks[(tile.first_row + r) % a.num_heads];
      const float peak = sum.peak[r] > sink ? sum.peak[r] : sink;
      factor = exp_of(sum.peak[r] - peak);
      total = total * factor + exp_of(sink - peak);
    }
    float* out = a.out + (tile.first_row + r) * a.value_dim;
    const F32x16 factors = broadcast(factor / total);
    const float* values = sum.values + r * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += kLanes) store(out + d, load(values + d) * factors);
  }
}

}  // namespace latent
}  // namespace
}  // namespace jaxis::JAXIS_ISA
