// Blocks of rows times one panel of weights, of any format: most of what there is to compile of an instruction set.
#include "panel_products.h"

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
#include "matmul_tiles.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Columns of a panel that all blocks of rows go through before the next: as many as stay in the first cache.
constexpr int64_t kColumnsAtOnce = 128;
constexpr int64_t kQuantizedColumnsAtOnce = 512;
constexpr int64_t kWordColumnsAtOnce = 256;

int64_t quantized_columns_at_once(const Rows& rows) {
  return rows.tiled ? kTiledColumnsAtOnce : kQuantizedColumnsAtOnce;
}

// Whether bytes that blocks [first, last) are multiplied with are extended to words first: for one block it takes
// longer than to extend them in registers.
bool extends_to_words(int64_t first, int64_t last) { return kHasBytePairs && last - first > 1; }

// Weights that come after those that several blocks of rows are multiplied with, asked for from memory meanwhile: while
// the blocks go through columns that are in the first cache, memory would be idle. Only prefetch instructions use the
// address, which may be past the weights' end.
struct WeightsAhead {
  const uint8_t* begin;
  int64_t bytes, num_blocks;

  // A block's share.
  void fetch(int64_t block) const {
    if (num_blocks <= 1) return;
    const int64_t end = bytes * (block + 1) / num_blocks;
    for (int64_t i = bytes * block / num_blocks; i < end; i += 64) __builtin_prefetch(begin + i);
  }
};

