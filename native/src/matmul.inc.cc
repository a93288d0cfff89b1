#include "matmul.h"

#include "matmul_block_scaled.h"
#include "matmul_micro.h"
#include "next_weights.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Slots of thread-local scratch memory: the caller's rows, and a worker's panel and tiles.
enum Slot { kRowsSlot = 0, kPanelSlot = 1, kTileSlot = 2 };

constexpr int64_t kParallelElements = 8192;  // fewer are prepared by the calling thread alone
// Columns of a panel that all blocks of rows go through before the next: as many as stay in the first cache.
constexpr int64_t kColumnsAtOnce = 128;
constexpr int64_t kQuantizedColumnsAtOnce = 512;

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

int64_t activation_group(const WeightFormat& f) { return f.group != 0 ? f.group : kActivationGroup; }

// The rows, cut into blocks of as many rows as a micro-kernel takes, each block laid out as it reads them.
struct Rows {
  int64_t rows, k;
  int64_t block_rows, num_blocks;
  bool quantized;
  const float* plain;  // blocks of [k][block's rows]
  int64_t groups, group;
  int32_t zero_point;  // of weights that have none of their own
  uint8_t* values;     // see QuantizedRows; blocks one after the other
  float* scales;
  int32_t* offsets;
  float* sums;

  int rows_of(int64_t block) const { return static_cast<int>(min_of(block_rows, rows - block * block_rows)); }
  const float* plain_block(int64_t block) const { return plain + block * block_rows * k; }
  QuantizedRows quantized_block(int64_t block) const {
    const int64_t first = block * block_rows;
    return {values + first * groups * group / 4 * kActivationBytes, scales + first * groups, offsets + first * groups,
            sums + first * groups};
  }
};

void quantize_row(const Rows& rows, const float* x, int64_t block, int lane) {
  const int num_lanes = rows.rows_of(block);
  const QuantizedRows to = rows.quantized_block(block);
  uint8_t* values = const_cast<uint8_t*>(to.values) + lane * kActivationBytes;
  for (int64_t g = 0; g < rows.groups; ++g) {
    const int64_t begin = g * rows.group, size = min_of(rows.group, rows.k - begin);
    alignas(64) float padded[128];
    alignas(64) int8_t quantized[128];
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
    F32x16 lane_sums = zero();
    for (int64_t i = 0; i < rows.group; i += kLanes) {
      const F32x16 rounded = round_even(load(from + i) / divisor);
      lane_sums = lane_sums + rounded;
      store_i8(quantized + i, rounded);
    }
    const int32_t sum = static_cast<int32_t>(reduce_add(lane_sums));  // exact: integers far below 2 ** 24
    if (num_lanes == 1 && kActivationBytes == 4) {
      __builtin_memcpy(values, quantized, static_cast<size_t>(rows.group));
      values += rows.group;
    } else {
      for (int64_t i = 0; i < rows.group; i += 4) {
        store_activation_quad(values, quantized + i);
        values += num_lanes * kActivationBytes;
      }
    }
    const int64_t at = g * num_lanes + lane;
    const_cast<float*>(to.scales)[at] = scale;
    const_cast<int32_t*>(to.offsets)[at] = -rows.zero_point * sum;
    const_cast<float*>(to.sums)[at] = static_cast<float>(sum);
  }
}

// How `count` rows are cut into blocks; where they lie is not decided yet.
Rows plan_rows(int64_t count, const WeightFormat& format, bool quantized) {
  Rows rows{};
  rows.rows = count;
  rows.k = format.k;
  rows.quantized = quantized;
  const int64_t most = quantized ? kMaxQuantizedRows : kMaxRows;
  rows.block_rows = div_up(count, div_up(count, most));
  rows.num_blocks = div_up(count, rows.block_rows);
  if (quantized) {
    rows.group = activation_group(format);
    rows.groups = div_up(rows.k, rows.group);
    rows.zero_point = format.has_zero_points ? 0 : format.type == WeightType::kInt4 ? 8 : 128;
  }
  return rows;
}

// A row by itself is read where it stands, unless it is quantized.
bool needs_memory(const Rows& rows) { return rows.quantized || rows.block_rows > 1; }

int64_t memory_bytes(const Rows& rows) {
  if (!needs_memory(rows)) return 0;
  if (!rows.quantized) return rows.rows * rows.k * 4;
  return rows.rows * rows.groups * (rows.group / 4 * kActivationBytes + 12);
}

void set_memory(Rows* rows, char* memory) {
  if (!rows->quantized) {
    rows->plain = reinterpret_cast<const float*>(memory);
    return;
  }
  const int64_t num_scales = rows->rows * rows->groups;
  rows->scales = reinterpret_cast<float*>(memory);
  rows->offsets = reinterpret_cast<int32_t*>(memory + num_scales * 4);
  rows->sums = reinterpret_cast<float*>(memory + num_scales * 8);
  rows->values = reinterpret_cast<uint8_t*>(memory + num_scales * 12);
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
  float* to = const_cast<float*>(rows.plain_block(block));
  for (int64_t i = 0; i < rows.k; ++i) {
    for (int r = 0; r < num; ++r) to[i * num + r] = from[r][i];
  }
}

