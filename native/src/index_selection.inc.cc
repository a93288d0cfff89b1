// Scores a paged context of index keys, and selects the best tokens of it.
#include "index_selection.h"

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "attention_cache.h"
#include "latent_tile.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {
namespace indexing {

// Rows of the flat batch that one task writes to the cache.
constexpr int64_t kRowsPerWrite = 64;
// Keys of a context that one task scores, at least.
constexpr int64_t kKeysPerTask = 1024;
// Keys that are scored together: in float32 they stay in the second-level cache.
constexpr int64_t kPiece = 48;
// Scores kept at a time, of as many queries as they suffice for: 16 MiB.
constexpr int64_t kMaxScores = 4 << 20;

// What every product of a block is at least.
constexpr float kNoProduct = -__builtin_inff();

// A query that cannot attend to its whole context.
struct Query {
  int64_t row;      // of the flat batch
  int64_t context;  // keys that it sees
  int64_t choices;  // keys, or blocks of them, of which it selects
  const int32_t* block_table;
};

JAXIS_INLINE bool selects_blocks(const IndexSelection& a) { return a.weights == nullptr; }

// Selections of a query.
JAXIS_INLINE int64_t num_selections(const IndexSelection& a) { return selects_blocks(a) ? a.num_heads : 1; }

JAXIS_INLINE Query query_at(const IndexSelection& a, int64_t request, int64_t row) {
  const int64_t position = a.seq_lens[request] - (a.query_start_loc[request + 1] - row);
  const int64_t groups = (position + 1 - a.delay) / a.group_size;
  const int32_t* block_table = a.block_tables + request * a.max_blocks;
  if (!selects_blocks(a)) return {row, groups, groups, block_table};
  return {row, position + 1, position / a.group_size + 1, block_table};
}

template <typename T>
JAXIS_INLINE int64_t key_bytes(const IndexSelection& a) {
  return a.head_dim * static_cast<int64_t>(sizeof(T)) + (IsQuantized<T>::value ? 4 : 0);
}

template <typename T>
JAXIS_INLINE T* find_key(const IndexSelection& a, const int32_t* block_table, int64_t position) {
  const int64_t slot = block_table[position / a.block_size] * a.block_size + position % a.block_size;
  return reinterpret_cast<T*>(static_cast<char*>(a.cache) + slot * key_bytes<T>(a));
}

// The key as float32: where it lies, or in `memory`.
JAXIS_INLINE const float* upcast_key(int64_t, const float* key, float*) { return key; }
JAXIS_INLINE const float* upcast_key(int64_t size, const bf16_t* key, float* memory) {
  for (int64_t d = 0; d < size; d += kLanes) store(memory + d, load_bf16(key + d));
  return memory;
}
JAXIS_INLINE const float* upcast_key(int64_t size, const int8_t* key, float* memory) {
  float scale;
  std::memcpy(&scale, key + size, sizeof scale);
  for (int64_t d = 0; d < size; d += kLanes) store(memory + d, load_i8(key + d) * broadcast(scale));
  return memory;
}

// Bits that order as the numbers do. -0 becomes 0: the two are equal scores.
JAXIS_INLINE uint32_t ordered_bits(float x) {
  const uint32_t bits = x == 0.0f ? 0u : to_bits(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Writes rows [first, last) of the flat batch to the cache, and selects for those that attend to their whole context.
template <typename T>
void write_rows(const IndexSelection& a, int64_t first, int64_t last) {
  int64_t request = 0;
  for (int64_t row = first; row < last; ++row) {
    int64_t choices = 0;
    if (row < a.query_start_loc[a.num_requests]) {
      while (row >= a.query_start_loc[request + 1]) ++request;
      const int64_t position = a.seq_lens[request] - (a.query_start_loc[request + 1] - row);
      if (a.keys != nullptr) {
        T* to = find_key<T>(a, a.block_tables + request * a.max_blocks, position);
        const float scale = encode(a.keys + row * a.head_dim, a.head_dim, to);
        if (IsQuantized<T>::value) std::memcpy(to + a.head_dim, &scale, sizeof scale);
      }
      choices = query_at(a, request, row).choices;
    }
    if (choices > a.num_selected) continue;
    const int64_t selections = num_selections(a);
    int32_t* selected = a.selected + row * selections * a.num_selected;
    for (int64_t i = 0; i < selections * a.num_selected; ++i) {
      selected[i] = i % a.num_selected < choices ? static_cast<int32_t>(i % a.num_selected) : -1;
    }
  }
}

// Scores of the query for the context's keys [first, last), as ordered bits. Heads lie in lanes, and are summed in one
// order for every query.
template <typename T>
void score_context(const IndexSelection& a, const Query& query, int64_t first, int64_t last, uint32_t* scores) {
  const int64_t rows = ceil_div(a.num_heads, kLanes) * kLanes;
  const int64_t floats = rows * (a.head_dim + 1 + kPiece) + kPiece * a.head_dim;
  auto* q = static_cast<float*>(scratch(Scratch::kWorkspace, floats * static_cast<int64_t>(sizeof(float))));
  float* weights = q + rows * a.head_dim;
  float* of_heads = weights + rows;
  float* float32_keys = of_heads + kPiece * rows;
  for (int64_t h = 0; h < rows; ++h) {
    const bool is_head = h < a.num_heads;
    weights[h] = is_head ? a.weights[query.row * a.num_heads + h] : 0.0f;
    const float* from = a.q + (query.row * a.num_heads + h) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) q[d * rows + h] = is_head ? from[d] : 0.0f;
  }
  for (; first < last; first += kPiece) {
    const int64_t count = min_of(last - first, kPiece);
    const float* keys[kPiece];
    for (int64_t t = 0; t < count; ++t) {
      keys[t] = upcast_key(a.head_dim, find_key<T>(a, query.block_table, first + t), float32_keys + t * a.head_dim);
    }
    latent::score(q, rows, keys, count, a.head_dim, of_heads);
    for (int64_t t = 0; t < count; ++t) {
      F32x16 sums = zero();
      for (int64_t h = 0; h < rows; h += kLanes) {
        sums = fma(max(load(of_heads + t * rows + h), zero()), load(weights + h), sums);
      }
      float lanes[kLanes];
      store(lanes, sums);
      float sum = lanes[0];
      for (int i = 1; i < kLanes; ++i) sum += lanes[i];
      const bool is_always = first + t < a.num_first || first + t >= query.context - a.num_last;
      scores[first + t] = is_always ? ~0u : ordered_bits(sum);
    }
  }
}

// Scores of each head of the query, [H][choices] as ordered bits, for the blocks of the context's keys [first, last);
// `first` begins a block.
template <typename T>
void score_blocks(const IndexSelection& a, const Query& query, int64_t first, int64_t last, uint32_t* scores) {
  const int64_t floats = a.head_dim + a.num_heads;
  auto* float32_key = static_cast<float*>(scratch(Scratch::kWorkspace, floats * static_cast<int64_t>(sizeof(float))));
  float* best = float32_key + a.head_dim;
  const float* q = a.q + query.row * a.num_heads * a.head_dim;
  while (first < last) {
    const int64_t block = first / a.group_size, end = min_of((block + 1) * a.group_size, last);
    for (int64_t h = 0; h < a.num_heads; ++h) best[h] = kNoProduct;
    for (; first < end; ++first) {
      const float* key = upcast_key(a.head_dim, find_key<T>(a, query.block_table, first), float32_key);
      for (int64_t h = 0; h < a.num_heads; ++h) {
        F32x16 sums = zero();
        for (int64_t d = 0; d < a.head_dim; d += kLanes) sums = fma(load(q + h * a.head_dim + d), load(key + d), sums);
        const float product = reduce_add(sums);
        best[h] = product > best[h] ? product : best[h];
      }
    }
    const bool is_own = end == query.context;
    for (int64_t h = 0; h < a.num_heads; ++h) scores[h * query.choices + block] = is_own ? ~0u : ordered_bits(best[h]);
  }
}

// The k-th largest score, found digit by digit from the highest on, and how many of the k have just that score.
struct Threshold {
  uint32_t score;
  int64_t num_equal;
};

Threshold find_threshold(const uint32_t* scores, int64_t count, int64_t k) {
  constexpr int kDigitBits = 8;
  uint32_t score = 0;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    int64_t counts[1 << kDigitBits] = {};
    const uint32_t higher = static_cast<uint32_t>(~uint64_t{0} << (shift + kDigitBits));
    for (int64_t i = 0; i < count; ++i) {
      if ((scores[i] & higher) == score) ++counts[scores[i] >> shift & ((1 << kDigitBits) - 1)];
    }
    uint32_t digit = (1 << kDigitBits) - 1;
    while (counts[digit] < k) k -= counts[digit--];
    score |= digit << shift;
  }
  return {score, k};
}

void select(const uint32_t* scores, int64_t count, int64_t k, int32_t* selected) {
  Threshold threshold = find_threshold(scores, count, k);
  for (int64_t position = 0; position < count; ++position) {
    const uint32_t score = scores[position];
    if (score < threshold.score || (score == threshold.score && threshold.num_equal-- <= 0)) continue;
    *selected++ = static_cast<int32_t>(position);
  }
}

template <typename T>
void run(const IndexSelection& a, const Pool& pool) {
  const int64_t num_writes = ceil_div(a.num_tokens, kRowsPerWrite);
  parallel_for(pool, num_writes, [&](int64_t task) {
    write_rows<T>(a, task * kRowsPerWrite, min_of((task + 1) * kRowsPerWrite, a.num_tokens));
  });
  const int64_t selections = num_selections(a);
  auto* queries = static_cast<Query*>(scratch(Scratch::kPlan, a.num_tokens * static_cast<int64_t>(sizeof(Query))));
  int64_t num_queries = 0, max_context = 0, max_scores = 0;
  for (int64_t request = 0; request < a.num_requests; ++request) {
    const int64_t end = a.query_start_loc[request + 1];
    for (int64_t row = a.query_start_loc[request]; row < end; ++row) {
      const Query query = query_at(a, request, row);
      if (query.choices <= a.num_selected) continue;
      queries[num_queries++] = query;
      max_context = max_of(max_context, query.context);
      max_scores = max_of(max_scores, query.choices * selections);
    }
  }
  if (num_queries == 0) return;
  const int64_t together = min_of(num_queries, max_of(1, kMaxScores / max_scores));
  auto* scores = static_cast<uint32_t*>(
      scratch(Scratch::kPartials, together * max_scores * static_cast<int64_t>(sizeof(uint32_t))));
  // Blocks are not divided.
  const int64_t unit = selects_blocks(a) ? a.group_size : 1, keys_per_task = ceil_div(kKeysPerTask, unit) * unit;
  const int64_t tasks_per_query = ceil_div(max_context, keys_per_task);
  for (int64_t begin = 0; begin < num_queries; begin += together) {
    const int64_t count = min_of(together, num_queries - begin);
    parallel_for(pool, count * tasks_per_query, [&](int64_t task) {
      const int64_t i = task / tasks_per_query, first = task % tasks_per_query * keys_per_task;
      const Query& query = queries[begin + i];
      const auto score = selects_blocks(a) ? score_blocks<T> : score_context<T>;
      score(a, query, first, min_of(first + keys_per_task, query.context), scores + i * max_scores);
    });
    parallel_for(pool, count * selections, [&](int64_t task) {
      const int64_t i = task / selections, selection = task % selections;
      const Query& query = queries[begin + i];
      select(scores + i * max_scores + selection * query.choices, query.choices, a.num_selected,
             a.selected + (query.row * selections + selection) * a.num_selected);
    });
  }
}

}  // namespace indexing
}  // namespace

void index_selection(const IndexSelection& a, const Pool& pool) {
  switch (a.type) {
    case CacheType::kFloat32:
      return indexing::run<float>(a, pool);
    case CacheType::kBfloat16:
      return indexing::run<bf16_t>(a, pool);
    case CacheType::kInt8:
      return indexing::run<int8_t>(a, pool);
  }
}

}  // namespace jaxis::JAXIS_ISA