// Upcasts columns [begin, begin + columns) of a panel to float32 [columns][32]; of int8 without the scales. `begin` is
// even.
void dequantize_columns(const WeightFormat& f, const uint8_t* panel, int64_t begin, int64_t columns, float* out) {
  if (f.type == WeightType::kBf16) {
    const bf16_t* w = reinterpret_cast<const bf16_t*>(panel) + begin * kPanelRows;
    for (int64_t i = 0; i < columns; i += 2, w += 2 * kPanelRows, out += 2 * kPanelRows) {
      for (int h = 0; h < 2; ++h) {
        F32x16 even, odd;
        load_bf16_pairs(w + 2 * h * kLanes, &even, &odd);
        store(out + h * kLanes, even);
        if (i + 1 < columns) store(out + kPanelRows + h * kLanes, odd);
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

// Scales the sums of an int8 panel.
void scale_tile(const Int8Panel& w, int64_t num_rows, float* tile) {
  const F32x16 low = load(w.scales), high = load(w.scales + kLanes);
  for (int64_t r = 0; r < num_rows; ++r, tile += kPanelRows) {
    store(tile, load(tile) * low);
    store(tile + kLanes, load(tile + kLanes) * high);
  }
}

// Sums of the weights of groups [begin, begin + count) of a panel -> [count][32]; the weights themselves as words
// unless `words` is null.
void sum_int8_groups(const Int8Panel& w, int64_t begin, int64_t count, float* out, [[maybe_unused]] uint8_t* words) {
  const uint8_t* from = w.values + begin * kActivationGroup * kPanelRows;
  const I32x16 zeros = broadcast_i32(-128 * kActivationGroup);
  for (int64_t g = 0; g < count; ++g, out += kPanelRows) {
    QuadSums low = begin_quad_sums(zeros), high = low;
    for (int step = 0; step < kGroupSteps; ++step, from += 128) {
      JAXIS_ISA::prefetch(from);
      JAXIS_ISA::prefetch(from + 64);
      const U8x64 low_bytes = load_u8x64(from), high_bytes = load_u8x64(from + 64);
      low = add_quads(low, low_bytes);
      high = add_quads(high, high_bytes);
#if defined(JAXIS_BYTE_PAIRS)
      if (words == nullptr) continue;
      store_as_words(words, low_bytes, broadcast_words(128));
      store_as_words(words + 128, high_bytes, broadcast_words(128));
      words += step_bytes(Product::kWords);
#endif
    }
    store(out, to_float(end_quad_sums(low, zeros)));
    store(out + kLanes, to_float(end_quad_sums(high, zeros)));
  }
}

// Blocks [first, last) of rows times columns w, which begin at group `begin` of the activations -> tile. The weights
// after these are asked for meanwhile.
template <int kSteps, Product kProduct>
void multiply_integers(const Rows& rows, const IntegerColumns& w, const WeightsAhead& ahead, int64_t begin,
                       int64_t first, int64_t last, float* tile) {
  const int64_t part = begin * (kGroupSteps / kSteps);
  for (int64_t block = first; block < last; ++block, tile += rows.block_rows * kPanelRows) {
    const int num = rows.rows_of(block);
    QuantizedRows x = rows.quantized_block(block);
    x.values += begin * kGroupSteps * num * rows.quad_bytes;
    x.scales += begin * num;
    x.midpoints += begin * num;
    x.offsets += part * num;
    x.sums += part * num;
    ahead.fetch(block - first);
    if (rows.tiled) {
      configure_tiles(static_cast<int>(rows.block_rows));
      multiply_by_tiles(x, num, w, tile, begin == 0);
      continue;
    }
    with_count<kMaxQuantizedRows>(num, [&](auto r) { micro_int8<r(), kSteps, kProduct>(x, w, tile, begin == 0); });
  }
}

void multiply_int8_panel(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first, int64_t last,
                         float* tile) {
  const Int8Panel whole = int8_panel(f, panel);
  if (last - first == 1 && rows.rows_of(first) == 1 && !rows.tiled) {
    return micro_stored_int8_rows(rows.quantized_block(first), whole, tile);
  }
  alignas(64) float sums[kQuantizedColumnsAtOnce / kActivationGroup * kPanelRows];
  alignas(64) uint8_t words[kHasBytePairs ? kWordColumnsAtOnce * kPanelRows * 2 : 1];
  const bool extends = extends_to_words(first, last);
  const int64_t groups_at_once = (extends ? kWordColumnsAtOnce : quantized_columns_at_once(rows)) / kActivationGroup;
  for (int64_t begin = 0; begin < whole.groups; begin += groups_at_once) {
    IntegerColumns w{};
    w.spans = min_of(groups_at_once, whole.groups - begin);
    w.span_parts = 1;
    w.span_stride = kActivationGroup * kPanelRows;
    w.bytes = whole.values + begin * w.span_stride;
    w.scaled_sums = sums;
    sum_int8_groups(whole, begin, w.spans, sums, extends ? words : nullptr);
    const WeightsAhead ahead = {w.bytes + w.spans * w.span_stride, w.spans * w.span_stride, last - first};
    if constexpr (kHasBytePairs) {
      if (extends) {
        w.bytes = words;
        w.span_stride = kGroupSteps * step_bytes(Product::kWords);
        multiply_integers<kGroupSteps, Product::kWords>(rows, w, ahead, begin, first, last, tile);
        continue;
      }
    }
    multiply_integers<kGroupSteps, Product::kBytes>(rows, w, ahead, begin, first, last, tile);
  }
  scale_tile(whole, min_of(last * rows.block_rows, rows.rows) - first * rows.block_rows, tile);
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

// Calls function(kind, what is known of the layout) with both as constants, where the layout is one of kLayouts.
template <KnownLayout... kLayouts, typename Function>
void with_layout(const CodeReader& r, const Function& function) {
  with_code_kind(r.kind, [&](auto kind) {
    const auto calls = [&](auto layout) {
      if constexpr (is_compiled(kind(), layout())) {
        if (!has_layout(r, layout())) return false;
        function(kind, layout);
        return true;
      }
      return false;
    };
    if (!(calls(std::integral_constant<KnownLayout, kLayouts>()) || ...)) {
      function(kind, std::integral_constant<KnownLayout, KnownLayout::kNone>());
    }
  });
}

// Calls function(span, super-numbers of its super-block, a half of a panel's rows each) for spans [begin, begin +
// count).
template <typename Function>
JAXIS_INLINE void for_spans(const CodeReader& r, const uint8_t* panel, int64_t begin, int64_t count,
                            const Function& function) {
  const CodeLayout& l = r.layout;
  SuperNumbers super[2];
  for (int64_t s = begin; s < begin + count; ++s) {
    const uint8_t* span = r.span(panel, s);
    const int64_t place = s % l.spans_per_super;
    if (s == begin || place == 0) {
      for (int half = 0; half < 2; ++half) {
        super[half] = load_super(r, span - l.super_bytes - place * l.span_bytes, half);
      }
    }
    function(span, super);
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

// Unpacks spans [begin, begin + count) of a panel for products of integers. `memory` has integer_columns_bytes.
template <CodeKind kKind, KnownLayout kLayout, Product kProduct>
IntegerColumns unpack_integer_columns(const CodeReader& reader, const uint8_t* panel, int64_t begin, int64_t count,
                                      float* memory) {
  const CodeReader r = with_known_layout<kKind, kLayout>(reader);
  const CodeLayout& l = r.layout;
  const ByteTable levels = load_byte_table(r.byte_levels);
  const bool is_halved = l.groups_per_span == 2;
  const int64_t parts = is_halved ? 2 : l.units_per_span, numbers = count * parts * kPanelRows;
  const float part_columns = static_cast<float>(l.span / parts);
  float *const scales = memory, *const scaled_sums = scales + numbers, *const minima = scaled_sums + numbers;
  float* const zero_points = minima + numbers;
  auto* const bytes = reinterpret_cast<uint8_t*>(zero_points + numbers);
  constexpr bool kStands = kKind == CodeKind::kBytes && kProduct == Product::kBytes;  // as it is read
  const int32_t zero = r.has_zero_points ? 0 : r.zero;
  int64_t at = 0;
  uint8_t* to = bytes;
  for_spans(r, panel, begin, count, [&](const uint8_t* span, const SuperNumbers(&super)[2]) {
    const auto add_part = [&](int64_t g, const I32x16(&codes)[2]) {
      for (int half = 0; half < 2; ++half, at += kLanes) {
        const F32x16 scale = load_scale(r, super[half], span, g, half), zeros = load_zero(r, span, g, half);
        store(scales + at, scale);
        // Exact but for the scale.
        store(scaled_sums + at, scale * (to_float(codes[half]) - zeros * broadcast(part_columns)));
        if (r.has_minima()) store(minima + at, load_minimum(r, super[half], span, g, half));
        if (r.has_zero_points) store(zero_points + at, zeros);
      }
    };
    const uint8_t* unit = span + l.unit_at;
    JAXIS_ISA::prefetch(span);
    for (int64_t u = 0; u < l.units_per_span; ++u, unit += l.unit_bytes, to += kUnitSteps * step_bytes(kProduct)) {
      constexpr int kLater = kUnitSteps / 2;
      uint8_t* const out = kStands ? nullptr : to;
      I32x16 earlier[2], later[2];
      prefetch_unit<kKind, 2>(unit, 0);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        earlier[half] = unpack_codes<kKind, kProduct, 0, kLater>(unit, half, levels, zero, out);
        later[half] = unpack_codes<kKind, kProduct, kLater, kUnitSteps>(unit, half, levels, zero, out);
      }
      if (is_halved) {
        add_part(0, earlier);
        add_part(1, later);
      } else {
        add_part(0, {earlier[0] + later[0], earlier[1] + later[1]});
      }
    }
  });
  IntegerColumns out{};
  out.bytes = kStands ? r.span(panel, begin) + l.unit_at : bytes;
  out.span_stride = kStands ? l.span_bytes : l.span / 4 * step_bytes(kProduct);
  out.spans = count;
  out.span_parts = parts;
  out.scales = scales;
  out.scaled_sums = scaled_sums;
  if (r.has_zero_points) out.zero_points = zero_points;
  if (r.has_minima()) out.minima = minima;
  return out;
}

int64_t integer_columns_bytes(const CodeLayout& l, int64_t spans, bool words) {
  const int64_t parts = l.groups_per_span == 2 ? 2 : l.units_per_span;
  return spans * (4 * parts * 4 + l.span * (words ? 2 : 1)) * kPanelRows;
}

void multiply_codes_panel_int8(const Rows& rows, const uint8_t* panel, int64_t first, int64_t last, float* tile) {
  const CodeReader& r = rows.codes;
  if (last - first == 1 && rows.rows_of(first) == 1 && !rows.tiled) {
    return with_layout<KnownLayout::kScales, KnownLayout::kScalesAndMinima, KnownLayout::kHalfScales, KnownLayout::kQ4K,
                       KnownLayout::kQ6K>(r, [&](auto kind, auto layout) {
      micro_stored_int8<kind(), layout()>(rows.quantized_block(first), r, panel, tile);
    });
  }
  const CodeLayout& l = r.layout;
  const int64_t groups = l.span / kActivationGroup;  // of activations in a span
  const bool extends = extends_to_words(first, last) && !is_multiplied_in_pairs(r.kind);
  const int64_t columns_at_once = extends ? kWordColumnsAtOnce : quantized_columns_at_once(rows);
  const int64_t spans_at_once = min_of(ceil_div(columns_at_once, l.span), l.num_spans);
  auto* memory = static_cast<float*>(scratch(Scratch::kPanel, integer_columns_bytes(l, spans_at_once, extends)));
  with_layout<KnownLayout::kScales, KnownLayout::kScalesAndMinima>(r, [&](auto kind, auto layout) {
    int64_t count = 0;
    for (int64_t begin = 0; begin < l.num_spans; begin += count) {
      count = min_of(spans_at_once, l.num_spans - begin);
      const auto multiply = [&](auto product_of_groups, auto product_of_halves) {
        const IntegerColumns w =
            unpack_integer_columns<kind(), layout(), product_of_groups()>(r, panel, begin, count, memory);
        const WeightsAhead ahead = {r.span(panel, begin + count), count * l.span_bytes, last - first};
        if (l.groups_per_span == 2) {
          multiply_integers<kGroupSteps / 2, product_of_halves()>(rows, w, ahead, begin * groups, first, last, tile);
        } else {
          multiply_integers<kGroupSteps, product_of_groups()>(rows, w, ahead, begin * groups, first, last, tile);
        }
      };
      if constexpr (kHasBytePairs && !is_multiplied_in_pairs(kind())) {
        constexpr std::integral_constant<Product, Product::kWords> words;
        if (extends) {
          multiply(words, words);
          continue;
        }
      }
      // Bytes that stand between super-scales have no single stride.
      if (l.super_bytes != 0 && r.kind == CodeKind::kBytes) {
        count = min_of(count, l.spans_per_super - begin % l.spans_per_super);
      }
      multiply(std::integral_constant<Product, product_of<kind(), kGroupSteps>()>(),
               std::integral_constant<Product, product_of<kind(), kGroupSteps / 2>()>());
    }
  });
}

void multiply_codes_panel(const Rows& rows, const uint8_t* panel, int64_t first, int64_t last, float* tile) {
  const CodeReader& r = rows.codes;
  if (last - first == 1 && rows.rows_of(first) == 1) {
    return with_layout<KnownLayout::kHalfScales, KnownLayout::kQ4K, KnownLayout::kQ6K>(r, [&](auto kind, auto layout) {
      micro_stored_f32<kind(), layout()>(rows.plain_block(first), rows.sums_of_block(first), r, panel, tile);
    });
  }
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
  if (f.type == WeightType::kCodes) {
    if (rows.quantized) return multiply_codes_panel_int8(rows, panel, first, last, tile);
    return multiply_codes_panel(rows, panel, first, last, tile);
  }
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
  const bool upcasts = is_int8 || (f.type == WeightType::kBf16 && last - first > 2);
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
      const float* x = rows.plain_block(block) + begin * num;
      ahead.fetch(block - first);
      if (f.type == WeightType::kBf16 && !upcasts) {
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
