// Blocks of rows times one panel of weights, of any format.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arithmetic.h"
#include "code_bytes.h"
#include "dot.h"
#include "matmul.h"
#include "matmul_block_scaled.h"
#include "matmul_codes.h"
#include "matmul_micro.h"
#include "matmul_rows.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Columns of a panel that all blocks of rows go through before the next: as many as stay in the first cache.
constexpr int64_t kColumnsAtOnce = 128;
constexpr int64_t kQuantizedColumnsAtOnce = 512;

Int8Panel int8_panel(const WeightFormat& f, const uint8_t* panel) {
  const int64_t groups = ceil_div(f.k, kActivationGroup);
  const uint8_t* scales = panel + groups * kActivationGroup * kPanelRows;
  return {panel, reinterpret_cast<const float*>(scales), groups};
}

// Upcasts a panel to float32 [k][32]; of int8 without the scales.
void dequantize_panel(const WeightFormat& f, const uint8_t* panel, float* out) {
  if (f.type == WeightType::kBf16) {
    const bf16_t* w = reinterpret_cast<const bf16_t*>(panel);
    for (int64_t i = 0; i < f.k; i += 2, w += 2 * kPanelRows, out += 2 * kPanelRows) {
      for (int h = 0; h < 2; ++h) {
        F32x16 even, odd;
        load_bf16_pairs(w + 2 * h * kLanes, &even, &odd);
        store(out + h * kLanes, even);
        if (i + 1 < f.k) store(out + kPanelRows + h * kLanes, odd);
      }
    }
    return;
  }
  const Int8Panel p = int8_panel(f, panel);
  const CodeZero zero_point = code_zero(broadcast(128.0f));
  for (int64_t column = 0; column < f.k; ++column, out += kPanelRows) {
    for (int h = 0; h < 2; ++h) {
      const Bytes64 four = load_bytes(p.values + column / 4 * 128 + h * 64);
      store(out + h * kLanes, code_column(four, static_cast<int>(column % 4), zero_point));
    }
  }
}

// Scales the sums of an int8 panel.
void scale_tile(const Int8Panel& w, int64_t num_rows, float* tile) {
  const F32x16 low = load(w.scales), high = load(w.scales + kLanes);
  for (int64_t r = 0; r < num_rows; ++r, tile += kPanelRows) {
    store(tile, load(tile) * low);
    store(tile + kLanes, load(tile + kLanes) * high);
  }
}

void multiply_int8_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first, int64_t last,
                         float* tile) {
  const Int8Panel whole = int8_panel(f, panel);
  const int64_t groups_at_once = last - first > 1 ? ceil_div(kQuantizedColumnsAtOnce, kActivationGroup) : whole.groups;
  for (int64_t begin = 0; begin < whole.groups; begin += groups_at_once) {
    Int8Panel w = whole;
    w.groups = min_of(groups_at_once, whole.groups - begin);
    w.values += begin * kActivationGroup * kPanelRows;
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      QuantizedRows x = rows.quantized_block(block);
      x.values += begin * kInt8Steps * num * kActivationBytes;
      x.scales += begin * num;
      x.offsets += begin * num;
      x.sums += begin * num;
      const bool is_last = begin + w.groups == whole.groups;
      with_count<kMaxQuantizedRows>(num, [&](auto r) { micro_int8<r()>(x, w, c, begin == 0, is_last); });
    }
  }
}

// Calls function(kind) with the kind of codes as a constant.
template <typename Function>
void with_code_kind(CodeKind kind, const Function& function) {
  switch (kind) {
#define JAXIS_CASE(K) \
  case K:             \
    return function(std::integral_constant<CodeKind, K>())
    JAXIS_CASE(CodeKind::kNibbles);
    JAXIS_CASE(CodeKind::kByteLevels);
    JAXIS_CASE(CodeKind::kFloatLevels);
    JAXIS_CASE(CodeKind::kFiveBits);
    JAXIS_CASE(CodeKind::kSixBits);
    JAXIS_CASE(CodeKind::kBytes);
#undef JAXIS_CASE
  }
}

// Unpacks spans [begin, begin + count) of a panel: to bytes for quantized rows, else to float32. `memory` has
// unpacked_bytes.
UnpackedCodes unpack_codes(const CodeReader& r, const uint8_t* panel, int64_t begin, int64_t count, bool quantized,
                           float* memory) {
  const CodeLayout& l = r.layout;
  const int64_t numbers = count * l.groups_per_span * kPanelRows;
  float* const scales = memory;
  float* const minima = scales + numbers;
  float* const zero_points = minima + numbers;
  float* const values = zero_points + numbers;
  UnpackedCodes out{};
  out.spans = count;
  out.groups_per_span = l.groups_per_span;
  out.units_per_span = l.units_per_span;
  out.scales = scales;
  if (r.has_minima()) out.minima = minima;
  if (r.has_zero_points) out.zero_points = zero_points;
  for (int half = 0; half < 2; ++half) {
    SuperNumbers super{};
    for (int64_t s = begin; s < begin + count; ++s) {
      const uint8_t* span = r.span(panel, s);
      if (s == begin || s % l.spans_per_super == 0) {
        super = load_super(r, span - l.super_bytes - s % l.spans_per_super * l.span_bytes, half);
      }
      for (int64_t g = 0; g < l.groups_per_span; ++g) {
        const int64_t at = ((s - begin) * l.groups_per_span + g) * kPanelRows + half * kLanes;
        store(scales + at, load_scale(r, super, span, g, half));
        if (r.has_minima()) store(minima + at, load_minimum(r, super, span, g, half));
        if (r.has_zero_points) store(zero_points + at, load_zero_point(r, span, g, half));
      }
    }
  }
  if (quantized && r.kind == CodeKind::kBytes && l.super_bytes == 0) {  // they stand there as they are read
    out.bytes = r.span(panel, begin) + l.unit_at;
    out.byte_stride = l.span_bytes;
    return out;
  }
  out.bytes = reinterpret_cast<const uint8_t*>(values);
  out.byte_stride = l.span * kPanelRows;
  out.floats = values;
  with_code_kind(r.kind, [&](auto kind) {
    for (int64_t s = 0; s < count; ++s) {
      const uint8_t* span = r.span(panel, begin + s);
      for (int64_t u = 0; u < l.units_per_span; ++u) {
        const uint8_t* unit = span + l.unit_at + u * l.unit_bytes;
        const int64_t at = (s * l.units_per_span + u) * kUnit * kPanelRows;
        if (quantized) {
          unpack_bytes<kind()>(r, unit, reinterpret_cast<uint8_t*>(values) + at);
        } else {
          unpack_floats<kind()>(r, span, unit, values + at);
        }
      }
    }
  });
  return out;
}

