// The rows that a product takes: cut into blocks and laid out as the micro-kernels of matmul_micro.h read them.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "dot.h"
#include "matmul.h"
#include "matmul_codes.h"
#include "matmul_micro.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int64_t kParallelElements = 8192;  // fewer are prepared by the calling thread alone

// The rows, cut into blocks of as many rows as a micro-kernel takes, each block laid out as it reads them.
struct Rows {
  int64_t rows, k;
  int64_t block_rows, num_blocks;
  bool quantized;
  CodeReader codes;       // of weights that are codes
  const float* plain;     // blocks of [k][block's rows]
  int64_t groups, group;  // of activations
  int64_t parts, part;    // columns that the weights have a minimum or zero point for, if anything needs their sums
  int32_t zero_point;     // of weights that have none of their own
  uint8_t* values;        // see QuantizedRows; blocks one after the other
  float* scales;
  int32_t* offsets;
  float* sums;  // also of rows that are not quantized, if the weights have minima

  int rows_of(int64_t block) const { return static_cast<int>(min_of(block_rows, rows - block * block_rows)); }
  const float* plain_block(int64_t block) const { return plain + block * block_rows * k; }
  const float* sums_of_block(int64_t block) const { return sums + block * block_rows * parts; }
  QuantizedRows quantized_block(int64_t block) const {
    const int64_t first = block * block_rows;
    return {values + first * groups * group / 4 * kActivationBytes, scales + first * groups, offsets + first * parts,
            sums + first * parts};
  }
};

void quantize_row(const Rows& rows, const float* x, int64_t block, int lane) {
  const int num_lanes = rows.rows_of(block);
  const QuantizedRows to = rows.quantized_block(block);
  uint8_t* values = const_cast<uint8_t*>(to.values) + lane * kActivationBytes;
  for (int64_t g = 0; g < rows.groups; ++g) {
    const int64_t begin = g * rows.group, size = min_of(rows.group, rows.k - begin);
    alignas(64) float padded[kMaxGroup];
    alignas(64) int8_t quantized[kMaxGroup];
    const float* from = x + begin;
    if (size < rows.group) {
      for (int64_t i = 0; i < rows.group; ++i) padded[i] = i < size ? from[i] : 0.0f;
      from = padded;
    }
    F32x16 largest = zero();
    for (int64_t i = 0; i < rows.group; i += kLanes) largest = max(largest, abs(load(from + i)));
    const float scale = reduce_max(largest) / 127.0f;
    // A group of zeros divides by one instead.
    const F32x16 divisor = broadcast(scale == 0.0f ? 1.0f : scale);
    for (int64_t begin_part = 0; begin_part < rows.group; begin_part += rows.part) {
      F32x16 lane_sums = zero();
      for (int64_t i = begin_part; i < begin_part + rows.part; i += kLanes) {
        const F32x16 rounded = round_even(load(from + i) / divisor);
        lane_sums = lane_sums + rounded;
        store_i8(quantized + i, rounded);
      }
      const float sum = reduce_add(lane_sums);  // exact: integers far below 2 ** 24
      const int64_t at = (begin + begin_part) / rows.part * num_lanes + lane;
      const_cast<int32_t*>(to.offsets)[at] = -rows.zero_point * static_cast<int32_t>(sum);
      const_cast<float*>(to.sums)[at] = rows.codes.has_minima() ? sum * scale : sum;
    }
    if (num_lanes == 1 && kActivationBytes == 4) {
      __builtin_memcpy(values, quantized, static_cast<size_t>(rows.group));
      values += rows.group;
    } else {
      for (int64_t i = 0; i < rows.group; i += 4) {
        store_activation_quad(values, quantized + i);
        values += num_lanes * kActivationBytes;
      }
    }
    const_cast<float*>(to.scales)[g * num_lanes + lane] = scale;
  }
}

// The sums of a row's parts, each in a fixed order.
void sum_parts(const Rows& rows, const float* x, int64_t block, int lane) {
  const int num_lanes = rows.rows_of(block);
  float* to = const_cast<float*>(rows.sums_of_block(block)) + lane;
  for (int64_t p = 0; p < rows.parts; ++p, to += num_lanes) {
    F32x16 lane_sums = zero();
    for (int64_t i = 0; i < rows.part; i += kLanes) lane_sums = lane_sums + load(x + p * rows.part + i);
    *to = reduce_add(lane_sums);
  }
}

// How `count` rows are cut into blocks; where they lie is not decided yet.
Rows plan_rows(int64_t count, const WeightFormat& format, bool quantized) {
  Rows rows{};
  rows.rows = count;
  rows.k = format.k;
  rows.quantized = quantized;
  const int64_t most = quantized ? kMaxQuantizedRows : kMaxRows;
  rows.block_rows = ceil_div(count, ceil_div(count, most));
  rows.num_blocks = ceil_div(count, rows.block_rows);
  rows.codes = code_reader(format);
  if (format.type == WeightType::kCodes) {
    rows.group = rows.codes.layout.span;
    rows.part = format.group;
    rows.zero_point = rows.codes.has_zero_points ? 0 : rows.codes.zero;
  } else {
    rows.group = rows.part = kActivationGroup;
    rows.zero_point = 128;
  }
  rows.groups = ceil_div(rows.k, rows.group);
  rows.parts = rows.groups * (rows.group / rows.part);
  return rows;
}

bool needs_sums(const Rows& rows) { return rows.quantized || rows.codes.has_minima(); }

// A row by itself is read where it stands, unless it is quantized or summed.
bool needs_memory(const Rows& rows) { return rows.block_rows > 1 || needs_sums(rows); }

int64_t memory_bytes(const Rows& rows) {
  if (!needs_memory(rows)) return 0;
  if (!rows.quantized) return rows.rows * (rows.k + (needs_sums(rows) ? rows.parts : 0)) * 4;
  return rows.rows * (rows.groups * (rows.group / 4 * kActivationBytes + 4) + rows.parts * 8);
}

void set_memory(Rows* rows, char* memory) {
  if (!rows->quantized) {
    rows->plain = reinterpret_cast<const float*>(memory);
    rows->sums = reinterpret_cast<float*>(memory) + rows->rows * rows->k;
    return;
  }
  const int64_t num_scales = rows->rows * rows->groups, num_parts = rows->rows * rows->parts;
  rows->scales = reinterpret_cast<float*>(memory);
  rows->offsets = reinterpret_cast<int32_t*>(memory + num_scales * 4);
  rows->sums = reinterpret_cast<float*>(memory + (num_scales + num_parts) * 4);
  rows->values = reinterpret_cast<uint8_t*>(memory + (num_scales + 2 * num_parts) * 4);
}

// Lays a block out in the memory set; row_at(i) is row i.
template <typename RowAt>
void prepare_block(const Rows& rows, int64_t block, const RowAt& row_at) {
  const int num = rows.rows_of(block);
  if (rows.quantized) {
    for (int lane = 0; lane < num; ++lane) quantize_row(rows, row_at(block * rows.block_rows + lane), block, lane);
    return;
  }
  const float* from[kMaxRows];
  for (int r = 0; r < num; ++r) from[r] = row_at(block * rows.block_rows + r);
  if (needs_sums(rows)) {
    for (int r = 0; r < num; ++r) sum_parts(rows, from[r], block, r);
  }
  float* to = const_cast<float*>(rows.plain_block(block));
  for (int64_t i = 0; i < rows.k; ++i) {
    for (int r = 0; r < num; ++r) to[i * num + r] = from[r][i];
  }
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
