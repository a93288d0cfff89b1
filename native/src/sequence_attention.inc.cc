// Attention of tokens to others of the same array, and its derivative.
//
// A tile is 16 tokens of one query head, a lane each. All products are of one shape: sums over `count` of a number
// times a vector of lanes. Each sum runs in one chain in the order of its terms, whatever the number of threads.
#include "sequence_attention.h"

#include <cmath>
#include <cstdint>

#include "arithmetic.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int64_t kSpanKeys = 64;  // keys whose scores are computed before they are used
constexpr int kSumsAtOnce = 6;     // vectors of sums that stay in registers
constexpr float kLowestScore = -1e30f;

// Numbers at a[row * row_step + i * step].
struct Numbers {
  const float* a;
  int64_t row_step;
  int64_t step;
};

// out[row] (+)= the sum over i < count of numbers(row, i) * vectors[i], for rows [0, rows).
template <bool kAdds, int kRows>
void sum_products(Numbers numbers, const float* vectors, int64_t vector_step, int64_t count, float* out,
                  int64_t out_step, int64_t rows) {
  while (rows >= kRows) {
    F32x16 sums[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[r] = kAdds ? load(out + r * out_step) : zero();
    for (int64_t i = 0; i < count; ++i) {
      const F32x16 vector = load(vectors + i * vector_step);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r] = fma(broadcast(numbers.a[r * numbers.row_step + i * numbers.step]), vector, sums[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) store(out + r * out_step, sums[r]);
    numbers.a += kRows * numbers.row_step;
    out += kRows * out_step;
    rows -= kRows;
  }
  if constexpr (kRows > 1) {
    if (rows > 0) {
      sum_products<kAdds, kRows / 2>(numbers, vectors, vector_step, count, out, out_step, rows);
    }
  }
}

template <bool kAdds>
void sum_products(const Numbers& numbers, const float* vectors, int64_t vector_step, int64_t count, float* out,
                  int64_t out_step, int64_t rows) {
  sum_products<kAdds, kSumsAtOnce>(numbers, vectors, vector_step, count, out, out_step, rows);
}

// What the lanes of a tile see.
struct Sight {
  int64_t first;  // that some lane sees
  int64_t last;
  int64_t first_of_all;  // that all lanes see
  int64_t last_of_all;
  float firsts[kLanes];
  float lasts[kLanes];

  bool is_whole(int64_t begin, int64_t end) const { return begin >= first_of_all && end - 1 <= last_of_all; }
};

Sight sight_of(const SequenceAttention& a, int64_t tile) {
  const int64_t begin = tile * kLanes, rows = min_of(kLanes, a.num_queries - begin);
  Sight sight{a.first[begin], a.last[begin], a.first[begin], a.last[begin], {}, {}};
  for (int64_t i = 0; i < kLanes; ++i) {
    if (i >= rows) {
      // Lanes that are no queries see nothing.
      sight.firsts[i] = 1.0f;
      sight.lasts[i] = 0.0f;
      sight.first_of_all = a.num_tokens;
      continue;
    }
    const int64_t first = a.first[begin + i], last = a.last[begin + i];
    sight.first = min_of(sight.first, first);
    sight.last = max_of(sight.last, last);
    sight.first_of_all = max_of(sight.first_of_all, first);
    sight.last_of_all = min_of(sight.last_of_all, last);
    sight.firsts[i] = static_cast<float>(first);
    sight.lasts[i] = static_cast<float>(last);
  }
  return sight;
}

// x in lanes that see `key`, else 0.
JAXIS_INLINE F32x16 keep_seen(const Sight& sight, int64_t key, F32x16 x) {
  const F32x16 place = broadcast(static_cast<float>(key));
  return keep_at_least(place, load(sight.firsts), keep_at_least(load(sight.lasts), place, x));
}

// A head of a tile's rows [H, Q, D], transposed to [D][16] and multiplied.
void transpose_in(const SequenceAttention& a, const float* rows, int64_t tile, int64_t head, float factor, float* to) {
  const int64_t begin = tile * kLanes, count = min_of(kLanes, a.num_queries - begin);
  for (int64_t i = 0; i < kLanes; ++i) {
    const float* row = rows + (head * a.num_queries + begin + i) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) to[d * kLanes + i] = i < count ? row[d] * factor : 0.0f;
  }
}

// The other way: [D][16], lanes multiplied.
void transpose_out(const SequenceAttention& a, const float* from, const float* factors, int64_t tile, int64_t head,
                   float* rows) {
  const int64_t begin = tile * kLanes, count = min_of(kLanes, a.num_queries - begin);
  for (int64_t i = 0; i < count; ++i) {
    float* row = rows + (head * a.num_queries + begin + i) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) row[d] = from[d * kLanes + i] * factors[i];
  }
}

