// The innermost loops of products with low-bit codes, group by group of columns.
//
// A single row reads the codes where they are packed. For more rows a part of the panel is unpacked first, to a byte or
// to a float32 a code, and every block of rows goes through that. Both do the same arithmetic in the same order.
#pragma once

#include <cstdint>
#include <cstring>

#include "code_bytes.h"
#include "dot.h"
#include "low_precision_floats.h"
#include "matmul.h"
#include "matmul_micro.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {

enum class CodeKind { kTwoBits, kNibbles, kByteLevels, kFloatLevels, kFiveBits, kSixBits, kBytes };

// What the loops need to know of a format.
struct CodeReader {
  CodeKind kind;
  CodeLayout layout;
  ScaleType scale, minimum, super_scale;
  bool has_zero_points;
  int32_t zero;  // the zero point: subtracted from each byte to get its value
  uint8_t byte_levels[kMaxLevels];
  float float_levels[kMaxLevels];

  bool has_minima() const { return minimum != ScaleType::kNone; }
  const uint8_t* span(const uint8_t* panel, int64_t s) const {
    return panel + (s / layout.spans_per_super + 1) * layout.super_bytes + s * layout.span_bytes;
  }
};

inline CodeReader code_reader(const WeightFormat& f) {
  CodeReader out{};
  if (f.type != WeightType::kCodes) return out;
  const ByteLevels levels = byte_levels(f);
  out.layout = code_layout(f);
  out.scale = f.scale;
  out.minimum = f.minimum;
  out.super_scale = f.super_scale;
  out.has_zero_points = f.has_zero_points;
  out.zero = levels.exist ? levels.zero : static_cast<int32_t>(f.offset);
  std::memcpy(out.byte_levels, levels.bytes, sizeof out.byte_levels);
  std::memcpy(out.float_levels, f.levels, sizeof out.float_levels);
  if (f.has_levels) {
    out.kind = levels.exist ? CodeKind::kByteLevels : CodeKind::kFloatLevels;
  } else {
    out.kind = f.bits == 2   ? CodeKind::kTwoBits
               : f.bits == 4 ? CodeKind::kNibbles
               : f.bits == 5 ? CodeKind::kFiveBits
               : f.bits == 6 ? CodeKind::kSixBits
                             : CodeKind::kBytes;
  }
  return out;
}

// Numbers of half a panel's rows.
JAXIS_INLINE F32x16 load_numbers(ScaleType type, const uint8_t* p, int half) {
  const int64_t first = half * kLanes;
  switch (type) {
    case ScaleType::kF32:
      return load(reinterpret_cast<const float*>(p) + first);
    case ScaleType::kBf16:
      return load_bf16(reinterpret_cast<const bf16_t*>(p) + first);
    case ScaleType::kF16:
      return load_f16(reinterpret_cast<const uint16_t*>(p) + first);
    case ScaleType::kU8:
      return load_u8(p + first);
    case ScaleType::kI8:
      return load_i8(reinterpret_cast<const int8_t*>(p) + first);
    case ScaleType::kE4m3:
      return load_e4m3(p + first) * broadcast(kE4m3Factor);
    case ScaleType::kNone:
      break;
  }
  return zero();
}

// Super-scales and super-minima of a super-block, of half a panel's rows.
struct SuperNumbers {
  bool exist;
  F32x16 scale, minimum;
};

JAXIS_INLINE SuperNumbers load_super(const CodeReader& r, const uint8_t* super, int half) {
  if (r.layout.super_bytes == 0) return {false, zero(), zero()};
  SuperNumbers out = {true, load_numbers(r.super_scale, super, half), zero()};
  if (r.has_minima()) out.minimum = load_numbers(r.super_scale, super + r.layout.super_minimum_at, half);
  return out;
}

// Of group 0 or 1 of a span.
JAXIS_INLINE F32x16 load_scale(const CodeReader& r, const SuperNumbers& super, const uint8_t* span, int64_t group,
                               int half) {
  const F32x16 fine = load_numbers(r.scale, span + group * kPanelRows * r.layout.scale_bytes, half);
  return super.exist ? fine * super.scale : fine;
}

