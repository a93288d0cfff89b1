// Products of several matrices at once, each with rows of its own: of experts, and of heads.
#pragma once

#include <cstdint>
#include <numeric>

#include "arithmetic.h"
#include "experts.h"
#include "matmul.h"
#include "matmul_rows.h"
#include "panel_products.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Rows of one expert.
struct Segment {
  int64_t expert;
  int64_t first;  // place in ExpertOrder::slots
  Rows rows;      // of x, then of the hidden states
  Rows up_rows;   // of x, for `up` where its format is not that of `gate`
};

// Plans the rows of each segment (`member`) and finds memory for them in `buffer`, then fills it; row_at(place) is a
// row.
template <typename RowAt>
void prepare_segments(Segment* segments, int64_t num_segments, const WeightFormat& format, bool quantized,
                      const Pool& pool, const RowAt& row_at, Rows Segment::* member = &Segment::rows,
                      Scratch buffer = Scratch::kRows) {
  constexpr int64_t kLine = 64;
  int64_t bytes = 0, blocks = 0, elements = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    Rows& rows = segments[i].*member;
    rows = plan_rows(segments[i].rows.rows, format, quantized);
    bytes += ceil_div(memory_bytes(rows), kLine) * kLine;
    blocks = max_of(blocks, rows.num_blocks);
    elements += rows.rows * rows.k;
  }
  char* memory = static_cast<char*>(scratch(buffer, bytes));
  for (int64_t i = 0; i < num_segments; ++i) {
    Rows& rows = segments[i].*member;
    if (needs_memory(rows)) {
      set_memory(&rows, memory);
      memory += ceil_div(memory_bytes(rows), kLine) * kLine;
    } else {
      rows.plain = row_at(segments[i].first);
    }
  }
  if (bytes == 0) return;
  const Pool alone = {1, nullptr, nullptr};
  parallel_for(elements > kParallelElements ? pool : alone, num_segments * blocks, [&](int64_t task) {
    const Segment& segment = segments[task / blocks];
    const Rows& rows = segment.*member;
    const int64_t block = task % blocks;
    if (block >= rows.num_blocks || !needs_memory(rows)) return;
    prepare_block(rows, block, [&](int64_t row) { return row_at(segment.first + row); });
  });
}

// How many rows of a segment tasks share out at a time: whole blocks, also of `up_rows`, whose blocks may be of another
// size.
inline int64_t rows_of_unit(const Segment& segment) {
  const int64_t rows = segment.rows.block_rows, up_rows = segment.up_rows.block_rows;
  return up_rows == 0 ? rows : std::lcm(rows, up_rows);
}

// Calls function(segment, panel, first row, number of rows) for all panels of `m` of all segments, in parallel; of few
// panels each has its rows shared out too.
template <typename Function>
void for_each_panel(const Segment* segments, int64_t num_segments, const ExpertMatrices& m, const Pool& pool,
                    const Function& function) {
  const int64_t panels = num_panels(m.n);
  const int64_t splits = ceil_div(4 * pool.num_threads, num_segments * panels);
  parallel_for(pool, num_segments * panels * splits, [&](int64_t task) {
    const Segment& segment = segments[task / (panels * splits)];
    const int64_t unit = rows_of_unit(segment), rows = segment.rows.rows;
    const int64_t share = ceil_div(ceil_div(rows, unit), splits) * unit;
    const int64_t first = task % splits * share;
    if (first < rows) function(segment, task / splits % panels, first, min_of(share, rows - first));
  });
}

// multiply_panel of such rows.
inline void multiply_rows(const Rows& rows, const WeightFormat& format, const uint8_t* panel, int64_t first_row,
                          int64_t num_rows, float* tile) {
  const int64_t first = first_row / rows.block_rows, last = ceil_div(first_row + num_rows, rows.block_rows);
  multiply_panel(rows, format, panel, first, last, tile);
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
