// One row times one panel of codes, whose layout its loops know when they are compiled.
#pragma once

#include <cstdint>

#include "matmul_rows.h"

namespace jaxis::JAXIS_ISA {

// Block `block` of rows, which is one row, times one panel -> tile [32].
void multiply_codes_panel_by_row(const Rows& rows, const uint8_t* panel, int64_t block, float* tile);

}  // namespace jaxis::JAXIS_ISA
