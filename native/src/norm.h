// Norms of rows, and what they begin with.
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

// mean[r] and variance[r] of x[r], for rows of `size` elements.
struct RowMoments {
  const float* x;
  float* mean;
  float* variance;
  int64_t rows;
  int64_t size;
};

}  // namespace jaxis
