#pragma once

#include <cmath>

#include "norm.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

void norm_row(const RmsNorm& a, int64_t row) {
  const float* x = a.x + row * a.size;
  float* out = a.out + row * a.size;
  const int64_t whole = a.size / kLanes * kLanes;
  // Four sums side by side, because each addition waits for the one before it.
  F16 squares[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= whole; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F16 v = load(x + i + j * kLanes);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for (; i < whole; i += kLanes) {
    const F16 v = load(x + i);
    squares[0] = fma(v, v, squares[0]);
  }
  float total = reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < a.size; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(a.size) + a.epsilon);
  const F16 scales = broadcast(scale);
  for (i = 0; i < whole; i += kLanes) store(out + i, load(x + i) * scales * load(a.weight + i));
  for (; i < a.size; ++i) out[i] = x[i] * scale * a.weight[i];
}

}  // namespace

void rms_norm(const RmsNorm& a, const Pool& pool) {
  // A thread is worth waking for some ten thousand numbers.
  const int64_t rows_per_task = 1 + 16384 / (a.size + 1);
  parallel_for(pool, (a.rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = (task + 1) * rows_per_task < a.rows ? (task + 1) * rows_per_task : a.rows;
    for (int64_t row = task * rows_per_task; row < end; ++row) norm_row(a, row);
  });
}

}  // namespace jaxis::JAXIS_ISA
