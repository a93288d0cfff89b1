// Attention of a tile of queries to one chunk of the context, and how chunks are put together.
//
// The context is cut at multiples of kChunk tokens for every query. Each chunk's softmax is relative to the chunk's own
// largest score; the chunks' sums are then merged in order (arXiv:2205.14135). So a query's arithmetic is a function of
// its position alone, and chunks can be computed in any order, on any thread.
#pragma once

#include <cstdint>

#include "attention.h"
#include "attention_cache.h"
#include "attention_products.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int64_t kChunk = 256;
constexpr int64_t kTilesPerChunk = kChunk / kKeyTile;
// Values that stay in the first-level cache while all queries of a tile take them.
constexpr int64_t kTilesAtOnce = 4;
constexpr int64_t kRowsToPrefetch = 16;
// Distance of score rows; no power of two, so that they do not fall into the same cache sets.
constexpr int64_t kScoreStride = kChunk + kLanes;
constexpr float kMinusInfinity = -__builtin_inff();

// Consecutive queries of one request and the heads that share a key-value head: row i * group_size + g is query i's
// g-th head.
struct QueryTile {
  const int32_t* block_table;
  int64_t kv_head;
  int64_t first_row;  // of the flat batch
  int64_t num_queries;
  int64_t position;  // the first query's
  int64_t seq_len;
  int64_t group_size;
  int64_t rows;
};

// Weighted values of some context: sums of weights and of weighted values, both relative to exp(peak).
struct Partial {
  float* peak;    // [rows]
  float* total;   // [rows]
  float* values;  // [rows][D]

  static int64_t size(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }
  static Partial at(float* memory, int64_t rows, int64_t head_dim) {
    return {memory + rows * head_dim, memory + rows * (head_dim + 1), memory};
  }
};

struct Workspace {
  float* q;  // packed for score_block, block of rows by block
  float* scores;
  float* upcast;        // [kTilesAtOnce * 16 * D]
  float* key_scales;    // [kChunk]
  float* value_scales;  // [kChunk]
  Partial chunk;
  Partial sum;

  static int64_t size(int64_t rows, int64_t head_dim) {
    return rows * head_dim + rows * kScoreStride + kTilesAtOnce * kKeyTile * head_dim + 2 * kChunk +
           2 * Partial::size(rows, head_dim) + 8 * kLanes;
  }
  static Workspace at(float* memory, int64_t rows, int64_t head_dim) {
    Workspace w;
    const auto take = [&](int64_t size) {
      float* begin = memory;
      memory += (size + kLanes - 1) / kLanes * kLanes;
      return begin;
    };
    w.q = take(rows * head_dim);
    w.scores = take(rows * kScoreStride);
    w.upcast = take(kTilesAtOnce * kKeyTile * head_dim);
    w.key_scales = take(kChunk);
    w.value_scales = take(kChunk);
    w.chunk = Partial::at(take(Partial::size(rows, head_dim)), rows, head_dim);
    w.sum = Partial::at(take(Partial::size(rows, head_dim)), rows, head_dim);
    return w;
  }
};

// Row `index` of `count` nearly equal blocks of rows begins here.
JAXIS_INLINE int64_t block_start(int64_t rows, int64_t count, int64_t index) { return rows * index / count; }

JAXIS_INLINE float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(broadcast(x)));
  return lanes[0];
}

JAXIS_INLINE F32x16 cap(F32x16 x, float soft_cap) {
  // tanh(y) = 1 - 2 / (exp(2 y) + 1)
  const F32x16 power = exp(x * broadcast(2.0f / soft_cap)) + broadcast(1.0f);
  return broadcast(soft_cap) * (broadcast(1.0f) - broadcast(2.0f) / power);
}

// The first position that the token at `position` sees.
JAXIS_INLINE int64_t first_visible(const PagedAttention& a, int64_t position) {
  const int64_t chunk = position / a.chunk_size * a.chunk_size, oldest = position - a.window + 1;
  return oldest > chunk ? oldest : chunk;
}

// The position after the last one that the token at `position` of the tile's sequence sees.
JAXIS_INLINE int64_t end_visible(const PagedAttention& a, const QueryTile& tile, int64_t position) {
  const int64_t end = position + 1 + a.lookahead;
  return end < tile.seq_len ? end : tile.seq_len;
}

// The number of a row's query in an array [T, H], and where its vector begins in an array [T, H, D].
JAXIS_INLINE int64_t row_index(const PagedAttention& a, const QueryTile& tile, int64_t row) {
  const int64_t head = tile.kv_head * tile.group_size + row % tile.group_size;
  return (tile.first_row + row / tile.group_size) * a.num_heads + head;
}
JAXIS_INLINE int64_t row_offset(const PagedAttention& a, const QueryTile& tile, int64_t row) {
  return row_index(a, tile, row) * a.head_dim;
}