JAXIS_INLINE F32x16 load_minimum(const CodeReader& r, const SuperNumbers& super, const uint8_t* span, int64_t group,
                                 int half) {
  const uint8_t* minima = span + r.layout.minimum_at + group * kPanelRows * r.layout.minimum_bytes;
  const F32x16 fine = load_numbers(r.minimum, minima, half);
  return super.exist ? fine * super.minimum : fine;
}

JAXIS_INLINE F32x16 load_zero_point(const CodeReader& r, const uint8_t* span, int64_t group, int half) {
  return load_u8(span + r.layout.zero_point_at + group * kPanelRows + half * kLanes);
}

// What is taken from each byte of a group.
JAXIS_INLINE F32x16 load_zero(const CodeReader& r, const uint8_t* span, int64_t group, int half) {
  return r.has_zero_points ? load_zero_point(r, span, group, half) : broadcast(static_cast<float>(r.zero));
}

constexpr int kUnitSteps = kUnit / 4;

constexpr int64_t bits_of(CodeKind kind) {
  switch (kind) {
    case CodeKind::kTwoBits:
      return 2;
    case CodeKind::kFiveBits:
      return 5;
    case CodeKind::kSixBits:
      return 6;
    case CodeKind::kBytes:
      return 8;
    default:
      return 4;
  }
}

// How codes that were unpacked to bytes are multiplied, in parts of kSteps; kWords instead of kBytes by choice. Pairs
// are 2 * 127 times the largest code, of at most 4 bits 15, of 5 bits 31, of 6 bits 63: 8, 4 and 2 of them are less
// than 2
// ** 15.
template <CodeKind kKind, int kSteps>
constexpr Product product_of() {
  if (!kHasBytePairs) return Product::kBytes;
  if (kKind == CodeKind::kTwoBits || kKind == CodeKind::kNibbles)
    return kSteps == kUnitSteps ? Product::kPairs8 : Product::kPairs4;
  if (kKind == CodeKind::kFiveBits) return Product::kPairs4;
  if (kKind == CodeKind::kSixBits) return Product::kPairs2;
  return Product::kBytes;
}

constexpr bool is_multiplied_in_pairs(CodeKind kind) {
  return kHasBytePairs && (kind == CodeKind::kTwoBits || kind == CodeKind::kNibbles || kind == CodeKind::kFiveBits ||
                           kind == CodeKind::kSixBits);
}

// Bytes that four quantized activations take.
constexpr int activation_bytes(CodeKind kind) { return is_multiplied_in_pairs(kind) ? 4 : kActivationBytes; }

// The codes of four columns of half a unit's rows, or their levels as bytes.
template <CodeKind kKind>
JAXIS_INLINE Bytes64 load_codes(const uint8_t* unit, int step, int half, ByteTable levels) {
  constexpr int kLater = kUnitSteps / 2;  // steps in the upper halves of bytes
  constexpr int64_t kStepBytes = 4 * kPanelRows, kNibbleBytes = kLater * kStepBytes;
  if constexpr (kKind == CodeKind::kBytes) return load_bytes(unit + step * kStepBytes + half * 64);
  if constexpr (kKind == CodeKind::kTwoBits) {
    return bit_pairs(load_bytes(unit + step / kLater * kStepBytes + half * 64), step % kLater);
  }
  const Bytes64 both = load_bytes(unit + step % kLater * kStepBytes + half * 64);
  const Bytes64 nibbles = step < kLater ? low_nibbles(both) : high_nibbles(both);
  if constexpr (kKind == CodeKind::kByteLevels) return look_up(levels, nibbles);
  if constexpr (kKind == CodeKind::kFiveBits) return with_bit_4(nibbles, unit + kNibbleBytes + (step * 2 + half) * 8);
  if constexpr (kKind == CodeKind::kSixBits) {
    const Bytes64 plane = load_bytes(unit + kNibbleBytes + step / kLater * kStepBytes + half * 64);
    return with_bits_4_5(nibbles, plane, step % kLater);
  }
  return nibbles;
}

template <CodeKind kKind>
JAXIS_INLINE F32x16 load_code_column(Bytes64 codes, int column, CodeZero zero, FloatTable levels) {
  if constexpr (kKind == CodeKind::kFloatLevels) return level_column(codes, column, levels);
  return code_column(codes, column, zero);
}

