// Packing of weights of low-bit codes.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace jaxis {

void pack_codes(const Pack& pack, int64_t panel);

}  // namespace jaxis
