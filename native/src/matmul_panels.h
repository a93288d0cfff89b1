// Blocks of rows times one panel of weights, of any format.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "dot.h"
#include "matmul.h"
#include "matmul_block_scaled.h"
#include "matmul_micro.h"
#include "matmul_rows.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Columns of a panel that all blocks of rows go through before the next: as many as stay in the first cache.
constexpr int64_t kColumnsAtOnce = 128;
constexpr int64_t kQuantizedColumnsAtOnce = 512;

QuantizedPanel quantized_panel(const WeightFormat& f, const uint8_t* panel) {
  QuantizedPanel out{};
  out.wide_scales = f.group == 0 || f.has_wide_scales;
  if (f.group == 0) {
    out.groups = ceil_div(f.k, kActivationGroup);
    out.steps = kActivationGroup / 4;
    out.values = panel;
    out.value_stride = kActivationGroup * kPanelRows;
    out.scales = panel + out.groups * out.value_stride;
    return out;
  }
  const int64_t value_bytes = (f.type == WeightType::kInt4 ? f.group / 2 : f.group) * kPanelRows;
  out.groups = f.k / f.group;
  out.steps = f.group / 4;
  out.values = panel;
  out.scales = panel + value_bytes;
  if (f.has_zero_points) out.zero_points = out.scales + (out.wide_scales ? 4 : 2) * kPanelRows;
  out.value_stride = out.scale_stride = panel_bytes(f) / out.groups;
  return out;
}

// Upcasts a panel to float32 [k][32].
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
  const QuantizedPanel p = quantized_panel(f, panel);
  const bool nibbles = f.type == WeightType::kInt4;
  for (int64_t g = 0; g < p.groups; ++g) {
    const uint8_t* values = p.values + g * p.value_stride;
    const uint8_t* scales = p.scales + g * p.scale_stride;
    for (int h = 0; h < 2; ++h) {
      const F32x16 scale = load_scales(scales, h, p.wide_scales);
      const F32x16 zero_point = p.zero_points != nullptr ? load_u8(p.zero_points + g * p.scale_stride + h * kLanes)
                                                         : broadcast(nibbles ? 8.0f : 128.0f);
      for (int64_t column = 0; column < 4 * p.steps; ++column) {
        const int64_t at = g * 4 * p.steps + column;
        if (at >= f.k) break;
        const bool second = nibbles && column >= 2 * p.steps;
        const int64_t byte = second ? column - 2 * p.steps : column;
        const F32x16 q = load_column(values + byte / 4 * 128 + h * 64, static_cast<int>(byte % 4), second ? 4 : 0,
                                     nibbles ? 15u : 255u);
        store(out + at * kPanelRows + h * kLanes, (q - zero_point) * scale);
      }
    }
  }
}

// Upcasts a panel of 4-bit values to bytes, laid out as kInt8's.
void unpack_nibbles(const QuantizedPanel& p, uint8_t* out) {
  const int64_t half = p.steps / 2 * 128;
  for (int64_t g = 0; g < p.groups; ++g, out += 2 * half) {
    const uint8_t* values = p.values + g * p.value_stride;
    for (int64_t i = 0; i < half; ++i) {
      out[i] = values[i] & 15;
      out[i + half] = values[i] >> 4;
    }
  }
}

void run_f32(int rows, const float* x, const float* w, int64_t k, float* c, bool first) {
  switch (rows) {
#define JAXIS_CASE(R)                                             \
  case R:                                                         \
    if constexpr (R <= kMaxRows) micro_f32<R>(x, w, k, c, first); \
    return
    JAXIS_CASE(1);
    JAXIS_CASE(2);
    JAXIS_CASE(3);
    JAXIS_CASE(4);
    JAXIS_CASE(5);
    JAXIS_CASE(6);
    JAXIS_CASE(7);
    JAXIS_CASE(8);
    JAXIS_CASE(9);
    JAXIS_CASE(10);
    JAXIS_CASE(11);
    JAXIS_CASE(12);
#undef JAXIS_CASE
  }
}

void run_bf16(int rows, const float* x, const bf16_t* w, int64_t k, float* c, bool first) {
  switch (rows) {
#define JAXIS_CASE(R)                                              \
  case R:                                                          \
    if constexpr (R <= kMaxRows) micro_bf16<R>(x, w, k, c, first); \
    return
    JAXIS_CASE(1);
    JAXIS_CASE(2);
    JAXIS_CASE(3);
    JAXIS_CASE(4);
    JAXIS_CASE(5);
    JAXIS_CASE(6);
    JAXIS_CASE(7);
    JAXIS_CASE(8);
    JAXIS_CASE(9);
    JAXIS_CASE(10);
    JAXIS_CASE(11);
    JAXIS_CASE(12);
#undef JAXIS_CASE
  }
}