// Of one half of the panel's rows or, if kNumHalves is 2, of both.
template <CodeKind kKind, int kNumHalves>
JAXIS_INLINE void prefetch_unit(const uint8_t* unit, int half) {
  constexpr int64_t kBytes = bits_of(kKind) * kUnit * kPanelRows / 8;
#pragma GCC unroll 16
  for (int64_t i = kNumHalves == 2 ? 0 : half * 64; i < kBytes; i += kNumHalves * 64) {
    prefetch(unit + i);
    if (kNumHalves == 2) prefetch(unit + i + 64);
  }
}

#if defined(JAXIS_BYTE_PAIRS)

// Sums of codes of at most six bits, four in each lane: of four steps as bytes, then as words.
struct CodeSums {
  Bytes64 bytes;
  I16x32 words;
};

JAXIS_INLINE void add_codes(CodeSums* sums, Bytes64 codes, int step, int first) {
  const bool is_new = step % 4 == 0;
  sums->bytes = is_new ? codes : sums->bytes + codes;
  if (step % 4 != 3) return;
  const I16x32 words = add_byte_pairs(sums->bytes);
  sums->words = step - 3 == first ? words : sums->words + words;
}

// add_dots by pairs of bytes.
template <CodeKind kKind, int kFirst, int kLast>
JAXIS_INLINE void add_pair_dots(const uint8_t* x, const uint8_t* unit, int half, I32x16 (&dots)[kRowHalves],
                                I32x16 (&sums)[kRowHalves]) {
  constexpr int kTogether = pair_steps(product_of<kKind, kLast - kFirst>());
  I16x32 products[kRowHalves];
  CodeSums code_sums[kRowHalves];
#pragma GCC unroll 8
  for (int step = kFirst; step < kLast; ++step) {
    const ActivationWords four = load_activation_words(x + (step - kFirst) * 4);
#pragma GCC unroll 2
    for (int h = 0; h < kRowHalves; ++h) {
      const Bytes64 codes = load_codes<kKind>(unit, step, half + h, ByteTable());
      const I16x32 two = multiply_byte_pairs(codes, four);
      products[h] = step % kTogether == 0 ? two : products[h] + two;
      keep_sum(&products[h]);
      add_codes(&code_sums[h], codes, step, kFirst);
      if (step % kTogether == kTogether - 1) dots[h] = dots[h] + add_pairs(products[h]);
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < kRowHalves; ++h) sums[h] = sums[h] + add_pairs(code_sums[h].words);
}

#else

// Never called.
template <CodeKind kKind, int kFirst, int kLast>
JAXIS_INLINE void add_pair_dots(const uint8_t*, const uint8_t*, int, I32x16 (&)[kRowHalves], I32x16 (&)[kRowHalves]) {}

#endif

// Steps [kFirst, kLast) of a unit, times a row of quantized activations at `x`, and their sums.
template <CodeKind kKind, int kFirst, int kLast>
JAXIS_INLINE void add_dots(const uint8_t* x, const uint8_t* unit, int half, ByteTable levels,
                           I32x16 (&dots)[kRowHalves], I32x16 (&sums)[kRowHalves]) {
  if constexpr (is_multiplied_in_pairs(kKind)) return add_pair_dots<kKind, kFirst, kLast>(x, unit, half, dots, sums);
  QuadSums quads[kRowHalves];
  for (int h = 0; h < kRowHalves; ++h) quads[h] = begin_quad_sums(sums[h]);
#pragma GCC unroll 8
  for (int step = kFirst; step < kLast; ++step) {
    const ActivationQuad four = load_activation_quad(x + (step - kFirst) * kActivationBytes);
#pragma GCC unroll 2
    for (int h = 0; h < kRowHalves; ++h) {
      const U8x64 values = for_dot(load_codes<kKind>(unit, step, half + h, levels));
      dots[h] = dot(dots[h], values, four);
      quads[h] = add_quads(quads[h], values);
    }
  }
  for (int h = 0; h < kRowHalves; ++h) sums[h] = end_quad_sums(quads[h], sums[h]);
}

// Steps [kFirst, kLast) of a unit, times a row at `x`.
template <CodeKind kKind, int kFirst, int kLast>
JAXIS_INLINE void add_columns(const float* x, const uint8_t* unit, int half, ByteTable bytes, FloatTable levels,
                              const CodeZero (&zeros)[kRowHalves], F32x16 (&sum)[kRowHalves]) {
#pragma GCC unroll 8
  for (int step = kFirst; step < kLast; ++step, x += 4) {
    Bytes64 codes[kRowHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kRowHalves; ++h) codes[h] = load_codes<kKind>(unit, step, half + h, bytes);
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {
      const F32x16 value = broadcast(x[column]);
#pragma GCC unroll 2
      for (int h = 0; h < kRowHalves; ++h) {
        sum[h] = fma(value, load_code_column<kKind>(codes[h], column, zeros[h], levels), sum[h]);
      }
    }
  }
}

// Calls function(span, index of the span, super-numbers of kNumHalves halves) for each span of a panel.
template <int kNumHalves, typename Function>
JAXIS_INLINE void for_each_span(const CodeReader& r, const uint8_t* panel, int half, const Function& function) {
  for (int64_t s = 0; s < r.layout.num_spans;) {
    SuperNumbers super[kNumHalves];
    for (int h = 0; h < kNumHalves; ++h) super[h] = load_super(r, panel, half + h);
    panel += r.layout.super_bytes;
    const int64_t end = s + r.layout.spans_per_super;
    for (; s < end; ++s, panel += r.layout.span_bytes) function(panel, s, super);
  }
}

// Layouts that loops know when they are compiled. Others are looked up at each group, which takes up to a third of a
// single row's time.
enum class KnownLayout {
  kNone,
  kScales,           // int8 and int4 of ours: groups of a unit with uint8 scales and float32 super-scales
  kScalesAndMinima,  // the same with int8 minima
  kWideScales,       // ternary weights: groups of four units with uint8 scales and float32 super-scales
  kHalfScales,       // GGUF's Q4_0 and Q8_0: groups of a unit with float16 scales
  kQ4K,              // and Q5_K: groups of a unit with uint8 scales and minima, and float16 super-numbers
  kQ6K,              // groups of half a unit with int8 scales and float16 super-scales
};

struct LayoutNumbers {
  ScaleType scale, minimum, super_scale;
  int64_t groups_per_span, units_per_span;
};

constexpr LayoutNumbers numbers_of(KnownLayout layout) {
  switch (layout) {
    case KnownLayout::kScales:
      return {ScaleType::kU8, ScaleType::kNone, ScaleType::kF32, 1, 1};
    case KnownLayout::kWideScales:
      return {ScaleType::kU8, ScaleType::kNone, ScaleType::kF32, 1, 4};
    case KnownLayout::kScalesAndMinima:
      return {ScaleType::kU8, ScaleType::kI8, ScaleType::kF32, 1, 1};
    case KnownLayout::kHalfScales:
      return {ScaleType::kF16, ScaleType::kNone, ScaleType::kNone, 1, 1};
    case KnownLayout::kQ4K:
      return {ScaleType::kU8, ScaleType::kU8, ScaleType::kF16, 1, 1};
    case KnownLayout::kQ6K:
      return {ScaleType::kI8, ScaleType::kNone, ScaleType::kF16, 2, 1};
    case KnownLayout::kNone:
      break;
  }
  return {};
}

// Whether there are loops for codes of this kind that know this layout.
constexpr bool is_compiled(CodeKind kind, KnownLayout layout) {
  switch (layout) {
    case KnownLayout::kNone:
      return true;
    case KnownLayout::kScales:
    case KnownLayout::kScalesAndMinima:
    case KnownLayout::kHalfScales:
      return kind == CodeKind::kNibbles || kind == CodeKind::kBytes;
    case KnownLayout::kWideScales:
      return kind == CodeKind::kTwoBits;
    case KnownLayout::kQ4K:
      return kind == CodeKind::kNibbles || kind == CodeKind::kFiveBits;
    case KnownLayout::kQ6K:
      return kind == CodeKind::kSixBits;
  }
  return false;
}

inline bool has_layout(const CodeReader& r, KnownLayout layout) {
  const LayoutNumbers known = numbers_of(layout);
  return r.scale == known.scale && r.minimum == known.minimum && r.super_scale == known.super_scale &&
         r.layout.groups_per_span == known.groups_per_span && r.layout.units_per_span == known.units_per_span &&
         !r.has_zero_points && (known.minimum == ScaleType::kNone || r.zero == 0);
}

// The same reader, with what is known as constants.
template <CodeKind kKind, KnownLayout kLayout>
JAXIS_INLINE CodeReader with_known_layout(const CodeReader& reader) {
  CodeReader r = reader;
  if constexpr (kLayout != KnownLayout::kNone) {
    constexpr LayoutNumbers known = numbers_of(kLayout);
    constexpr int64_t numbers = known.groups_per_span * kPanelRows;
    r.scale = known.scale;
    r.minimum = known.minimum;
    r.super_scale = known.super_scale;
    r.has_zero_points = false;
    if (r.has_minima()) r.zero = 0;
    CodeLayout& l = r.layout;
    l.span = kUnit * known.units_per_span;
    l.groups_per_span = known.groups_per_span;
    l.units_per_span = known.units_per_span;
    l.scale_bytes = bytes_of(known.scale);
    l.minimum_bytes = bytes_of(known.minimum);
    l.super_minimum_at = bytes_of(known.super_scale) * kPanelRows;
    l.super_bytes = (r.has_minima() ? 2 : 1) * l.super_minimum_at;
    l.minimum_at = l.scale_bytes * numbers;
    l.unit_at = l.minimum_at + l.minimum_bytes * numbers;
    l.unit_bytes = bits_of(kKind) * kUnit * kPanelRows / 8;
    l.span_bytes = l.unit_at + l.units_per_span * l.unit_bytes;
  }
  return r;
}

// A quantized row times a panel -> c [32]; see micro_int8 for the arithmetic.
template <CodeKind kKind, KnownLayout kLayout>
void micro_stored_int8(const QuantizedRows& x, const CodeReader& reader, const uint8_t* panel, float* c) {
  const CodeReader r = with_known_layout<kKind, kLayout>(reader);
  const ByteTable levels = load_byte_table(r.byte_levels);
  const int64_t units = r.layout.units_per_span;
  for (int half = 0; half < 2; half += kRowHalves) {
    F32x16 sum[kRowHalves];
    for (int h = 0; h < kRowHalves; ++h) sum[h] = zero();
    const uint8_t* xi = x.values;
    int64_t group = 0;  // of activations
    for_each_span<kRowHalves>(
        r, panel, half,
        [&](const uint8_t* span, int64_t, const SuperNumbers(&super)[kRowHalves]) __attribute__((always_inline)) {
          const uint8_t* unit = span + r.layout.unit_at;
          prefetch(span);  // its numbers; the units come below
          I32x16 dots[kRowHalves], sums[kRowHalves];
          const auto begin_part = [&](int64_t part, int columns) __attribute__((always_inline)) {
            for (int h = 0; h < kRowHalves; ++h) dots[h] = broadcast_i32(x.offsets[part]);
            for (int h = 0; h < kRowHalves; ++h) sums[h] = broadcast_i32(r.has_zero_points ? 0 : -r.zero * columns);
          };
          const auto end_part = [&](int64_t part, int64_t g, int columns) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int h = 0; h < kRowHalves; ++h) {
              F32x16 product = to_float(dots[h]), of_codes = to_float(sums[h]);
              if (r.has_zero_points) {
                const F32x16 zeros = zero() - load_zero_point(r, span, g, half + h);
                product = fma(zeros, broadcast(x.sums[part]), product);
                of_codes = fma(zeros, broadcast(static_cast<float>(columns)), of_codes);
              }
              const F32x16 scales = load_scale(r, super[h], span, g, half + h);
              sum[h] = fma(product, scales * broadcast(x.scales[group]), sum[h]);
              sum[h] = fma(scales * of_codes, broadcast(x.midpoints[group]), sum[h]);
              if (r.has_minima()) {
                sum[h] = fma(load_minimum(r, super[h], span, g, half + h), broadcast(x.sums[part]), sum[h]);
              }
            }
          };
          if (r.layout.groups_per_span == 1) {
            for (int64_t u = 0; u < units; ++u, ++group, unit += r.layout.unit_bytes) {
              prefetch_unit<kKind, kRowHalves>(unit, half);
              begin_part(group, kUnit);
              add_dots<kKind, 0, kUnitSteps>(xi, unit, half, levels, dots, sums);
              end_part(group, 0, kUnit);
              xi += kUnitSteps * activation_bytes(kKind);
            }
            return;
          }
          constexpr int kLater = kUnitSteps / 2;
          prefetch_unit<kKind, kRowHalves>(unit, half);
          begin_part(2 * group, kUnit / 2);
          add_dots<kKind, 0, kLater>(xi, unit, half, levels, dots, sums);
          end_part(2 * group, 0, kUnit / 2);
          begin_part(2 * group + 1, kUnit / 2);
          add_dots<kKind, kLater, kUnitSteps>(xi + kLater * activation_bytes(kKind), unit, half, levels, dots, sums);
          end_part(2 * group + 1, 1, kUnit / 2);
          xi += kUnitSteps * activation_bytes(kKind);
          ++group;
        });
    for (int h = 0; h < kRowHalves; ++h) store(c + (half + h) * kLanes, sum[h]);
  }
}