void pack_queries(const PagedAttention& a, const QueryTile& tile, float* packed) {
  const int64_t head_dim = a.head_dim, blocks = (tile.rows + kScoreRows - 1) / kScoreRows;
  const float scale = a.scale;
  // All at once: a tile's rows lie apart, and to wait for one after the other takes long.
  for (int64_t row = 0; row < tile.rows; ++row) {
    for (int64_t d = 0; d < head_dim; d += kLanes) __builtin_prefetch(a.q + row_offset(a, tile, row) + d);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = block_start(tile.rows, blocks, b), size = block_start(tile.rows, blocks, b + 1) - begin;
    for (int64_t r = 0; r < size; ++r) {
      const float* q = a.q + row_offset(a, tile, begin + r);
      float* out = packed + begin * head_dim + r;
      for (int64_t d = 0; d < head_dim; ++d) out[d * size] = q[d] * scale;
    }
  }
}

// A row's biases of scores: bias[i] is that of the key i tokens before `origin`, the place of the row's own token.
struct RowBias {
  const float* bias;
  int64_t extent;
  int64_t origin;
};

// Scores [begin, end) become weights, those outside of [first, last) being 0; begin and end are multiples of 16.
void softmax_row(float* scores, int64_t begin, int64_t end, int64_t first, int64_t last, const RowBias& bias,
                 float soft_cap, const float* key_scales, const float* value_scales, float* peak, float* total) {
  *peak = kMinusInfinity;
  *total = 0.0f;
  int64_t i = begin;
  if (first < last) {
    const int64_t from = first / kLanes * kLanes, to = (last + kLanes - 1) / kLanes * kLanes;
    for (; i < from; i += kLanes) store(scores + i, zero());
    if (key_scales != nullptr) {
      for (i = from; i < to; i += kLanes) store(scores + i, load(scores + i) * load(key_scales + i));
    }
    const int64_t oldest = bias.origin - bias.extent + 1, newest = bias.origin + 1;
    const int64_t biased = last < newest ? last : newest;
    for (i = first > oldest ? first : oldest; i < biased; ++i) scores[i] += bias.bias[bias.origin - i];
    if (soft_cap != 0.0f) {
      for (i = from; i < to; i += kLanes) store(scores + i, cap(load(scores + i), soft_cap));
    }
    for (i = from; i < first; ++i) scores[i] = kMinusInfinity;
    for (i = last; i < to; ++i) scores[i] = kMinusInfinity;
    F32x16 peaks = load(scores + from);
    for (i = from + kLanes; i < to; i += kLanes) peaks = max(peaks, load(scores + i));
    *peak = reduce_max(peaks);
    const F32x16 shift = broadcast(*peak == kMinusInfinity ? 0.0f : *peak);
    F32x16 sum = zero();
    for (i = from; i < to; i += kLanes) {
      const F32x16 weight = exp(load(scores + i) - shift);
      sum = sum + weight;
      store(scores + i, value_scales == nullptr ? weight : weight * load(value_scales + i));
    }
    *total = reduce_add(sum);
  }
  for (; i < end; i += kLanes) store(scores + i, zero());
}

// Calls `product` with the tiles as they are, or, for many rows, with float32 copies, so as to upcast entries once.
template <typename T, typename Product>
void with_tiles(Tiles<T> tiles, int64_t count, int64_t tile_size, bool many_rows, float* memory, Product&& product) {
  if (sizeof(T) == sizeof(float) || !many_rows) return product(tiles);
  const float* copies[kTilesAtOnce];
  for (int64_t t = 0; t < count; ++t) {
    copies[t] = memory + t * tile_size;
    for (int64_t i = 0; i < tile_size; i += kLanes) store(memory + t * tile_size + i, load_entry(tiles.data[t] + i));
  }
  product(Tiles<float>{copies, 0});
}

