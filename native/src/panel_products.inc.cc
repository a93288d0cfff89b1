// Blocks of rows times one panel of weights, of any format; those of int8 activations are in integer_products.inc.cc,
// since they are as much to compile.
#include "panel_products.h"

#include <cstdint>

#include "arithmetic.h"
#include "code_bytes.h"
#include "integer_products.h"
#include "matmul.h"
#include "matmul_block_scaled.h"
#include "matmul_codes.h"
#include "matmul_micro.h"
#include "matmul_rows.h"
#include "panel_loops.h"
#include "simd.h"
#include "single_row_codes.h"
#include "team.h"
#include "tiles.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Columns of a panel that all blocks of rows go through before the next: as many as stay in the first cache.
constexpr int64_t kColumnsAtOnce = 128;

// Upcasts columns [begin, begin + columns) of a panel to float32 [columns][32]; of int8 without the scales. `begin` is
// even.
void dequantize_columns(const WeightFormat& f, const uint8_t* panel, int64_t begin, int64_t columns, float* out) {
  if (f.type == WeightType::kBf16) {
    const bf16_t* w = reinterpret_cast<const bf16_t*>(panel) + begin * kPanelRows;
    for (int64_t i = 0; i < columns; i += 2, w += 2 * kPanelRows, out += 2 * kPanelRows) {
      for (int h = 0; h < 2; ++h) {
        F32x16 first, second;
        load_bf16_pairs(w + 2 * h * kLanes, &second, &first);
        store(out + h * kLanes, first);
        if (i + 1 < columns) store(out + kPanelRows + h * kLanes, second);
      }
    }
    return;
  }
  const Int8Panel p = int8_panel(f, panel);
  const CodeZero zero_point = code_zero(broadcast(128.0f));
  for (int64_t column = begin; column < begin + columns; ++column, out += kPanelRows) {
    for (int h = 0; h < 2; ++h) {
      const Bytes64 four = load_bytes(p.values + column / 4 * 128 + h * 64);
      store(out + h * kLanes, code_column(four, static_cast<int>(column % 4), zero_point));
    }
  }
}

// Unpacks spans [begin, begin + count) of a panel to float32. `memory` has float_columns_bytes.
FloatColumns unpack_float_columns(const CodeReader& r, const uint8_t* panel, int64_t begin, int64_t count,
                                  float* memory) {
  const CodeLayout& l = r.layout;
  const int64_t numbers = count * l.groups_per_span * kPanelRows;
  float *const scales = memory, *const minima = scales + numbers, *const values = minima + numbers;
  int64_t at = 0;
  for_spans(r, panel, begin, count, [&](const uint8_t* span, const SuperNumbers(&super)[2]) {
    for (int64_t g = 0; g < l.groups_per_span; ++g) {
      for (int half = 0; half < 2; ++half, at += kLanes) {
        store(scales + at, load_scale(r, super[half], span, g, half));
        if (r.has_minima()) store(minima + at, load_minimum(r, super[half], span, g, half));
      }
    }
  });
  with_code_kind(r.kind, [&](auto kind) {
    float* to = values;
    for (int64_t s = begin; s < begin + count; ++s) {
      const uint8_t* span = r.span(panel, s);
      for (int64_t u = 0; u < l.units_per_span; ++u, to += kUnit * kPanelRows) {
        unpack_floats<kind()>(r, span, span + l.unit_at + u * l.unit_bytes, to);
      }
    }
  });
  return {values, scales, r.has_minima() ? minima : nullptr, count, l.groups_per_span, l.units_per_span};
}

int64_t float_columns_bytes(const CodeLayout& l, int64_t spans) {
  return spans * (2 * l.groups_per_span + l.span) * kPanelRows * 4;
}

void multiply_codes_panel(const Rows& rows, const uint8_t* panel, int64_t first, int64_t last, float* tile) {
  const CodeReader& r = rows.codes;
  const int64_t spans_at_once = min_of(ceil_div(kColumnsAtOnce, r.layout.span), r.layout.num_spans);
  auto* memory = static_cast<float*>(scratch(Scratch::kPanel, float_columns_bytes(r.layout, spans_at_once)));
  for (int64_t begin = 0; begin < r.layout.num_spans; begin += spans_at_once) {
    const int64_t count = min_of(spans_at_once, r.layout.num_spans - begin);
    const FloatColumns w = unpack_float_columns(r, panel, begin, count, memory);
    const int64_t column = begin * r.layout.span, part = begin * r.layout.groups_per_span;
    const WeightsAhead ahead = {r.span(panel, begin + count), count * r.layout.span_bytes, last - first};
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      const float* sums = r.has_minima() ? rows.sums_of_block(block) + part * num : nullptr;
      const float* x = rows.plain_block(block) + column * num;
      ahead.fetch(block - first);
      with_count<kMaxRows>(num, [&](auto n) { micro_codes_f32<n()>(x, sums, w, c, begin == 0); });
    }
  }
}