// A row x [k] with the sums of its groups, which minima need, times a panel -> c [32].
template <CodeKind kKind, KnownLayout kLayout>
void micro_stored_f32(const float* x, const float* sums, const CodeReader& reader, const uint8_t* panel, float* c) {
  const CodeReader r = with_known_layout<kKind, kLayout>(reader);
  const ByteTable bytes = load_byte_table(r.byte_levels);
  const FloatTable levels = load_float_table(r.float_levels);
  const int64_t groups_per_span = r.layout.groups_per_span, units = r.layout.units_per_span;
  for (int half = 0; half < 2; half += kRowHalves) {
    F32x16 total[kRowHalves];
    for (int h = 0; h < kRowHalves; ++h) total[h] = zero();
    const float* xi = x;
    for_each_span<kRowHalves>(
        r, panel, half,
        [&](const uint8_t* span, int64_t s, const SuperNumbers(&super)[kRowHalves]) __attribute__((always_inline)) {
          const uint8_t* unit = span + r.layout.unit_at;
          prefetch(span);  // its numbers; the units come below
          F32x16 scales[kRowHalves], sum[kRowHalves];
          CodeZero zeros[kRowHalves];
          const auto begin_group = [&](int64_t g) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int h = 0; h < kRowHalves; ++h) {
              scales[h] = load_scale(r, super[h], span, g, half + h);
              zeros[h] = code_zero(load_zero(r, span, g, half + h));
            }
          };
          const auto begin_sum = [&]() __attribute__((always_inline)) {
            for (int h = 0; h < kRowHalves; ++h) sum[h] = zero();
          };
          const auto end_sum = [&]() __attribute__((always_inline)) {
            for (int h = 0; h < kRowHalves; ++h) total[h] = fma(sum[h], scales[h], total[h]);
          };
          const auto end_group = [&](int64_t g) __attribute__((always_inline)) {
            if (!r.has_minima()) return;
            const F32x16 of_x = broadcast(sums[s * groups_per_span + g]);
            for (int h = 0; h < kRowHalves; ++h) {
              total[h] = fma(load_minimum(r, super[h], span, g, half + h), of_x, total[h]);
            }
          };
          begin_group(0);
          if (groups_per_span == 1) {
            for (int64_t u = 0; u < units; ++u, unit += r.layout.unit_bytes, xi += kUnit) {
              prefetch_unit<kKind, kRowHalves>(unit, half);
              begin_sum();
              add_columns<kKind, 0, kUnitSteps>(xi, unit, half, bytes, levels, zeros, sum);
              end_sum();
            }
            end_group(0);
            return;
          }
          constexpr int kLater = kUnitSteps / 2;
          prefetch_unit<kKind, kRowHalves>(unit, half);
          begin_sum();
          add_columns<kKind, 0, kLater>(xi, unit, half, bytes, levels, zeros, sum);
          end_sum();
          end_group(0);
          begin_group(1);
          begin_sum();
          add_columns<kKind, kLater, kUnitSteps>(xi + kUnit / 2, unit, half, bytes, levels, zeros, sum);
          end_sum();
          end_group(1);
          xi += kUnit;
        });
    for (int h = 0; h < kRowHalves; ++h) store(c + (half + h) * kLanes, total[h]);
  }
}

