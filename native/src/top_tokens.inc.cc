// The largest logits of each row, and ranks of given ones.
#include <cstdint>

#include "logit_bisection.h"
#include "sampling.h"
#include "simd.h"
#include "team.h"
#include "vocab_tiles.h"

namespace jaxis::JAXIS_ISA {
namespace {

void top_of_row(const TopTokens& a, int64_t row, const float* tile_max) {
  const float* logits = a.logits + row * a.vocab;
  float* values = a.values + row * a.k;
  int32_t* ids = a.ids + row * a.k;
  const int64_t tiles = num_tiles(a.vocab);
  const float lowest = a.k <= tiles ? largest_value_reaching(tile_max, nullptr, tiles, static_cast<int32_t>(a.k),
                                                             largest(tile_max, tiles))
                                    : -kInfinity;
  int64_t n = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (tile_max[tile] < lowest) continue;
    const int64_t end = tile * kVocabTile + tile_size(a.vocab, tile);
    for (int64_t id = tile * kVocabTile; id < end; ++id) {
      const float value = logits[id];
      if (!(value >= lowest) || (n == a.k && !(value > values[n - 1]))) continue;
      int64_t place = n < a.k ? n++ : n - 1;
      for (; place > 0 && values[place - 1] < value; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = value;
      ids[place] = static_cast<int32_t>(id);
    }
  }
  // Only where NaNs left fewer than k.
  for (; n < a.k; ++n) {
    values[n] = -kInfinity;
    ids[n] = 0;
  }
}

}  // namespace

void top_tokens(const TopTokens& a, const Pool& pool) {
  const int64_t tiles = num_tiles(a.vocab);
  float* tile_max = static_cast<float*>(scratch(Scratch::kTileResults, a.rows * tiles * 4));
  for_each_run_of_tiles(pool, a.rows, a.vocab, [&](int64_t row, int64_t first, int64_t end) {
    for (int64_t tile = first; tile < end; ++tile) {
      tile_max[row * tiles + tile] = largest(a.logits + row * a.vocab + tile * kVocabTile, tile_size(a.vocab, tile));
    }
  });
  parallel_for(pool, a.rows, [&](int64_t row) { top_of_row(a, row, tile_max + row * tiles); });
}

void token_ranks(const TokenRanks& a, const Pool& pool) {
  const int64_t tasks = tasks_per_row(a.vocab);
  int32_t* counts = static_cast<int32_t*>(scratch(Scratch::kTileResults, a.rows * tasks * 4));
  for_each_run_of_tiles(pool, a.rows, a.vocab, [&](int64_t row, int64_t first, int64_t end) {
    const float* x = a.logits + row * a.vocab;
    const float chosen = a.chosen[row];
    const int64_t stop = end * kVocabTile < a.vocab ? end * kVocabTile : a.vocab;
    int32_t count = 0;
    for (int64_t id = first * kVocabTile; id < stop; ++id) count += x[id] > chosen ? 1 : 0;
    counts[row * tasks + first / kTilesPerTask] = count;
  });
  for (int64_t row = 0; row < a.rows; ++row) {
    a.ranks[row] = 1;
    for (int64_t task = 0; task < tasks; ++task) a.ranks[row] += counts[row * tasks + task];
  }
}

}  // namespace jaxis::JAXIS_ISA
