// Packing of weights of low-bit codes.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace jaxis {

// Flipped in four bytes, these bits add 128 to each.
constexpr uint32_t kByteSigns = 0x80808080u;

void pack_codes(const Pack& pack, int64_t panel);

}  // namespace jaxis
