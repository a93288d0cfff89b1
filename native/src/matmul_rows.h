// The rows that a product takes: cut into blocks and laid out as the micro-kernels of matmul_micro.h read them.
#pragma once

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "dot.h"
#include "matmul.h"
#include "matmul_codes.h"
#include "matmul_micro.h"
#include "matmul_tiles.h"
#include "simd.h"
#include "tiles.h"

namespace jaxis::JAXIS_ISA {

constexpr int64_t kParallelElements = 8192;  // fewer are prepared by the calling thread alone

// The rows, cut into blocks of as many rows as a micro-kernel takes, each block laid out as it reads them.
struct Rows {
  int64_t rows, k;
  int64_t block_rows, num_blocks;
  bool quantized;
  bool integers;        // quantized already: see Matmul::x_is_integer
  bool tiled;           // quantized, and multiplied by tiles: see multiply_by_tiles
  bool pairs;           // of bfloat16: see micro_bf16_pairs
  int quad_bytes;       // of four quantized values of a row; not of tiles
  CodeReader codes;     // of weights that are codes
  const float* plain;   // blocks of [k][block's rows], or of pairs [k2 / 2][block's rows]
  int64_t groups;       // of kActivationGroup columns, if quantized
  int64_t parts, part;  // columns whose sums are needed
  int32_t zero_point;   // of weights that have none of their own
  uint8_t* values;      // see QuantizedRows; blocks one after the other
  float* scales;
  float* midpoints;
  int32_t* offsets;
  float* sums;  // also of rows that are not quantized, if the weights have minima

