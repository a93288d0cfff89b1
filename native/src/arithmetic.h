// Integer arithmetic of the kernels.
#pragma once

#include <cstdint>

#include "simd.h"

namespace jaxis::JAXIS_ISA {

JAXIS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
JAXIS_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
JAXIS_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace jaxis::JAXIS_ISA