int64_t num_query_tiles(const SequenceAttention& a) { return ceil_div(a.num_queries, kLanes); }

float* buffer(Scratch name, int64_t size) {
  return static_cast<float*>(scratch(name, size * static_cast<int64_t>(sizeof(float))));
}

// Scores, or other products of a tile's queries with keys or values of a head, [keys][16].
void products_with_keys(const SequenceAttention& a, const float* keys, int64_t begin, int64_t end, int64_t kv_head,
                        const float* queries, float* out) {
  sum_products<false>({keys + (kv_head * a.num_tokens + begin) * a.head_dim, a.head_dim, 1}, queries, kLanes,
                      a.head_dim, out, kLanes, end - begin);
}

// Adds to sums [D][16] the keys or values of a head, weighted by [keys][16].
void add_weighted(const SequenceAttention& a, const float* keys, int64_t begin, int64_t end, int64_t kv_head,
                  const float* weights, float* sums) {
  sum_products<true>({keys + (kv_head * a.num_tokens + begin) * a.head_dim, 1, a.head_dim}, weights, kLanes,
                     end - begin, sums, kLanes, a.head_dim);
}

void attend(const SequenceAttention& a, int64_t tile, int64_t head) {
  const int64_t kv_head = head / (a.num_heads / a.num_kv_heads);
  float* queries = buffer(Scratch::kWorkspace, (2 * a.head_dim + kSpanKeys) * kLanes);
  float* sums = queries + a.head_dim * kLanes;
  float* scores = sums + a.head_dim * kLanes;
  transpose_in(a, a.q, tile, head, a.scale, queries);
  for (int64_t d = 0; d < a.head_dim; ++d) store(sums + d * kLanes, zero());
  const Sight sight = sight_of(a, tile);
  F32x16 peak = broadcast(kLowestScore), total = zero();
  for (int64_t begin = sight.first; begin <= sight.last; begin += kSpanKeys) {
    const int64_t end = min_of(begin + kSpanKeys, sight.last + 1);
    products_with_keys(a, a.k, begin, end, kv_head, queries, scores);
    const bool is_whole = sight.is_whole(begin, end);
    F32x16 new_peak = peak;
    for (int64_t key = begin; key < end; ++key) {
      float* score = scores + (key - begin) * kLanes;
      if (!is_whole) {
        const F32x16 hidden = keep_seen(sight, key, broadcast(-kLowestScore)) + broadcast(kLowestScore);
        store(score, load(score) + hidden);
      }
      new_peak = max(new_peak, load(score));
    }
    const F32x16 correction = exp(peak - new_peak);
    peak = new_peak;
    total = total * correction;
    for (int64_t d = 0; d < a.head_dim; ++d) store(sums + d * kLanes, load(sums + d * kLanes) * correction);
    for (int64_t key = begin; key < end; ++key) {
      float* score = scores + (key - begin) * kLanes;
      F32x16 weight = exp(load(score) - peak);
      if (!is_whole) weight = keep_seen(sight, key, weight);
      store(score, weight);
      total = total + weight;
    }
    add_weighted(a, a.v, begin, end, kv_head, scores, sums);
  }
  float peaks[kLanes], totals[kLanes], factors[kLanes];
  store(peaks, peak);
  store(totals, total);
  const int64_t rows = min_of(kLanes, a.num_queries - tile * kLanes);
  for (int64_t i = 0; i < rows; ++i) {
    factors[i] = 1.0f / totals[i];
    a.log_sums[head * a.num_queries + tile * kLanes + i] = peaks[i] + std::log(totals[i]);
  }
  transpose_out(a, sums, factors, tile, head, a.out);
}

