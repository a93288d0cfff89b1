// Products with pairs of thin matrices, another pair for each row: what adapters add to the products of layers.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace jaxis {

// out[i][row] = b[i][s]^T (a[i][s] x[row]), where slots[row] = s + 1; zeros where it is 0. Of a slot's matrices, only
// the leading ranks[i][s] rows are read. A row's sums have an order that depends on its own slot only.
struct LowRank {
  const float* x;        // [rows, k]
  const int32_t* slots;  // [rows], from 0 to num_slots
  int64_t rows;
  int64_t k;
  int64_t num_slots;
  int64_t rank;  // of the matrices, at most
  int num_matrices;
  bool is_bf16;                        // the matrices' type; else float32
  const void* a[kMaxMatrices];         // [num_slots, rank, k]
  const void* b[kMaxMatrices];         // [num_slots, rank, n]
  const int32_t* ranks[kMaxMatrices];  // [num_slots]
  int64_t n[kMaxMatrices];
  float* out[kMaxMatrices];  // [rows, n]
};

}  // namespace jaxis