int64_t unpacked_bytes(const CodeLayout& layout, int64_t spans, bool quantized) {
  const int64_t numbers = 3 * spans * layout.groups_per_span * kPanelRows * 4;
  return numbers + spans * layout.span * kPanelRows * (quantized ? 1 : 4);
}

void multiply_codes_panel(const Rows& rows, const uint8_t* panel, int64_t first, int64_t last, float* tile) {
  const CodeReader& r = rows.codes;
  if (last - first == 1 && rows.rows_of(first) == 1) {
    with_code_kind(r.kind, [&](auto kind) {
      if (rows.quantized) {
        micro_stored_int8<kind()>(rows.quantized_block(first), r, panel, tile);
      } else {
        micro_stored_f32<kind()>(rows.plain_block(first), rows.sums_of_block(first), r, panel, tile);
      }
    });
    return;
  }
  const int64_t columns = rows.quantized ? kQuantizedColumnsAtOnce : kColumnsAtOnce;
  const int64_t spans_at_once = min_of(ceil_div(columns, r.layout.span), r.layout.num_spans);
  auto* memory = static_cast<float*>(scratch(Scratch::kPanel, unpacked_bytes(r.layout, spans_at_once, rows.quantized)));
  for (int64_t begin = 0; begin < r.layout.num_spans; begin += spans_at_once) {
    const int64_t count = min_of(spans_at_once, r.layout.num_spans - begin);
    const UnpackedCodes w = unpack_codes(r, panel, begin, count, rows.quantized, memory);
    const int64_t column = begin * r.layout.span, part = begin * r.layout.groups_per_span;
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      if (rows.quantized) {
        QuantizedRows x = rows.quantized_block(block);
        x.values += column / 4 * num * kActivationBytes;
        x.scales += begin * num;
        x.offsets += part * num;
        x.sums += part * num;
        with_count<kMaxQuantizedRows>(num, [&](auto n) { micro_codes_int8<n()>(x, w, c, begin == 0); });
      } else {
        const float* sums = r.has_minima() ? rows.sums_of_block(block) + part * num : nullptr;
        const float* x = rows.plain_block(block) + column * num;
        with_count<kMaxRows>(num, [&](auto n) { micro_codes_f32<n()>(x, sums, w, c, begin == 0); });
      }
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

// Row blocks [first, last) times one panel -> tile [rows of these blocks][32].
void multiply_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first, int64_t last,
                    float* tile) {
  if (f.type == WeightType::kCodes) return multiply_codes_panel(rows, panel, first, last, tile);
  if (rows.quantized) return multiply_int8_panel(rows, f, panel, first, last, tile);
  if (is_block_scaled(f.type)) return multiply_block_scaled_panel(rows, f, panel, first, last, tile);
  const bool is_int8 = f.type == WeightType::kInt8;
  if (is_int8 && last - first == 1 && rows.rows_of(first) == 1) {
    const Int8Panel w = int8_panel(f, panel);
    micro_int8_f32(rows.plain_block(first), w, f.k, tile);
    scale_tile(w, 1, tile);
    return;
  }
  // What many blocks use is upcast once; a few read the low-precision weights themselves.
  const bool reads_stored = f.type == WeightType::kBf16 && last - first <= 2;
  const float* as_float32 = reinterpret_cast<const float*>(panel);
  if (f.type != WeightType::kF32 && !reads_stored) {
    float* memory = static_cast<float*>(scratch(Scratch::kPanel, f.k * kPanelRows * 4));
    dequantize_panel(f, panel, memory);
    as_float32 = memory;
  }
  const int64_t columns_at_once = last - first > 1 ? kColumnsAtOnce : f.k;
  for (int64_t begin = 0; begin < f.k; begin += columns_at_once) {
    const int64_t columns = min_of(columns_at_once, f.k - begin);
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      const float* x = rows.plain_block(block) + begin * num;
      if (reads_stored) {
        const bf16_t* w = reinterpret_cast<const bf16_t*>(panel) + begin * kPanelRows;
        with_count<kMaxRows>(num, [&](auto n) { micro_bf16<n()>(x, w, columns, c, begin == 0); });
      } else {
        const float* w = as_float32 + begin * kPanelRows;
        with_count<kMaxRows>(num, [&](auto n) { micro_f32<n()>(x, w, columns, c, begin == 0); });
      }
    }
  }
  if (is_int8) {
    const int64_t num_rows = min_of(last * rows.block_rows, rows.rows) - first * rows.block_rows;
    scale_tile(int8_panel(f, panel), num_rows, tile);
  }
}

// Writes a tile [num_rows][32] into columns [32 * panel, ...) of out [..., n].
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

}  // namespace
}  // namespace jaxis::JAXIS_ISA
