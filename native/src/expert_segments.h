// Products of several matrices at once, each with rows of its own: of experts, and of heads.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "experts.h"
#include "matmul.h"
#include "matmul_rows.h"
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

// Calls function(segment, panel, first block, last block, first row, number of rows) for all panels of `m` of all
// segments, in parallel; of few panels each has its rows shared out too.
template <typename Function>
void for_each_panel(const Segment* segments, int64_t num_segments, const ExpertMatrices& m, const Pool& pool,
                    const Function& function) {
  const int64_t panels = num_panels(m.n);
  const int64_t splits = ceil_div(4 * pool.num_threads, num_segments * panels);
  parallel_for(pool, num_segments * panels * splits, [&](int64_t task) {
    const Segment& segment = segments[task / (panels * splits)];
    const Rows& rows = segment.rows;
    const int64_t blocks = ceil_div(rows.num_blocks, splits);
    const int64_t first = task % splits * blocks, last = min_of(first + blocks, rows.num_blocks);
    if (first >= last) return;
    const int64_t first_row = first * rows.block_rows;
    const int64_t num_rows = min_of(last * rows.block_rows, rows.rows) - first_row;
    function(segment, task / splits % panels, first, last, first_row, num_rows);
  });
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