void multiply_block_scaled_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first,
                                 int64_t last, float* tile) {
  const BlockScaledPanel whole = block_scaled_panel(f, panel);
  // What several blocks use is upcast once; a single block reads the low-precision weights itself.
  const bool reads_stored = last - first == 1;
  const int64_t groups_at_once = reads_stored ? whole.groups() : ceil_div(kColumnsAtOnce, f.group);
  float* as_float32 =
      reads_stored ? nullptr : static_cast<float*>(scratch(Scratch::kPanel, groups_at_once * f.group * kPanelRows * 4));
  for (int64_t begin = 0; begin < whole.groups(); begin += groups_at_once) {
    BlockScaledPanel w = slice_groups(whole, begin, groups_at_once);
    if (!reads_stored) w = upcast_block_scaled(w, as_float32);
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      const float* x = rows.plain_block(block) + begin * f.group * num;
      with_count<kMaxRows>(num, [&](auto n) {
        if (!reads_stored) {
          micro_block_scaled<n(), WeightType::kF32>(x, w, c, begin == 0);
        } else if (f.type == WeightType::kFp8) {
          micro_block_scaled<n(), WeightType::kFp8>(x, w, c, begin == 0);
        } else {
          micro_block_scaled<n(), WeightType::kMxfp4>(x, w, c, begin == 0);
        }
      });
    }
  }
}

}  // namespace

void multiply_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first, int64_t last,
                    float* tile) {
  if (rows.quantized) return multiply_panel_by_integers(rows, f, panel, first, last, tile);
  const bool is_one_row = last - first == 1 && rows.rows_of(first) == 1;
  if (f.type == WeightType::kCodes) {
    if (is_one_row) return multiply_codes_panel_by_row(rows, panel, first, tile);
    return multiply_codes_panel(rows, panel, first, last, tile);
  }
  if (is_block_scaled(f.type)) return multiply_block_scaled_panel(rows, f, panel, first, last, tile);
  const bool is_int8 = f.type == WeightType::kInt8;
  if (is_int8 && is_one_row) {
    const Int8Panel w = int8_panel(f, panel);
    micro_int8_f32(rows.plain_block(first), w, f.k, tile);
    scale_tile(w, 1, tile);
    return;
  }
  // What many blocks use is upcast once; a few read the low-precision weights themselves.
  const bool upcasts = is_int8 || (f.type == WeightType::kBf16 && !rows.pairs && last - first > 2);
  const int64_t columns_at_once = upcasts || last - first > 1 ? kColumnsAtOnce : f.k;
  const int64_t column_bytes = panel_bytes(f) / f.k;
  alignas(64) float upcast[kColumnsAtOnce * kPanelRows];
  for (int64_t begin = 0; begin < f.k; begin += columns_at_once) {
    const int64_t columns = min_of(columns_at_once, f.k - begin);
    const uint8_t* stored = panel + begin * column_bytes;
    const WeightsAhead ahead = {stored + columns * column_bytes, columns_at_once * column_bytes, last - first};
    if (upcasts) dequantize_columns(f, panel, begin, columns, upcast);
    const float* as_float32 = upcasts ? upcast : reinterpret_cast<const float*>(stored);
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      const float* x = rows.plain_block(block) + (rows.pairs ? begin / 2 : begin) * num;
      ahead.fetch(block - first);
      if (rows.pairs) {
        const bf16_t* w = reinterpret_cast<const bf16_t*>(stored);
        with_count<kMaxRows>(num, [&](auto n) { micro_bf16_pairs<n()>(x, w, columns, c, begin == 0); });
      } else if (f.type == WeightType::kBf16 && !upcasts) {
        const bf16_t* w = reinterpret_cast<const bf16_t*>(stored);
        with_count<kMaxRows>(num, [&](auto n) { micro_bf16<n()>(x, w, columns, c, begin == 0); });
      } else {
        with_count<kMaxPlainRows>(num, [&](auto n) { micro_f32<n()>(x, as_float32, columns, c, begin == 0); });
      }
    }
  }
  if (is_int8) {
    const int64_t num_rows = min_of(last * rows.block_rows, rows.rows) - first * rows.block_rows;
    scale_tile(int8_panel(f, panel), num_rows, tile);
  }
}

void store_tile(const float* tile, int64_t num_rows, int64_t n, int64_t panel, float* out) {
  const int64_t first = panel * kPanelRows, size = min_of(kPanelRows, n - first);
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* from = tile + r * kPanelRows;
    float* to = out + r * n + first;
    if (size == kPanelRows) {
      store(to, load(from));
      store(to + kLanes, load(from + kLanes));
    } else {
      for (int64_t i = 0; i < size; ++i) to[i] = from[i];
    }
  }
}

}  // namespace jaxis::JAXIS_ISA
