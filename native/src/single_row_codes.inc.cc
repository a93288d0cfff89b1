// One row times one panel of codes, whose layout its loops know when they are compiled.
#include "single_row_codes.h"

#include <cstdint>

#include "matmul_codes.h"
#include "matmul_rows.h"
#include "panel_loops.h"

namespace jaxis::JAXIS_ISA {

void multiply_codes_panel_by_row(const Rows& rows, const uint8_t* panel, int64_t block, float* tile) {
  const CodeReader& r = rows.codes;
  if (!rows.quantized) {
    return with_layout<KnownLayout::kHalfScales, KnownLayout::kQ4K, KnownLayout::kQ6K>(r, [&](auto kind, auto layout) {
      micro_stored_f32<kind(), layout()>(rows.plain_block(block), rows.sums_of_block(block), r, panel, tile);
    });
  }
  with_layout<KnownLayout::kScales, KnownLayout::kScalesAndMinima, KnownLayout::kWideScales, KnownLayout::kHalfScales,
              KnownLayout::kQ4K, KnownLayout::kQ6K>(r, [&](auto kind, auto layout) {
    micro_stored_int8<kind(), layout()>(rows.quantized_block(block), r, panel, tile);
  });
}

}  // namespace jaxis::JAXIS_ISA
