// Rows of logits by tiles of 128 tokens; see sampling.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
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
}  // namespace jaxis::JAXIS_ISA
