#pragma once

#include <cmath>

#include "sampling.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
// Tiles that one task works through: some ten microseconds.
constexpr int64_t kTilesPerTask = 64;

int64_t tasks_per_row(int64_t vocab) { return (num_tiles(vocab) + kTilesPerTask - 1) / kTilesPerTask; }

// Calls function(row, first tile, end tile) for all tiles of all rows.
template <typename Function>
void for_each_run_of_tiles(const Pool& pool, int64_t rows, int64_t vocab, Function&& function) {
  const int64_t tiles = num_tiles(vocab), tasks = tasks_per_row(vocab);
  parallel_for(pool, rows * tasks, [&](int64_t task) {
    const int64_t first = task % tasks * kTilesPerTask;
    const int64_t end = first + kTilesPerTask < tiles ? first + kTilesPerTask : tiles;
    function(task / tasks, first, end);
  });
}

int64_t tile_size(int64_t vocab, int64_t tile) {
  return vocab - tile * kVocabTile < kVocabTile ? vocab - tile * kVocabTile : kVocabTile;
}

// NaNs are passed over.
float largest(const float* x, int64_t n) {
  F32x16 lanes = broadcast(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) lanes = max(load(x + i), lanes);
  float result = reduce_max(lanes);
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

bool has_nan(const float* x, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    found |= (bits & 0x7fffffffu) > 0x7f800000u;
  }
  return found != 0;
}

// Calls function(lanes of x, number of them in use) for each sixteen elements; lanes not in use hold -inf.
template <typename Function>
JAXIS_INLINE void for_each_lanes(const float* x, int64_t n, Function&& function) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) function(load(x + i));
  if (i < n) {
    float rest[kLanes];
    for (int j = 0; j < kLanes; ++j) rest[j] = i + j < n ? x[i + j] : -kInfinity;
    function(load(rest));
  }
}

float sum_of_tiles(const float* mass, int64_t tiles) {
  F32x16 lanes = zero();
  int64_t i = 0;
  for (; i + kLanes <= tiles; i += kLanes) lanes = lanes + load(mass + i);
  float total = reduce_add(lanes);
  for (; i < tiles; ++i) total += mass[i];
  return total;
}

}  // namespace

void argmax(const Argmax& a, const Pool& pool) {
  const int64_t tasks = tasks_per_row(a.vocab);
  struct Best {
    float value;
    int32_t id;
  };
  Best* best = static_cast<Best*>(scratch(0, a.rows * tasks * static_cast<int64_t>(sizeof(Best))));
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