// Spans of a panel, unpacked: of each group its numbers and of each column its codes less their zeros, as float32 [32].
struct FloatColumns {
  const float* values;
  const float* scales;  // [groups][32]
  const float* minima;  // or null
  int64_t spans, groups_per_span, units_per_span;

  // Columns whose sum is scaled at once.
  int64_t chunk() const { return kUnit / groups_per_span; }
};

// x [columns][R] with the sums of its groups [groups][R] times w, set in or (not `first`) added to c [R][32].
template <int R>
void micro_codes_f32(const float* x, const float* sums, const FloatColumns& w, float* c, bool first) {
  const int64_t chunk = w.chunk(), groups = w.spans * w.groups_per_span;
  const int64_t chunks_per_group = w.units_per_span;  // 1 where there are two groups a span
  for (int half = 0; half < 2; half += kHalves) {
    const float* xi = x;
    const float* wi = w.values + half * kLanes;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = g * kPanelRows + half * kLanes;
      for (int64_t i = 0; i < chunks_per_group; ++i) {
        F32x16 sum[R][kHalves];
        for (int r = 0; r < R; ++r) {
          for (int h = 0; h < kHalves; ++h) sum[r][h] = zero();
        }
#pragma GCC unroll 4
        for (int64_t column = 0; column < chunk; ++column, wi += kPanelRows, xi += R) {
          F32x16 weights[kHalves];
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) weights[h] = load(wi + h * kLanes);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const F32x16 value = broadcast(xi[r]);
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) sum[r][h] = fma(value, weights[h], sum[r][h]);
          }
        }
        const bool is_new = first && g == 0 && i == 0;
        const bool has_minima = w.minima != nullptr && i == chunks_per_group - 1;
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
          const F32x16 scales = load(w.scales + at + h * kLanes);
          const F32x16 minima = has_minima ? load(w.minima + at + h * kLanes) : zero();
          float* to = c + (half + h) * kLanes;
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r, to += kPanelRows) {
            F32x16 total = fma(sum[r][h], scales, is_new ? zero() : load(to));
            if (has_minima) total = fma(minima, broadcast(sums[g * R + r]), total);
            store(to, total);
          }
        }
      }
    }
  }
}