// What is computed once of each tile and head for the derivative.
struct TileInputs {
  float* queries;         // [D][16], scaled
  float* out_gradients;   // [D][16]
  float* log_sums;        // [16]
  float* output_changes;  // [16]: of each row the product of its output with the derivative by it

  static int64_t size(int64_t head_dim) { return (2 * head_dim + 2) * kLanes; }
  static TileInputs at(float* p, int64_t head_dim) {
    return {p, p + head_dim * kLanes, p + 2 * head_dim * kLanes, p + (2 * head_dim + 1) * kLanes};
  }
};

void prepare(const SequenceAttentionGradient& g, int64_t tile, int64_t head, const TileInputs& to) {
  const SequenceAttention& a = g.forward;
  transpose_in(a, a.q, tile, head, a.scale, to.queries);
  transpose_in(a, g.out_gradient, tile, head, 1.0f, to.out_gradients);
  const int64_t begin = tile * kLanes, rows = min_of(kLanes, a.num_queries - begin);
  for (int64_t i = 0; i < kLanes; ++i) {
    const int64_t row = head * a.num_queries + begin + i;
    to.log_sums[i] = i < rows ? a.log_sums[row] : 0.0f;
    to.output_changes[i] = 0.0f;
    if (i >= rows) continue;
    F32x16 sums = zero();
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      sums = fma(load(a.out + row * a.head_dim + d), load(g.out_gradient + row * a.head_dim + d), sums);
    }
    to.output_changes[i] = reduce_add(sums);
  }
}

// Of keys [begin, end), [keys][16]: the weights, and the derivatives by the scaled scores.
void score_gradients(const SequenceAttention& a, const TileInputs& tile, const Sight& sight, int64_t begin, int64_t end,
                     int64_t kv_head, float* weights, float* gradients) {
  products_with_keys(a, a.k, begin, end, kv_head, tile.queries, weights);
  products_with_keys(a, a.v, begin, end, kv_head, tile.out_gradients, gradients);
  const F32x16 log_sums = load(tile.log_sums), changes = load(tile.output_changes);
  const bool is_whole = sight.is_whole(begin, end);
  for (int64_t key = begin; key < end; ++key) {
    float* weight = weights + (key - begin) * kLanes;
    float* gradient = gradients + (key - begin) * kLanes;
    F32x16 of_key = exp(load(weight) - log_sums);
    if (!is_whole) of_key = keep_seen(sight, key, of_key);
    store(weight, of_key);
    store(gradient, of_key * (load(gradient) - changes));
  }
}

void query_gradient(const SequenceAttentionGradient& g, const TileInputs& inputs, int64_t tile, int64_t head) {
  const SequenceAttention& a = g.forward;
  const int64_t kv_head = head / (a.num_heads / a.num_kv_heads);
  float* weights = buffer(Scratch::kWorkspace, (2 * kSpanKeys + a.head_dim) * kLanes);
  float* gradients = weights + kSpanKeys * kLanes;
  float* sums = gradients + kSpanKeys * kLanes;
  for (int64_t d = 0; d < a.head_dim; ++d) store(sums + d * kLanes, zero());
  const Sight sight = sight_of(a, tile);
  for (int64_t begin = sight.first; begin <= sight.last; begin += kSpanKeys) {
    const int64_t end = min_of(begin + kSpanKeys, sight.last + 1);
    score_gradients(a, inputs, sight, begin, end, kv_head, weights, gradients);
    add_weighted(a, a.k, begin, end, kv_head, gradients, sums);
  }
  float factors[kLanes];
  store(factors, broadcast(a.scale));
  transpose_out(a, sums, factors, tile, head, g.q_gradient);
}

