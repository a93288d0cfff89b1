// Activation functions between the products of an MLP.
#pragma once

#include "matmul.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Of kSilu and kGeluTanh, what up is multiplied by.
F32x16 apply_activation(Activation activation, F32x16 x) {
  const F32x16 one = broadcast(1.0f);
  if (activation == Activation::kSilu) return x / (one + exp(zero() - x));
  // gelu: x / 2 * (1 + tanh(u)), and (1 + tanh(u)) / 2 = 1 / (1 + e ** -2u)
  const F32x16 cubic = fma(x * x * x, broadcast(0.044715f), x);
  return x / (one + exp(cubic * broadcast(-2.0f * 0.7978845608028654f)));
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