// Attends to tokens [chunk * kChunk, + kChunk) as far as the tile's queries see them.
template <typename T>
void attend_chunk(const PagedAttention& a, const QueryTile& tile, int64_t chunk, const Workspace& w,
                  const Partial& out) {
  const int64_t origin = chunk * kChunk, context = end_visible(a, tile, tile.position + tile.num_queries - 1);
  const int64_t oldest = first_visible(a, tile.position);
  const int64_t first = oldest > origin ? oldest - origin : 0;
  const int64_t last = context - origin < kChunk ? context - origin : kChunk;
  const int64_t first_tile = first / kKeyTile, last_tile = (last + kKeyTile - 1) / kKeyTile;
  constexpr bool quantized = IsQuantized<T>::value;

  // Keys, values, and the next chunk's keys as far as they are fetched ahead: in the order of reading.
  const T* order[2 * kTilesPerChunk + kTilesAtOnce];
  const T** const keys = order - first_tile;
  const T** const values = keys + (last_tile - first_tile);
  for (int64_t t = first_tile; t < last_tile; ++t) {
    const CacheTile<T> found = find_tile<T>(a, tile.block_table, tile.kv_head, origin / kKeyTile + t);
    keys[t] = found.keys;
    values[t] = found.values;
    if (quantized) {
      store(w.key_scales + t * kKeyTile, load(found.key_scales));
      store(w.value_scales + t * kKeyTile, load(found.value_scales));
    }
  }

  for (int64_t t = 0; t < kTilesAtOnce; ++t) {
    const int64_t next = (origin + kChunk) / kKeyTile + t;
    values[last_tile + t] =
        next * kKeyTile < context ? find_tile<T>(a, tile.block_table, tile.kv_head, next).keys : values[last_tile - 1];
  }
  // Many rows are computed for longer than memory takes.
  const int64_t ahead = tile.rows <= kRowsToPrefetch ? kTilesAtOnce : 0;

  const int64_t tile_size = kKeyTile * a.head_dim;
  const int64_t score_blocks = (tile.rows + kScoreRows - 1) / kScoreRows;
  for (int64_t t = first_tile; t < last_tile; t += kTilesAtOnce) {
    const int64_t count = last_tile - t < kTilesAtOnce ? last_tile - t : kTilesAtOnce;
    with_tiles(Tiles<T>{keys + t, ahead}, count, tile_size, score_blocks > 2, w.upcast, [&](auto tiles) {
      for (int64_t b = 0; b < score_blocks; ++b) {
        const int64_t row = block_start(tile.rows, score_blocks, b);
        const int rows = static_cast<int>(block_start(tile.rows, score_blocks, b + 1) - row);
        score(rows, w.q + row * a.head_dim, tiles, count, a.head_dim, w.scores + row * kScoreStride + t * kKeyTile,
              kScoreStride);
      }
    });
  }

  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t position = tile.position + row / tile.group_size;
    const int64_t from = first_visible(a, position) - origin, to = end_visible(a, tile, position) - origin;
    const RowBias bias{a.bias + row_index(a, tile, row) * a.bias_extent, a.bias_extent, position - origin};
    softmax_row(w.scores + row * kScoreStride, first_tile * kKeyTile, last_tile * kKeyTile, from > 0 ? from : 0,
                to < kChunk ? to : kChunk, bias, a.soft_cap, quantized ? w.key_scales : nullptr,
                quantized ? w.value_scales : nullptr, out.peak + row, out.total + row);
  }

  for (int64_t i = 0; i < tile.rows * a.head_dim; i += kLanes) store(out.values + i, zero());
  const int64_t value_blocks = (tile.rows + kValueRows - 1) / kValueRows;
  for (int64_t t = first_tile; t < last_tile; t += kTilesAtOnce) {
    const int64_t count = last_tile - t < kTilesAtOnce ? last_tile - t : kTilesAtOnce;
    const int64_t begin = t * kKeyTile > first ? 0 : first - t * kKeyTile;
    const int64_t end = (t + count) * kKeyTile < last ? count * kKeyTile : last - t * kKeyTile;
    with_tiles(Tiles<T>{values + t, ahead}, count, tile_size, value_blocks > 2, w.upcast, [&](auto tiles) {
      for (int64_t b = 0; b < value_blocks; ++b) {
        const int64_t row = block_start(tile.rows, value_blocks, b);
        const int rows = static_cast<int>(block_start(tile.rows, value_blocks, b + 1) - row);
        weigh(rows, w.scores + row * kScoreStride + t * kKeyTile, kScoreStride, tiles, begin, end, a.head_dim,
              out.values + row * a.head_dim);
      }
    });
  }
}

// Adds a chunk's result to the sum of those before it.
void merge(const Partial& sum, const Partial& chunk, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    // Nothing of the chunk was visible. (A sum without anything yet has a factor of 0.)
    if (chunk.peak[r] == kMinusInfinity) continue;
    const float peak = sum.peak[r] > chunk.peak[r] ? sum.peak[r] : chunk.peak[r];
    const float old_factor = exp(sum.peak[r] - peak), new_factor = exp(chunk.peak[r] - peak);
    sum.peak[r] = peak;
    sum.total[r] = sum.total[r] * old_factor + chunk.total[r] * new_factor;
    const F32x16 old_factors = broadcast(old_factor), new_factors = broadcast(new_factor);
    float* to = sum.values + r * head_dim;
    const float* from = chunk.values + r * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(to + d, fma(load(from + d), new_factors, load(to + d) * old_factors));
    }
  }
}

void clear(const Partial& sum, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    sum.peak[r] = kMinusInfinity;
    sum.total[r] = 0.0f;
  }
  for (int64_t i = 0; i < rows * head_dim; i += kLanes) store(sum.values + i, zero());
}

// Divides by the sums of weights, sinks among them, and writes the tile's rows of the output.
void write_output(const PagedAttention& a, const QueryTile& tile, const Partial& sum) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t head = tile.kv_head * tile.group_size + row % tile.group_size;
    float total = sum.total[row], factor = 1.0f;
    if (a.sinks != nullptr) {
      const float sink = a.sinks[(tile.first_row + row / tile.group_size) * a.sinks_stride + head];
      const float peak = sum.peak[row] > sink ? sum.peak[row] : sink;
      factor = exp(sum.peak[row] - peak);
      total = total * factor + exp(sink - peak);
    }
    float* out = a.out + row_offset(a, tile, row);
    const F32x16 factors = broadcast(factor / total);
    const float* values = sum.values + row * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) store(out + d, load(values + d) * factors);
  }
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
