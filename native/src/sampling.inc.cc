// The largest logit of each row, and the softmax weights of tiles.
#include "sampling.h"

#include <cstdint>

#include "simd.h"
#include "team.h"
#include "vocab_tiles.h"

namespace jaxis::JAXIS_ISA {
void argmax(const Argmax& a, const Pool& pool) {
  const int64_t tasks = tasks_per_row(a.vocab);
  struct Best {
    float value;
    int32_t id;
  };
  Best* best = static_cast<Best*>(scratch(Scratch::kTileResults, a.rows * tasks * static_cast<int64_t>(sizeof(Best))));
  for_each_run_of_tiles(pool, a.rows, a.vocab, [&](int64_t row, int64_t first, int64_t end) {
    const float* logits = a.logits + row * a.vocab;
    float value = -kInfinity;
    int64_t best_tile = first;
    for (int64_t tile = first; tile < end; ++tile) {
      const float* x = logits + tile * kVocabTile;
      const int64_t n = tile_size(a.vocab, tile);
      if (has_nan(x, n)) {
        value = __builtin_nanf("");
        best_tile = tile;
        break;
      }
      const float tile_value = largest(x, n);
      if (tile_value > value) {
        value = tile_value;
        best_tile = tile;
      }
    }
    int64_t id = best_tile * kVocabTile;
    while (value == value ? logits[id] != value : logits[id] == logits[id]) ++id;
    best[row * tasks + first / kTilesPerTask] = {value, static_cast<int32_t>(id)};
  });
  for (int64_t row = 0; row < a.rows; ++row) {
    Best result = best[row * tasks];
    for (int64_t task = 1; task < tasks && result.value == result.value; ++task) {
      const Best other = best[row * tasks + task];
      if (other.value > result.value || other.value != other.value) result = other;
    }
    a.ids[row] = result.id;
    a.max[row] = result.value;
  }
}

void tile_weights(const TileWeights& a, const Pool& pool) {
  const int64_t tiles = num_tiles(a.vocab);
  for_each_run_of_tiles(pool, a.rows, a.vocab, [&](int64_t row, int64_t first, int64_t end) {
    for (int64_t tile = first; tile < end; ++tile) {
      a.tile_max[row * tiles + tile] = largest(a.logits + row * a.vocab + tile * kVocabTile, tile_size(a.vocab, tile));
    }
  });
  for (int64_t row = 0; row < a.rows; ++row) a.max[row] = largest(a.tile_max + row * tiles, tiles);
  for_each_run_of_tiles(pool, a.rows, a.vocab, [&](int64_t row, int64_t first, int64_t end) {
    const F32x16 max = broadcast(a.max[row]), inverse_temperature = broadcast(a.inverse_temperature[row]);
    for (int64_t tile = first; tile < end; ++tile) {
      F32x16 sum = zero();
      for_each_lanes(a.logits + row * a.vocab + tile * kVocabTile, tile_size(a.vocab, tile),
                     [&](F32x16 x) { sum = sum + exp((x - max) * inverse_temperature); });
      a.tile_mass[row * tiles + tile] = reduce_add(sum);
    }
  });
  for (int64_t row = 0; row < a.rows; ++row) a.total[row] = sum_of_tiles(a.tile_mass + row * tiles, tiles);
}

}  // namespace jaxis::JAXIS_ISA