template <bool kNibbles, bool kGrouped>
void run_quantized(int rows, const QuantizedRows& x, const QuantizedPanel& w, float* c, bool first, bool last) {
  switch (rows) {
#define JAXIS_CASE(R)                                                                                   \
  case R:                                                                                               \
    if constexpr (R <= kMaxQuantizedRows) micro_quantized<R, kNibbles, kGrouped>(x, w, c, first, last); \
    return
    JAXIS_CASE(1);
    JAXIS_CASE(2);
    JAXIS_CASE(3);
    JAXIS_CASE(4);
    JAXIS_CASE(5);
    JAXIS_CASE(6);
#undef JAXIS_CASE
  }
}

void multiply_quantized_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first,
                              int64_t last, float* tile) {
  const QuantizedPanel whole = quantized_panel(f, panel);
  const bool several = last - first > 1;
  const bool unpack = f.type == WeightType::kInt4 && several;
  const int64_t group = 4 * whole.steps;
  const int64_t groups_at_once = several ? ceil_div(kQuantizedColumnsAtOnce, group) : whole.groups;
  uint8_t* unpacked =
      unpack ? static_cast<uint8_t*>(scratch(Scratch::kPanel, groups_at_once * group * kPanelRows)) : nullptr;
  for (int64_t begin = 0; begin < whole.groups; begin += groups_at_once) {
    QuantizedPanel w = whole;
    w.groups = min_of(groups_at_once, whole.groups - begin);
    w.values += begin * whole.value_stride;
    w.scales += begin * whole.scale_stride;
    if (w.zero_points != nullptr) w.zero_points += begin * whole.scale_stride;
    if (unpack) {
      unpack_nibbles(w, unpacked);
      w.values = unpacked;
      w.value_stride = group * kPanelRows;
    }
    const bool is_first = begin == 0, is_last = begin + w.groups == whole.groups;
    float* c = tile;
    for (int64_t block = first; block < last; ++block, c += rows.block_rows * kPanelRows) {
      const int num = rows.rows_of(block);
      QuantizedRows x = rows.quantized_block(block);
      x.values += begin * whole.steps * num * kActivationBytes;
      x.scales += begin * num;
      x.offsets += begin * num;
      x.sums += begin * num;
      if (f.group == 0) {
        run_quantized<false, false>(num, x, w, c, is_first, is_last);
      } else if (f.type == WeightType::kInt4 && !unpack) {
        run_quantized<true, true>(num, x, w, c, is_first, is_last);
      } else {
        run_quantized<false, true>(num, x, w, c, is_first, is_last);
      }
    }
  }
}

template <WeightType kStored>
void run_block_scaled(int rows, const float* x, const BlockScaledPanel& w, float* c, bool first) {
  switch (rows) {
#define JAXIS_CASE(R)                                                            \
  case R:                                                                        \
    if constexpr (R <= kMaxRows) micro_block_scaled<R, kStored>(x, w, c, first); \
    return
    JAXIS_CASE(1);
    JAXIS_CASE(2);
    JAXIS_CASE(3);
    JAXIS_CASE(4);
    JAXIS_CASE(5);
    JAXIS_CASE(6);
    JAXIS_CASE(7);
    JAXIS_CASE(8);
    JAXIS_CASE(9);
    JAXIS_CASE(10);
    JAXIS_CASE(11);
    JAXIS_CASE(12);
#undef JAXIS_CASE
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
      if (!reads_stored) {
        run_block_scaled<WeightType::kF32>(num, x, w, c, begin == 0);
      } else if (f.type == WeightType::kFp8) {
        run_block_scaled<WeightType::kFp8>(num, x, w, c, begin == 0);
      } else {
        run_block_scaled<WeightType::kMxfp4>(num, x, w, c, begin == 0);
      }
    }
  }
}

// Row blocks [first, last) times one panel -> tile [rows of these blocks][32].
void multiply_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first, int64_t last,
                    float* tile) {
  if (rows.quantized) return multiply_quantized_panel(rows, f, panel, first, last, tile);
  if (is_block_scaled(f.type)) return multiply_block_scaled_panel(rows, f, panel, first, last, tile);
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
        run_bf16(num, x, w, columns, c, begin == 0);
      } else {
        run_f32(num, x, as_float32 + begin * kPanelRows, columns, c, begin == 0);
      }
    }
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
