// Integer arithmetic of the kernels, and numbers as constants.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace jaxis::JAXIS_ISA {

JAXIS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
JAXIS_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
JAXIS_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls function(count), for a count from 1 to kMost, with the count as a constant: loops over it are unrolled.
template <int kMost, typename Function>
JAXIS_INLINE void with_count(int count, const Function& function) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, function);
  }
  function(std::integral_constant<int, kMost>());
}

}  // namespace jaxis::JAXIS_ISA