// Of the keys and values of a span, from all tiles that see some of them.
template <typename InputsOf>
void key_gradients(const SequenceAttentionGradient& g, int64_t span, int64_t kv_head, const InputsOf& inputs_of) {
  const SequenceAttention& a = g.forward;
  const int64_t span_begin = span * kSpanKeys, span_end = min_of(span_begin + kSpanKeys, a.num_tokens);
  float* weights = buffer(Scratch::kWorkspace, 2 * kSpanKeys * (kLanes + a.head_dim));
  float* gradients = weights + kSpanKeys * kLanes;
  float* of_keys = gradients + kSpanKeys * kLanes;
  float* of_values = of_keys + kSpanKeys * a.head_dim;
  for (int64_t i = 0; i < kSpanKeys * a.head_dim; i += kLanes) {
    store(of_keys + i, zero());
    store(of_values + i, zero());
  }
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t tile = 0; tile < num_query_tiles(a); ++tile) {
    const Sight sight = sight_of(a, tile);
    const int64_t begin = max_of(span_begin, sight.first), end = min_of(span_end, sight.last + 1);
    if (begin >= end) continue;
    const int64_t token = tile * kLanes, rows = min_of(kLanes, a.num_queries - token);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      score_gradients(a, inputs_of(tile, head), sight, begin, end, kv_head, weights, gradients);
      const int64_t row = (head * a.num_queries + token) * a.head_dim, to = (begin - span_begin) * a.head_dim;
      for (int64_t d = 0; d < a.head_dim; d += kLanes) {
        sum_products<true>({gradients, kLanes, 1}, a.q + row + d, a.head_dim, rows, of_keys + to + d, a.head_dim,
                           end - begin);
        sum_products<true>({weights, kLanes, 1}, g.out_gradient + row + d, a.head_dim, rows, of_values + to + d,
                           a.head_dim, end - begin);
      }
    }
  }
  for (int64_t key = span_begin; key < span_end; ++key) {
    const int64_t to = (kv_head * a.num_tokens + key) * a.head_dim, from = (key - span_begin) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += kLanes) {
      store(g.k_gradient + to + d, load(of_keys + from + d) * broadcast(a.scale));
      store(g.v_gradient + to + d, load(of_values + from + d));
    }
  }
}

}  // namespace

void sequence_attention(const SequenceAttention& a, const Pool& pool) {
  // Tiles of a head one after the other: its keys and values stay in a cache.
  const int64_t num_tiles = num_query_tiles(a);
  parallel_for(pool, num_tiles * a.num_heads, [&](int64_t task) { attend(a, task % num_tiles, task / num_tiles); });
}

void sequence_attention_gradient(const SequenceAttentionGradient& g, const Pool& pool) {
  const SequenceAttention& a = g.forward;
  const int64_t size = TileInputs::size(a.head_dim), num_tiles = num_query_tiles(a),
                num_tasks = num_tiles * a.num_heads;
  float* inputs = buffer(Scratch::kPlan, size * num_tasks);
  const auto inputs_of = [&](int64_t tile, int64_t head) {
    return TileInputs::at(inputs + (head * num_tiles + tile) * size, a.head_dim);
  };
  parallel_for(pool, num_tasks, [&](int64_t task) {
    const int64_t tile = task % num_tiles, head = task / num_tiles;
    prepare(g, tile, head, inputs_of(tile, head));
    query_gradient(g, inputs_of(tile, head), tile, head);
  });
  const int64_t num_spans = ceil_div(a.num_tokens, kSpanKeys);
  parallel_for(pool, num_spans * a.num_kv_heads,
               [&](int64_t task) { key_gradients(g, task % num_spans, task / num_spans, inputs_of); });
}

}  // namespace jaxis::JAXIS_ISA
