// Gates: elementwise functions that are not products.
#pragma once

#include <cstdint>

namespace jaxis {

// out[r] = log(1 + e ** (x[r] + bias)), for rows of `size` elements.
struct Softplus {
  const float* x;
  const float* bias;
  float* out;
  int64_t rows;
  int64_t size;
};

// What a gate makes of its logit.
enum class Gate : int32_t { kSigmoid = 0, kSilu = 1, kSoftplus = 2, kNormalCdf = 3 };

// out[r][i] = x[r][i] * gate(logits[r][i / shared_by]), for rows of `size * shared_by` elements and `size` logits.
struct Gated {
  const float* x;
  const float* logits;
  float* out;
  int64_t rows;
  int64_t size;
  int64_t shared_by;  // consecutive elements that have one gate
  Gate gate;
};

// out[r] = e ** x[r] over its sum, for rows of `size` elements.
struct Softmax {
  const float* x;
  float* out;
  int64_t rows;
  int64_t size;
};

}  // namespace jaxis