#if defined(JAXIS_BYTE_PAIRS)

// Half a step as words less `zero`.
JAXIS_INLINE void store_as_words(uint8_t* out, U8x64 bytes, I16x32 zero) {
  store_words(reinterpret_cast<int16_t*>(out), bytes.even - zero);
  store_words(reinterpret_cast<int16_t*>(out) + 32, bytes.odd - zero);
}

// Steps [kFirst, kLast) of half a unit for products of integers, unless `out` is null, and their sums.
template <CodeKind kKind, Product kProduct, int kFirst, int kLast>
JAXIS_INLINE I32x16 unpack_codes(const uint8_t* unit, int half, ByteTable levels, int32_t zero, uint8_t* out) {
  const I32x16 none = broadcast_i32(0);
  const I16x32 zero_words = broadcast_words(static_cast<int16_t>(zero));
  QuadSums quads = begin_quad_sums(none);
  CodeSums code_sums{};
#pragma GCC unroll 8
  for (int step = kFirst; step < kLast; ++step) {
    const Bytes64 bytes = load_codes<kKind>(unit, step, half, levels);
    if (kProduct == Product::kWords) {
      store_as_words(out + step * 256 + half * 128, for_dot(bytes), zero_words);
    } else if (out != nullptr) {
      store_bytes(out + step * 128 + half * 64, bytes);
    }
    if constexpr (is_multiplied_in_pairs(kKind)) {
      add_codes(&code_sums, bytes, step, kFirst);
    } else {
      quads = add_quads(quads, for_dot(bytes));
    }
  }
  return is_multiplied_in_pairs(kKind) ? add_pairs(code_sums.words) : end_quad_sums(quads, none);
}