Rows prepare_rows(const Matmul& a, const Pool& pool) {
  Rows rows = plan_rows(a.rows, a.format, a.quantize_activations);
  if (!needs_memory(rows)) {
    rows.plain = a.x;
    return rows;
  }
  set_memory(&rows, static_cast<char*>(scratch(kRowsSlot, memory_bytes(rows))));
  const Pool alone = {1, nullptr, nullptr};
  parallel_for(a.rows * rows.k > kParallelElements ? pool : alone, rows.num_blocks,
               [&](int64_t block) { prepare_block(rows, block, [&](int64_t row) { return a.x + row * rows.k; }); });
  return rows;
}

QuantizedPanel quantized_panel(const WeightFormat& f, const uint8_t* panel) {
  QuantizedPanel out{};
  out.wide_scales = f.group == 0 || f.has_wide_scales;
  if (f.group == 0) {
    out.groups = div_up(f.k, kActivationGroup);
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

// Widens a panel to float32 [k][32].
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

// Widens a panel of 4-bit values to bytes, laid out as kInt8's.
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
  const int64_t groups_at_once = several ? div_up(kQuantizedColumnsAtOnce, group) : whole.groups;
  uint8_t* unpacked =
      unpack ? static_cast<uint8_t*>(scratch(kPanelSlot, groups_at_once * group * kPanelRows)) : nullptr;
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
  const int64_t groups_at_once = reads_stored ? whole.groups() : div_up(kColumnsAtOnce, f.group);
  float* as_float32 =
      reads_stored ? nullptr : static_cast<float*>(scratch(kPanelSlot, groups_at_once * f.group * kPanelRows * 4));
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
    float* memory = static_cast<float*>(scratch(kPanelSlot, f.k * kPanelRows * 4));
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

F32x16 apply_activation(Activation activation, F32x16 x) {
  const F32x16 one = broadcast(1.0f);
  if (activation == Activation::kSilu) return x / (one + exp(zero() - x));
  // gelu: x / 2 * (1 + tanh(u)), and (1 + tanh(u)) / 2 = 1 / (1 + e ** -2u)
  const F32x16 cubic = fma(x * x * x, broadcast(0.044715f), x);
  return x / (one + exp(cubic * broadcast(-2.0f * 0.7978845608028654f)));
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
  // Panels alone may be too few to occupy every thread.
  const int64_t wanted = div_up(4 * pool.num_threads, panels);
  const int64_t splits = wanted < rows.num_blocks ? wanted : rows.num_blocks;
  const int64_t blocks_per_split = div_up(rows.num_blocks, splits);
  const int64_t bytes = panel_bytes(a.format);

  parallel_for(
      pool, panels * splits,
      [&](int64_t task) {
        int64_t panel = task / splits;
        int matrix = 0;
        while (panel >= num_panels(a.n[matrix])) panel -= num_panels(a.n[matrix++]);
        const int64_t first = task % splits * blocks_per_split;
        const int64_t last = min_of(first + blocks_per_split, rows.num_blocks);
        if (first >= last) return;
        const int64_t first_row = first * rows.block_rows;
        const int64_t num_rows = min_of(last * rows.block_rows, a.rows) - first_row;
        float* tile = static_cast<float*>(scratch(kTileSlot, num_rows * kPanelRows * 4 * (gated ? 2 : 1)));
        multiply_panel(rows, a.format, a.weight[matrix] + panel * bytes, first, last, tile);
        if (gated) {
          float* up = tile + num_rows * kPanelRows;
          multiply_panel(rows, a.format, a.weight[1] + panel * bytes, first, last, up);
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
      for (int64_t c = 0; c < f.k; ++c) out[c] = bf16_to_float(w[(c / 2 * kPanelRows + r) * 2 + c % 2]);
      return;
    }
    if (is_block_scaled(f.type)) {
      const BlockScaledPanel w = block_scaled_panel(f, panel);
      for (int64_t c = 0; c < f.k; ++c) out[c] = block_scaled_element(w, r, c);
      return;
    }
    const QuantizedPanel p = quantized_panel(f, panel);
    const bool nibbles = f.type == WeightType::kInt4;
    const int64_t group = 4 * p.steps;
    for (int64_t c = 0; c < f.k; ++c) {
      const int64_t g = c / group, column = c % group;
      const bool second = nibbles && column >= group / 2;
      const int64_t byte = second ? column - group / 2 : column;
      const uint8_t raw = p.values[g * p.value_stride + (byte / 4 * kPanelRows + r) * 4 + byte % 4];
      const int q = !nibbles ? raw : second ? raw >> 4 : raw & 15;
      const int zero_point = p.zero_points != nullptr ? p.zero_points[g * p.scale_stride + r] : nibbles ? 8 : 128;
      const uint8_t* scales = p.scales + g * p.scale_stride;
      const float scale = p.wide_scales ? reinterpret_cast<const float*>(scales)[r]
                                        : bf16_to_float(reinterpret_cast<const bf16_t*>(scales)[r]);
      out[c] = static_cast<float>(q - zero_point) * scale;
    }
  });
}

}  // namespace jaxis::JAXIS_ISA
