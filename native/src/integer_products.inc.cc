// Blocks of rows of int8 activations times one panel of int8 weights or codes.
#include "integer_products.h"

#include <cstdint>
#include <type_traits>

#include "arithmetic.h"
#include "code_bytes.h"
#include "dot.h"
#include "matmul.h"
#include "matmul_codes.h"
#include "matmul_micro.h"
#include "matmul_rows.h"
#include "matmul_tiles.h"
#include "panel_loops.h"
#include "panel_products.h"
#include "simd.h"
#include "single_row_codes.h"
#include "team.h"
#include "tiles.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Columns of a panel that all blocks of rows go through before the next: as many as stay in the first cache, as bytes
// and as words.
constexpr int64_t kByteColumnsAtOnce = 512;
constexpr int64_t kWordColumnsAtOnce = 256;

int64_t byte_columns_at_once(const Rows& rows) { return rows.tiled ? kTiledColumnsAtOnce : kByteColumnsAtOnce; }

// Whether bytes that blocks [first, last) are multiplied with are extended to words first: for one block it takes
// longer than to extend them in registers.
bool extends_to_words(int64_t first, int64_t last) { return kHasBytePairs && last - first > 1; }

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
  alignas(64) float sums[kByteColumnsAtOnce / kActivationGroup * kPanelRows];
  alignas(64) uint8_t words[kHasBytePairs ? kWordColumnsAtOnce * kPanelRows * 2 : 1];
  const bool extends = extends_to_words(first, last);
  const int64_t groups_at_once = (extends ? kWordColumnsAtOnce : byte_columns_at_once(rows)) / kActivationGroup;
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
  const CodeLayout& l = r.layout;
  const int64_t groups = l.span / kActivationGroup;  // of activations in a span
  const bool extends = extends_to_words(first, last) && !is_multiplied_in_pairs(r.kind);
  const int64_t columns_at_once = extends ? kWordColumnsAtOnce : byte_columns_at_once(rows);
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

}  // namespace

void multiply_panel_by_integers(const Rows& rows, const WeightFormat& f, const uint8_t* panel, int64_t first,
                                int64_t last, float* tile) {
  const bool is_one_row = last - first == 1 && rows.rows_of(first) == 1 && !rows.tiled;
  if (f.type == WeightType::kCodes) {
    if (is_one_row) return multiply_codes_panel_by_row(rows, panel, first, tile);
    return multiply_codes_panel_int8(rows, panel, first, last, tile);
  }
  if (is_one_row) return micro_stored_int8_rows(rows.quantized_block(first), int8_panel(f, panel), tile);
  multiply_int8_panel(rows, f, panel, first, last, tile);
}

}  // namespace jaxis::JAXIS_ISA
