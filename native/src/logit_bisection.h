// The k-th largest value, and the value down to which a given mass lies: by bisection of bit patterns.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"
#include "vocab_tiles.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Orders as the floats do. Subnormal numbers count as 0: whether the processor's comparisons see them depends on the
// thread's mode.
JAXIS_INLINE int32_t float_to_key(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const int32_t key = bits < 0 ? bits ^ 0x7fffffff : bits;
  return (bits & 0x7f800000) == 0 ? 0 : key;
}

float key_to_float(int32_t key) {
  const int32_t bits = key < 0 ? key ^ 0x7fffffff : key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

int32_t mass_from(const float* values, const int32_t* masses, int64_t n, int32_t lowest_key) {
  int32_t sum = 0;
  if (masses == nullptr) {
    for (int64_t i = 0; i < n; ++i) sum += float_to_key(values[i]) >= lowest_key ? 1 : 0;
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const int32_t mass = masses[i];
      sum += float_to_key(values[i]) >= lowest_key ? mass : 0;
    }
  }
  return sum;
}

// The largest value such that those from it upwards weigh at least the target (each 1 without masses); -inf if all
// together do not. Bisects the bit patterns, which order as the floats do.
float largest_value_reaching(const float* values, const int32_t* masses, int64_t n, int32_t target, float maximum) {
  int32_t low = float_to_key(-kInfinity), high = float_to_key(maximum) + 1;
  while (low + 1 < high) {
    const int32_t middle = static_cast<int32_t>((static_cast<int64_t>(low) + high) >> 1);
    (mass_from(values, masses, n, middle) >= target ? low : high) = middle;
  }
  return key_to_float(low);
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