#else

template <CodeKind kKind, Product kProduct, int kFirst, int kLast>
JAXIS_INLINE I32x16 unpack_codes(const uint8_t* unit, int half, ByteTable levels, int32_t, uint8_t* out) {
  I32x16 sums = broadcast_i32(0);
#pragma GCC unroll 8
  for (int step = kFirst; step < kLast; ++step) {
    const Bytes64 bytes = load_codes<kKind>(unit, step, half, levels);
    if (out != nullptr) store_bytes(out + step * 128 + half * 64, bytes);
    sums = add_quads(sums, for_dot(bytes));
  }
  return sums;
}

#endif

template <CodeKind kKind>
void unpack_floats(const CodeReader& r, const uint8_t* span, const uint8_t* unit, float* out) {
  const ByteTable bytes = load_byte_table(r.byte_levels);
  const FloatTable levels = load_float_table(r.float_levels);
  for (int half = 0; half < 2; ++half) {
    // Of the unit's first and second sixteen columns.
    const CodeZero zeros[2] = {code_zero(load_zero(r, span, 0, half)),
                               code_zero(load_zero(r, span, r.layout.groups_per_span - 1, half))};
    float* to = out + half * kLanes;
#pragma GCC unroll 8
    for (int step = 0; step < kUnitSteps; ++step) {
      const Bytes64 codes = load_codes<kKind>(unit, step, half, bytes);
#pragma GCC unroll 4
      for (int column = 0; column < 4; ++column, to += kPanelRows) {
        store(to, load_code_column<kKind>(codes, column, zeros[step * 2 / kUnitSteps], levels));
      }
    }
  }
}

