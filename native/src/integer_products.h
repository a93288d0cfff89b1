// Blocks of rows of int8 activations times one panel of int8 weights or codes.
#pragma once

#include <cstdint>

#include "matmul.h"
#include "matmul_rows.h"

namespace jaxis::JAXIS_ISA {

// Row blocks [first, last) times one panel -> tile [rows of these blocks][32].
void multiply_panel_by_integers(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first,
                                int64_t last, float* tile);

}  // namespace jaxis::JAXIS_ISA
