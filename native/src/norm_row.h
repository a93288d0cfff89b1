// The RMS norm of one row.
#pragma once

#include <cmath>
#include <cstdint>

#include "norm.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

void norm_row(const RmsNorm& a, int64_t row) {
  const float* x = a.x + row * a.size;
  float* out = a.out + row * a.size;
  const int64_t whole = a.size / kLanes * kLanes;
  // ActivationQuad sums side by side, because each addition waits for the one before it.
  F32x16 squares[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= whole; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32x16 v = load(x + i + j * kLanes);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for (; i < whole; i += kLanes) {
    const F32x16 v = load(x + i);
    squares[0] = fma(v, v, squares[0]);
  }
  float total = reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < a.size; ++i) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(a.size) + a.epsilon);
  const F32x16 scales = broadcast(scale);
  for (i = 0; i < whole; i += kLanes) store(out + i, load(x + i) * scales * load(a.weight + i));
  for (; i < a.size; ++i) out[i] = x[i] * scale * a.weight[i];
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
