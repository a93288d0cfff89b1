// Products of each token's heads with a matrix for each head.
#pragma once

#include <cstdint>

#include "experts.h"

namespace jaxis {

// out[t, h] = weight[h] x[t, h]. A token's result does not depend on the other tokens.
struct HeadMatmul {
  const float* x;  // [tokens, heads, weight.format.k]
  int64_t tokens, heads;
  ExpertMatrices weight;  // without biases
  bool quantize_activations;
  float* out;  // [tokens, heads, weight.n]
};

}  // namespace jaxis
