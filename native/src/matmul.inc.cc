// Products with packed matrices, and rows of packed matrices.
#include "matmul.h"

#include <cstdint>

#include "activations.h"
#include "arithmetic.h"
#include "matmul_block_scaled.h"
#include "matmul_codes.h"
#include "matmul_rows.h"
#include "next_weights.h"
#include "panel_products.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

Rows prepare_rows(const Matmul& a, const Pool& pool) {
  Rows rows = plan_rows(a.rows, a.format, a.quantize_activations, a.x_is_integer, a.x_is_bfloat16);
  if (!needs_memory(rows)) {
    rows.plain = a.x;
    return rows;
  }
  set_memory(&rows, static_cast<char*>(scratch(Scratch::kRows, memory_bytes(rows))));
  const Pool alone = {1, nullptr, nullptr};
  parallel_for(a.rows * rows.k > kParallelElements ? pool : alone, rows.num_blocks,
               [&](int64_t block) { prepare_block(rows, block, [&](int64_t row) { return a.x + row * rows.k; }); });
  return rows;
}

// How blocks of rows are shared out among tasks.
struct RowGroups {
  int64_t count, blocks;  // blocks of each group
  bool are_outer;         // a group goes through all panels before the next group does, not a panel through all groups
};

// Bytes of rows that stay in the second cache, beside their results, while panel after panel takes them; and as many
// rows as make reading a panel from memory cheap beside its products.
constexpr int64_t kRowBytesAtOnce = 192 << 10;
constexpr int64_t kRowsPerPanelRead = 64;

// Rows and weights cannot both stay in a cache: of the two, what is less is read again and again. At least `wanted`
// groups, since panels alone may be too few to occupy every thread.
RowGroups cut_rows(const Rows& rows, int64_t weight_bytes, int64_t wanted) {
  const int64_t row_bytes = needs_memory(rows) ? memory_bytes(rows) : rows.rows * rows.k * 4;
  RowGroups groups{wanted, 0, false};
  if (row_bytes > weight_bytes) {
    const int64_t fitting = min_of(ceil_div(row_bytes, kRowBytesAtOnce), rows.rows / kRowsPerPanelRead);
    if (fitting > wanted) groups = {fitting, 0, true};
  }
  groups.count = min_of(groups.count, rows.num_blocks);
  groups.blocks = ceil_div(rows.num_blocks, groups.count);
  return groups;
}

// Adds an addend [num_rows, n] to a tile of the products with one panel.
void add_to_tile(const float* addend, int64_t num_rows, int64_t n, int64_t panel, float* tile) {
  const int64_t first = panel * kPanelRows, size = min_of(kPanelRows, n - first);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < size; ++i) tile[r * kPanelRows + i] += addend[r * n + first + i];
  }
}

// Multiplies a tile of the products with one panel by factors [num_rows, n].
void scale_tile(const float* factor, int64_t num_rows, int64_t n, int64_t panel, float* tile) {
  const int64_t first = panel * kPanelRows, size = min_of(kPanelRows, n - first);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < size; ++i) tile[r * kPanelRows + i] *= factor[r * n + first + i];
  }
}

}  // namespace

void matmul(const Matmul& a, const Pool& pool) {
  if (a.rows == 0) return;
  PrefetchHint hint;
  // Only few rows wait for memory.
  if (a.rows <= kMaxRowsToPrefetch) predict_next_weights(a, pool.num_threads, &hint);
  const Rows rows = prepare_rows(a, pool);
  const bool gated = a.activation != Activation::kNone;
  const int num_matrices = gated ? 1 : a.num_matrices;
  int64_t panels = 0;
  for (int i = 0; i < num_matrices; ++i) panels += num_panels(a.n[i]);
  const int64_t bytes = panel_bytes(a.format);
  const RowGroups groups = cut_rows(rows, panels * bytes * (gated ? 2 : 1), ceil_div(4 * pool.num_threads, panels));

  parallel_for(
      pool, panels * groups.count,
      [&](int64_t task) {
        int64_t panel = groups.are_outer ? task % panels : task / groups.count;
        int matrix = 0;
        while (panel >= num_panels(a.n[matrix])) panel -= num_panels(a.n[matrix++]);
        const int64_t first = (groups.are_outer ? task / panels : task % groups.count) * groups.blocks;
        const int64_t last = min_of(first + groups.blocks, rows.num_blocks);
        if (first >= last) return;
        const int64_t first_row = first * rows.block_rows;
        const int64_t num_rows = min_of(last * rows.block_rows, a.rows) - first_row;
        float* tile = static_cast<float*>(scratch(Scratch::kTile, num_rows * kPanelRows * 4 * (gated ? 2 : 1)));
        const auto change = [&](int i, float* to) {
          const int64_t skipped = first_row * a.n[i];
          if (a.addend[i] != nullptr) add_to_tile(a.addend[i] + skipped, num_rows, a.n[i], panel, to);
          if (a.factor[i] != nullptr) scale_tile(a.factor[i] + skipped, num_rows, a.n[i], panel, to);
        };
        multiply_panel(rows, a.format, a.weight[matrix] + panel * bytes, first, last, tile);
        change(matrix, tile);
        if (gated) {
          float* up = tile + num_rows * kPanelRows;
          multiply_panel(rows, a.format, a.weight[1] + panel * bytes, first, last, up);
          change(1, up);
          for (int64_t i = 0; i < num_rows * kPanelRows; i += kLanes) {
            store(tile + i, apply_activation(a.activation, load(tile + i)) * load(up + i));
          }
        }
        store_tile(tile, num_rows, a.n[matrix], panel, a.out[matrix] + first_row * a.n[matrix]);
      },
      &hint);
}

void packed_rows(const PackedRows& a, const Pool& pool) {
  const WeightFormat& f = a.format;
  const CodeReader codes = code_reader(f);
  parallel_for(a.count * f.k > kParallelElements ? pool : Pool{1, nullptr, nullptr}, a.count, [&](int64_t i) {
    int64_t id = a.ids[i] < 0 ? 0 : a.ids[i];
    if (id >= a.n) id = a.n - 1;
    const uint8_t* panel = a.weight + id / kPanelRows * panel_bytes(f);
    const int64_t r = id % kPanelRows;
    float* out = a.out + i * f.k;
    if (f.type == WeightType::kF32) {
      for (int64_t c = 0; c < f.k; ++c) out[c] = reinterpret_cast<const float*>(panel)[c * kPanelRows + r];
      return;
    }
    if (f.type == WeightType::kBf16) {
      const bf16_t* w = reinterpret_cast<const bf16_t*>(panel);
      for (int64_t c = 0; c < f.k; ++c) out[c] = bf16_to_float(w[(c / 2 * kPanelRows + r) * 2 + 1 - c % 2]);
      return;
    }
    if (f.type == WeightType::kCodes) return unpack_row(codes, panel, r, out);
    if (is_block_scaled(f.type)) {
      const BlockScaledPanel w = block_scaled_panel(f, panel);
      for (int64_t c = 0; c < f.k; ++c) out[c] = block_scaled_element(w, r, c);
      return;
    }
    const Int8Panel p = int8_panel(f, panel);
    for (int64_t c = 0; c < f.k; ++c) {
      const int q = p.values[(c / 4 * kPanelRows + r) * 4 + c % 4];
      out[c] = static_cast<float>(q - 128) * p.scales[r];
    }
  });
}

}  // namespace jaxis::JAXIS_ISA
