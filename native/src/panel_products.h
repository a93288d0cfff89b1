// Blocks of rows times one panel of weights, of any format: what the products of matrices, heads and experts are made
// of.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "matmul.h"
#include "matmul_micro.h"
#include "matmul_rows.h"

namespace jaxis::JAXIS_ISA {

// Row blocks [first, last) times one panel -> tile [rows of these blocks][32].
void multiply_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first, int64_t last,
                    float* tile);

// Writes a tile [num_rows][32] into columns [32 * panel, ...) of out [..., n].
void store_tile(const float* tile, int64_t num_rows, int64_t n, int64_t panel, float* out);

inline Int8Panel int8_panel(const WeightFormat& f, const uint8_t* panel) {
  const int64_t groups = ceil_div(f.k, kActivationGroup);
  const uint8_t* scales = panel + groups * kActivationGroup * kPanelRows;
  return {panel, reinterpret_cast<const float*>(scales), groups};
}

}  // namespace jaxis::JAXIS_ISA
