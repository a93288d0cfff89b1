// Root-mean-square norm of rows.
#pragma once

#include <cstdint>

namespace jaxis {

// out[r] = x[r] / sqrt(mean(x[r] ** 2) + epsilon) * weight, for rows of `size` numbers.
struct RmsNorm {
  const float* x;
  const float* weight;
  float* out;
  int64_t rows;
  int64_t size;
  float epsilon;
};

}  // namespace jaxis