// One code of a unit.
inline int code_at(CodeKind kind, const uint8_t* unit, int64_t row, int64_t column) {
  const int64_t step = column / 4, place = column % 4;
  if (kind == CodeKind::kBytes) return unit[(step * kPanelRows + row) * 4 + place];
  if (kind == CodeKind::kTwoBits) return unit[(step / 4 * kPanelRows + row) * 4 + place] >> step % 4 * 2 & 3;
  const uint8_t* upper = unit + kUnit / 2 * kPanelRows;
  const uint8_t both = unit[(step % 4 * kPanelRows + row) * 4 + place];
  const int nibble = step < 4 ? both & 15 : both >> 4;
  if (kind == CodeKind::kFiveBits) {
    const int64_t bit = row % 16 * 4 + place;
    return nibble | (upper[(step * 2 + row / 16) * 8 + bit / 8] >> bit % 8 & 1) << 4;
  }
  if (kind == CodeKind::kSixBits) {
    return nibble | (upper[(step / 4 * kPanelRows + row) * 4 + place] >> step % 4 * 2 & 3) << 4;
  }
  return nibble;
}

// A row of a panel as float32 [k], each element as it is defined: (value - zero point) * scale + minimum.
inline void unpack_row(const CodeReader& r, const uint8_t* panel, int64_t row, float* out) {
  const int half = static_cast<int>(row / kLanes);
  const int64_t lane = row % kLanes, group = r.layout.span / r.layout.groups_per_span;
  const auto of_row = [&](F32x16 numbers) {
    float lanes[kLanes];
    store(lanes, numbers);
    return lanes[lane];
  };
  SuperNumbers super{};
  for (int64_t s = 0; s < r.layout.num_spans; ++s) {
    const uint8_t* span = r.span(panel, s);
    if (s % r.layout.spans_per_super == 0) super = load_super(r, span - r.layout.super_bytes, half);
    for (int64_t g = 0; g < r.layout.groups_per_span; ++g) {
      const float scale = of_row(load_scale(r, super, span, g, half)), zero = of_row(load_zero(r, span, g, half));
      const float minimum = r.has_minima() ? of_row(load_minimum(r, super, span, g, half)) : 0.0f;
      for (int64_t i = g * group; i < (g + 1) * group; ++i, ++out) {
        const uint8_t* unit = span + r.layout.unit_at + i / kUnit * r.layout.unit_bytes;
        const int code = code_at(r.kind, unit, row, i % kUnit);
        const float value = r.kind == CodeKind::kFloatLevels  ? r.float_levels[code]
                            : r.kind == CodeKind::kByteLevels ? static_cast<float>(r.byte_levels[code]) - zero
                                                              : static_cast<float>(code) - zero;
        *out = r.has_minima() ? value * scale + minimum : value * scale;
      }
    }
  }
}

}  // namespace jaxis::JAXIS_ISA