  int rows_of(int64_t block) const { return static_cast<int>(min_of(block_rows, rows - block * block_rows)); }
  const float* plain_block(int64_t block) const { return plain + block * block_rows * words(); }
  int64_t words() const { return pairs ? ceil_div(k, 2) : k; }  // of a row
  const float* sums_of_block(int64_t block) const { return sums + block * block_rows * parts; }
  QuantizedRows quantized_block(int64_t block) const {
    const int64_t first = block * block_rows;
    return {values + first * groups * kGroupSteps * quad_bytes, scales + first * groups, midpoints + first * groups,
            offsets + first * parts, sums + first * parts};
  }
};

// kActivationGroup columns of a row: x ~ scale * value + midpoint.
struct QuantizedGroup {
  float scale, midpoint;
  float sums[2];  // of the first and the second half of the values; exact
  alignas(16) int8_t values[kActivationGroup];
};

// Quantizes x [size]; the values past its end are 0. Numbers that are not finite make the midpoint, and so every
// product, NaN.
inline QuantizedGroup quantize_group(const float* x, int64_t size, bool is_integer) {
  QuantizedGroup out;
  alignas(64) float padded[kActivationGroup];
  const float* from = x;
  if (size < kActivationGroup) {
    for (int64_t i = 0; i < kActivationGroup; ++i) padded[i] = x[i < size ? i : 0];
    from = padded;
  }
  const F32x16 halves[2] = {load(from), load(from + kLanes)};
  const float highest = reduce_max(max(halves[0], halves[1]));
  const float lowest = -reduce_max(max(zero() - halves[0], zero() - halves[1]));
  out.scale = is_integer ? 1.0f : (highest - lowest) / 254.0f;
  out.midpoint = is_integer ? 0.0f : (highest + lowest) * 0.5f;
  // A group whose numbers are all equal divides zeros by one.
  const F32x16 divisor = broadcast(out.scale == 0.0f ? 1.0f : out.scale), middle = broadcast(out.midpoint);
  for (int h = 0; h < 2; ++h) {
    F32x16 q = round_even((halves[h] - middle) / divisor);
    // Where the range is a few units in the last place the midpoint is off by a part of it. NaN stays.
    q = max(broadcast(-127.0f), min(broadcast(127.0f), q));
    if (size < kActivationGroup) {
      store(padded, q);
      for (int64_t i = max_of(size - h * kLanes, 0); i < kLanes; ++i) padded[i] = 0.0f;
      q = load(padded);
    }
    out.sums[h] = reduce_add(q);
    if (out.sums[h] != out.sums[h]) return {out.scale, out.sums[h], {0.0f, 0.0f}, {}};
    store_i8(out.values + h * kLanes, q);
  }
  return out;
}

inline void quantize_row(const Rows& rows, const float* x, int64_t block, int lane) {
  const int num_lanes = rows.rows_of(block);
  const QuantizedRows to = rows.quantized_block(block);
  uint8_t* values = const_cast<uint8_t*>(to.values) + lane * (rows.tiled ? kActivationGroup : rows.quad_bytes);
  const int32_t origin = rows.tiled ? kTileOriginBits : 0;
  const int64_t parts_per_group = kActivationGroup / rows.part;
  for (int64_t g = 0; g < rows.groups; ++g) {
    const int64_t begin = g * kActivationGroup;
    const QuantizedGroup q = quantize_group(x + begin, min_of(kActivationGroup, rows.k - begin), rows.integers);
    const_cast<float*>(to.scales)[g * num_lanes + lane] = q.scale;
    const_cast<float*>(to.midpoints)[g * num_lanes + lane] = q.midpoint;
    for (int64_t p = 0; p < parts_per_group; ++p) {
      const float sum = parts_per_group == 1 ? q.sums[0] + q.sums[1] : q.sums[p];
      const int64_t at = (g * parts_per_group + p) * num_lanes + lane;
      const_cast<int32_t*>(to.offsets)[at] = origin + (kDotBias - rows.zero_point) * static_cast<int32_t>(sum);
      const_cast<float*>(to.sums)[at] =
          rows.codes.has_minima() ? sum * q.scale + q.midpoint * static_cast<float>(rows.part) : sum;
    }
    if (rows.tiled || (num_lanes == 1 && rows.quad_bytes == 4)) {
      __builtin_memcpy(values, q.values, kActivationGroup);
      values += num_lanes * kActivationGroup;
    } else if (rows.quad_bytes == 4) {
      for (int64_t i = 0; i < kActivationGroup; i += 4, values += num_lanes * 4)
        __builtin_memcpy(values, q.values + i, 4);
    } else {
      for (int64_t i = 0; i < kActivationGroup; i += 4) {
        store_activation_quad(values, q.values + i);
        values += num_lanes * kActivationBytes;
      }
    }
  }
}

// The sums of a row's parts, each in a fixed order.
inline void sum_parts(const Rows& rows, const float* x, int64_t block, int lane) {
  const int num_lanes = rows.rows_of(block);
  float* to = const_cast<float*>(rows.sums_of_block(block)) + lane;
  for (int64_t p = 0; p < rows.parts; ++p, to += num_lanes) {
    F32x16 lane_sums = zero();
    for (int64_t i = 0; i < rows.part; i += kLanes) lane_sums = lane_sums + load(x + p * rows.part + i);
    *to = reduce_add(lane_sums);
  }
}

// How `count` rows are cut into blocks; where they lie is not decided yet.
inline Rows plan_rows(int64_t count, const WeightFormat& format, bool quantized, bool integers = false,
                      bool bfloat16s = false) {
  Rows rows{};
  rows.rows = count;
  rows.k = format.k;
  rows.quantized = quantized;
  rows.integers = integers;
  rows.pairs = bfloat16s && format.type == WeightType::kBf16 && multiplies_pairs();
  rows.codes = code_reader(format);
  const bool has_codes = format.type == WeightType::kCodes;
  rows.part = has_codes ? format.group : kActivationGroup;
  if (quantized) rows.part = min_of(rows.part, kActivationGroup);
  // Half groups do not fill tiles well enough to pay.
  rows.tiled = kHasTiles && quantized && rows.part == kActivationGroup && count >= kMinTiledRows;
  const int64_t most = rows.tiled                        ? kMaxTileRows
                       : quantized                       ? kMaxQuantizedRows
                       : format.type == WeightType::kF32 ? kMaxPlainRows
                                                         : kMaxRows;
  rows.block_rows = ceil_div(count, ceil_div(count, most));
  rows.num_blocks = ceil_div(count, rows.block_rows);
  rows.quad_bytes = has_codes ? activation_bytes(rows.codes.kind) : kActivationBytes;
  rows.groups = ceil_div(rows.k, kActivationGroup);
  rows.parts = ceil_div(rows.groups * kActivationGroup, rows.part);
  rows.zero_point = !has_codes ? 128 : rows.codes.has_zero_points ? 0 : rows.codes.zero;
  return rows;
}

inline bool needs_sums(const Rows& rows) { return rows.quantized || rows.codes.has_minima(); }

// A row by itself is read where it stands, unless it is quantized, summed or made of pairs.
inline bool needs_memory(const Rows& rows) { return rows.block_rows > 1 || needs_sums(rows) || rows.pairs; }

inline int64_t memory_bytes(const Rows& rows) {
  if (!needs_memory(rows)) return 0;
  if (!rows.quantized) return rows.rows * (rows.words() + (needs_sums(rows) ? rows.parts : 0)) * 4;
  // Tiles of the last block are read as if it had as many rows as the others.
  const int64_t past_end = rows.tiled ? rows.block_rows * kActivationGroup : 0;
  return rows.rows * (rows.groups * (kGroupSteps * rows.quad_bytes + 8) + rows.parts * 8) + past_end;
}

inline void set_memory(Rows* rows, char* memory) {
  if (!rows->quantized) {
    rows->plain = reinterpret_cast<const float*>(memory);
    rows->sums = reinterpret_cast<float*>(memory) + rows->rows * rows->words();
    return;
  }
  const int64_t num_scales = rows->rows * rows->groups, num_parts = rows->rows * rows->parts;
  rows->scales = reinterpret_cast<float*>(memory);
  rows->midpoints = rows->scales + num_scales;
  rows->offsets = reinterpret_cast<int32_t*>(rows->midpoints + num_scales);
  rows->sums = reinterpret_cast<float*>(rows->offsets + num_parts);
  rows->values = reinterpret_cast<uint8_t*>(rows->sums + num_parts);
}

// Lays a block out in the memory set; row_at(i) is row i.
template <typename RowAt>
void prepare_block(const Rows& rows, int64_t block, const RowAt& row_at) {
  const int num = rows.rows_of(block);
  if (rows.quantized) {
    for (int lane = 0; lane < num; ++lane) quantize_row(rows, row_at(block * rows.block_rows + lane), block, lane);
    return;
  }
  const float* from[kMaxPlainRows];
  for (int r = 0; r < num; ++r) from[r] = row_at(block * rows.block_rows + r);
  if (needs_sums(rows)) {
    for (int r = 0; r < num; ++r) sum_parts(rows, from[r], block, r);
  }
  float* to = const_cast<float*>(rows.plain_block(block));
  if (rows.pairs) {
    for (int64_t i = 0; i < rows.k; i += 2) {
      for (int r = 0; r < num; ++r, ++to) {
        const uint32_t second = i + 1 < rows.k ? to_bits(from[r][i + 1]) : 0;
        const uint32_t pair = (to_bits(from[r][i]) & 0xffff0000u) | second >> 16;
        std::memcpy(to, &pair, 4);
      }
    }
    return;
  }
  for (int64_t i = 0; i < rows.k; ++i) {
    for (int r = 0; r < num; ++r) to[i * num + r] = from[r][i];
  }
}

}  // namespace jaxis::JAXIS_ISA
