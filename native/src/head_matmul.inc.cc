// Products of heads with their matrices: a segment for each head, with a row for each token.
#include "head_matmul.h"

#include <cstdint>

#include "expert_segments.h"
#include "matmul.h"
#include "panel_products.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {

void head_matmul(const HeadMatmul& a, const Pool& pool) {
  if (a.tokens == 0) return;
  const int64_t k = a.weight.format.k, n = a.weight.n, bytes = panel_bytes(a.weight.format);
  auto* segments = static_cast<Segment*>(scratch(Scratch::kSegments, a.heads * static_cast<int64_t>(sizeof(Segment))));
  for (int64_t h = 0; h < a.heads; ++h) {
    segments[h] = {h, h * a.tokens, {}, {}};
    segments[h].rows.rows = a.tokens;
  }
  prepare_segments(segments, a.heads, a.weight.format, a.quantize_activations, pool,
                   [&](int64_t place) { return a.x + (place % a.tokens * a.heads + place / a.tokens) * k; });
  for_each_panel(segments, a.heads, a.weight, pool,
                 [&](const Segment& segment, int64_t panel, int64_t first_row, int64_t num_rows) {
                   float* tile = static_cast<float*>(scratch(Scratch::kTile, num_rows * kPanelRows * 4));
                   const uint8_t* weight = a.weight.of(segment.expert) + panel * bytes;
                   multiply_rows(segment.rows, a.weight.format, weight, first_row, num_rows, tile);
                   for (int64_t r = 0; r < num_rows; ++r) {
                     store_tile(tile + r * kPanelRows, 1, n, panel,
                                a.out + ((first_row + r) * a.heads + segment.expert) * n);
                   }
                 });
}

}  // namespace jaxis::JAXIS_ISA
