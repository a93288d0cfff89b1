// Norms of rows.
#pragma once

#include <cstdint>

namespace jaxis {

// out[r] = x[r] / sqrt(mean(x[r] ** 2) + epsilon) * weight, for rows of `size` elements.
struct RmsNorm {
  const float* x;
  const float* weight;
  float* out;
  int64_t rows;
  int64_t size;
  float epsilon;
};

// out[r] = (x[r] - mean(x[r])) / sqrt(variance(x[r]) + epsilon) * weight + bias, for rows of `size` elements. Row r has
// row r % weight_rows of the weights and biases.
struct LayerNorm {
  const float* x;
  const float* weight;  // [weight_rows, size]
  const float* bias;    // [weight_rows, size]
  float* out;
  int64_t rows;
  int64_t size;
  int64_t weight_rows;
  float epsilon;
};

}  // namespace jaxis
