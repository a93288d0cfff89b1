// The innermost loops of the products: a few rows times one panel of 32 outputs, sums kept in registers.
//
// Each sum runs over the columns in order, whatever the number of rows, so a row's result does not depend on which
// other rows there are.
#pragma once

#include <cstdint>

#include "code_bytes.h"
#include "dot.h"
#include "matmul.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {

// Registers decide how many rows at most, and how many of a panel's two halves, are worked on at once; of a single row
// of integers, or times integers, kRowHalves.
#if defined(JAXIS_SIMD_AVX512)
constexpr int kHalves = 2;
constexpr int kMaxRows = 12;
constexpr int kMaxQuantizedRows = 6;
constexpr int kRowHalves = 2;
#elif defined(JAXIS_SIMD_NEON)
constexpr int kHalves = 1;
constexpr int kMaxRows = 5;
#if defined(JAXIS_SIMD_DOTPROD)
constexpr int kMaxQuantizedRows = 6;
constexpr int kRowHalves = 2;
#else
constexpr int kMaxQuantizedRows = 2;
constexpr int kRowHalves = 1;
#endif
#else
constexpr int kHalves = 1;
constexpr int kMaxRows = 5;
#if defined(JAXIS_SIMD_AVX2)
constexpr int kMaxQuantizedRows = 6;
constexpr int kRowHalves = 2;
#else
constexpr int kMaxQuantizedRows = 3;
constexpr int kRowHalves = 1;
#endif
#endif

// Of float32 weights, whose micro-kernel needs fewer registers than those that upcast.
#if defined(JAXIS_SIMD_AVX2)
constexpr int kMaxPlainRows = 6;
#else
constexpr int kMaxPlainRows = kMaxRows;
#endif

// How far ahead of its use memory is asked for: the hardware's own prefetching stops at each page's end.
constexpr int64_t kPrefetchBytes = 2048;

JAXIS_INLINE void prefetch(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + kPrefetchBytes); }

// Halves of a panel of floats that some rows are multiplied with at once. The sums of one row always find registers, so
// it goes through the panel's memory once, in order; by halves it would read every other line, twice.
constexpr int halves_at_once(int num_rows) { return num_rows == 1 ? 2 : kHalves; }

// The sums that a micro-kernel begins with: zeros, or where the columns before it left off.
template <int R, int H>
JAXIS_INLINE void begin_sums(F32x16 (&sum)[R][H], const float* c, int half, bool first) {
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < H; ++h) sum[r][h] = first ? zero() : load(c + r * kPanelRows + (half + h) * kLanes);
  }
}

template <int R, int H>
JAXIS_INLINE void end_sums(const F32x16 (&sum)[R][H], float* c, int half) {
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < H; ++h) store(c + r * kPanelRows + (half + h) * kLanes, sum[r][h]);
  }
}

// x [k][R] times w [k][32], set in or (not `first`) added to c [R][32].
template <int R>
void micro_f32(const float* x, const float* w, int64_t k, float* c, bool first) {
  constexpr int kAtOnce = halves_at_once(R);
  for (int half = 0; half < 2; half += kAtOnce) {
    F32x16 sum[R][kAtOnce];
    begin_sums(sum, c, half, first);
    const float* wi = w + half * kLanes;
    const float* xi = x;
#pragma GCC unroll 4
    for (int64_t i = 0; i < k; ++i, wi += kPanelRows, xi += R) {
      F32x16 weights[kAtOnce];
      prefetch(wi);
      prefetch(wi + kLanes);
#pragma GCC unroll 2
      for (int h = 0; h < kAtOnce; ++h) weights[h] = load(wi + h * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32x16 value = broadcast(xi[r]);
#pragma GCC unroll 2
        for (int h = 0; h < kAtOnce; ++h) sum[r][h] = fma(value, weights[h], sum[r][h]);
      }
    }
    end_sums(sum, c, half);
  }
}

// The same with w [k2 / 2][32][2].
template <int R>
void micro_bf16(const float* x, const bf16_t* w, int64_t k, float* c, bool first) {
  constexpr int kAtOnce = halves_at_once(R);
  for (int half = 0; half < 2; half += kAtOnce) {
    F32x16 sum[R][kAtOnce];
    begin_sums(sum, c, half, first);
    const bf16_t* wi = w + 2 * half * kLanes;
    const float* xi = x;
    const auto pair = [&](bool has_second) __attribute__((always_inline)) {
      F32x16 one[kAtOnce], other[kAtOnce];
      prefetch(wi);
      prefetch(wi + 2 * kLanes);
#pragma GCC unroll 2
      for (int h = 0; h < kAtOnce; ++h) load_bf16_pairs(wi + 2 * h * kLanes, &other[h], &one[h]);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32x16 value = broadcast(xi[r]);
#pragma GCC unroll 2
        for (int h = 0; h < kAtOnce; ++h) sum[r][h] = fma(value, one[h], sum[r][h]);
      }
      if (has_second) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const F32x16 value = broadcast(xi[R + r]);
#pragma GCC unroll 2
          for (int h = 0; h < kAtOnce; ++h) sum[r][h] = fma(value, other[h], sum[r][h]);
        }
      }
      wi += 2 * kPanelRows;
      xi += 2 * R;
    };
    for (int64_t i = 0; i + 2 <= k; i += 2) pair(true);
    if (k % 2 != 0) pair(false);
    end_sums(sum, c, half);
  }
}

#if defined(JAXIS_SIMD_AVX512) && defined(JAXIS_SIMD_VNNI) && __has_include(<avx512bf16intrin.h>)

inline bool multiplies_pairs() { return has_bfloat16_products(); }

// The same with x [k2 / 2][R][2] of bfloat16, laid out as w. The instruction is two fused multiply-adds, the upper
// halves' first, so these are the sums of micro_bf16; but what is too small for a normal number is zero to it.
template <int R>
__attribute__((target("avx512bf16"))) void micro_bf16_pairs(const float* x, const bf16_t* w, int64_t k, float* c,
                                                            bool first) {
  F32x16 sum[R][kHalves];
  begin_sums(sum, c, 0, first);
  for (int64_t i = 0; i < k; i += 2, w += 2 * kPanelRows, x += R) {
    prefetch(w);
    prefetch(w + 2 * kLanes);
    const __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 2 * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_ps(x[r]);
      sum[r][0].v = _mm512_dpbf16_ps(sum[r][0].v, pair, low);
      sum[r][1].v = _mm512_dpbf16_ps(sum[r][1].v, pair, high);
    }
  }
  end_sums(sum, c, 0);
}

#else

inline bool multiplies_pairs() { return false; }

// Never called.
template <int R>
void micro_bf16_pairs(const float*, const bf16_t*, int64_t, float*, bool) {}

#endif

constexpr int kGroupSteps = kActivationGroup / 4;  // of four columns in a group of activations

// R rows of quantized activations: x ~ scale * value + midpoint. A group is kActivationGroup columns; a part is a
// group, or half of it where the weights have a scale for half a group. Rows end with whole groups, whose last values
// may be columns that do not exist: 0.
struct QuantizedRows {
  const uint8_t* values;   // [steps][R][kActivationBytes], four columns a step, or [steps][R][4] for kPairs*; for tiles
                           // [groups][R][kActivationGroup]
  const float* scales;     // [groups][R]
  const float* midpoints;  // [groups][R]
  const int32_t* offsets;  // [parts][R], what a sum of products begins with: (kDotBias - zero point) * sum of the
                           // values; for tiles kTileOriginBits more
  const float* sums;       // [parts][R], the sum of the values; where weights have minima, of scale * value + midpoint
};

// A panel of int8 weights with a scale a row.
struct Int8Panel {
  const uint8_t* values;
  const float* scales;  // [32]
  int64_t groups;       // of activations
};

// What products of integers are made of.
enum class Product {
  kBytes,  // bytes: see dot()
  kWords,  // bytes that were extended to words less their zero points
  // Bytes so small that the products of 8, 4 or 2 steps, two neighbours in a word, are summed as words:
  kPairs8,
  kPairs4,
  kPairs2,
};

constexpr bool is_of_pairs(Product product) { return product >= Product::kPairs8; }

constexpr int pair_steps(Product product) {
  return product == Product::kPairs8 ? 8 : product == Product::kPairs4 ? 4 : 2;
}

constexpr int64_t step_bytes(Product product) { return (product == Product::kWords ? 8 : 4) * kPanelRows; }

// Columns of a panel for products of integers, in parts as the activations'. A weight is scale * (byte - zero point) +
// minimum; the zero point is one of the part or, if it has none, that of the activations' offsets.
struct IntegerColumns {
  const uint8_t* bytes;       // spans of [steps][32][4]; of words [steps][two halves][columns 0 and 2, 1 and 3][16][2]
  int64_t span_stride;        // bytes from span to span
  int64_t spans, span_parts;  // parts of a span
  const float* scales;        // [parts][32]; null: 1
  const float* scaled_sums;   // [parts][32]: the scale times the sum of (byte - zero point)
  const float* zero_points;   // [parts][32], or null
  const float* minima;        // [parts][32], or null
};

#if defined(JAXIS_BYTE_PAIRS)

// The even or the odd columns of a step, of R rows with half a panel.
template <int R>
JAXIS_INLINE void word_dots(const uint8_t* x, const I16x32 (&words)[kHalves], I32x16 (&dots)[R][kHalves]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const ActivationWords two = load_activation_words(x + r * kActivationBytes);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      dots[r][h] = dots[r][h] + multiply_words(words[h], two);
      keep_sum(&dots[r][h]);
    }
  }
}

// A part's integer products of R rows with half a panel, added to each row's offset; words include the offset. The
// pointers to both move on to the next part.
template <int R, int kSteps, Product kProduct>
JAXIS_INLINE void part_dots(const int32_t* offsets, const uint8_t** x, const uint8_t** w, I32x16 (&dots)[R][kHalves]) {
  const uint8_t *xi = *x, *wi = *w;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < kHalves; ++h) dots[r][h] = broadcast_i32(kProduct == Product::kWords ? 0 : offsets[r]);
  }
  if constexpr (is_of_pairs(kProduct)) {
    constexpr int kTogether = pair_steps(kProduct) < kSteps ? pair_steps(kProduct) : kSteps;
#pragma GCC unroll 4
    for (int begin = 0; begin < kSteps; begin += kTogether) {
      I16x32 products[R][kHalves];
#pragma GCC unroll 8
      for (int step = 0; step < kTogether; ++step, wi += step_bytes(kProduct)) {
        Bytes64 codes[kHalves];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) codes[h] = load_bytes(wi + 64 * h);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r, xi += 4) {
          const ActivationWords four = load_activation_words(xi);
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) {
            const I16x32 two = multiply_byte_pairs(codes[h], four);
            products[r][h] = step == 0 ? two : products[r][h] + two;
            keep_sum(&products[r][h]);
          }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        for (int h = 0; h < kHalves; ++h) dots[r][h] = dots[r][h] + add_pairs(products[r][h]);
      }
    }
  } else {
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step, wi += step_bytes(kProduct), xi += R * kActivationBytes) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        I16x32 words[kHalves];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
          if constexpr (kProduct == Product::kWords) {
            words[h] = load_words(reinterpret_cast<const int16_t*>(wi) + 64 * h + 32 * odd);
          } else {
            const Bytes64 bytes = load_bytes(wi + 64 * h);
            words[h] = odd == 0 ? even_words(bytes) : odd_words(bytes);
          }
        }
        word_dots<R>(xi + 4 * odd, words, dots);
      }
    }
  }
  *x = xi;
  *w = wi;
}

#else

template <int R, int kSteps, Product kProduct>
JAXIS_INLINE void part_dots(const int32_t* offsets, const uint8_t** x, const uint8_t** w, I32x16 (&dots)[R][kHalves]) {
  static_assert(kProduct == Product::kBytes);
  const uint8_t *xi = *x, *wi = *w;
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < kHalves; ++h) dots[r][h] = broadcast_i32(offsets[r]);
  }
#pragma GCC unroll 8
  for (int step = 0; step < kSteps; ++step, wi += 128) {
    U8x64 values[kHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) values[h] = load_u8x64(wi + 64 * h);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r, xi += kActivationBytes) {
      const ActivationQuad four = load_activation_quad(xi);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        dots[r][h] = dot(dots[r][h], values[h], four);
        if constexpr (R > 1) keep_order(&dots[r][h]);
      }
    }
  }
  *x = xi;
  *w = wi;
}

#endif

// x times w, set in or (not `first`) added to c [R][32]. kSteps are those of a part.
template <int R, int kSteps, Product kProduct>
void micro_int8(const QuantizedRows& x, const IntegerColumns& w, float* c, bool first) {
  constexpr int kPartsPerGroup = kGroupSteps / kSteps;
  for (int half = 0; half < 2; half += kHalves) {
    F32x16 sum[R][kHalves];
    begin_sums(sum, c, half, first);
    const uint8_t* xi = x.values;
    for (int64_t s = 0, p = 0; s < w.spans; ++s) {
      const uint8_t* wi = w.bytes + s * w.span_stride + half * (step_bytes(kProduct) / 2);
      for (int64_t i = 0; i < w.span_parts; ++i, ++p) {
        I32x16 dots[R][kHalves];
        part_dots<R, kSteps, kProduct>(x.offsets + p * R, &xi, &wi, dots);
        const float *x_scales = x.scales + p / kPartsPerGroup * R, *midpoints = x.midpoints + p / kPartsPerGroup * R;
        const float* x_sums = x.sums + p * R;
        const int64_t at = p * kPanelRows + half * kLanes;
        F32x16 products[R][kHalves];
        const auto for_each_sum = [&](const auto& function) __attribute__((always_inline)) {
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) {
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) function(r, h);
          }
        };
        // sum[r][h] += elements of the weights * an element of the row.
        const auto add = [&](const float* of_weights, const float* of_rows) __attribute__((always_inline)) {
          F32x16 numbers[kHalves];
          for (int h = 0; h < kHalves; ++h) numbers[h] = load(of_weights + h * kLanes);
          for_each_sum([&](int r, int h) __attribute__((always_inline)) {
            sum[r][h] = fma(numbers[h], broadcast(of_rows[r]), sum[r][h]);
          });
        };
        for_each_sum([&](int r, int h) __attribute__((always_inline)) { products[r][h] = to_float(dots[r][h]); });
        if (w.zero_points != nullptr) {
          for_each_sum([&](int r, int h) __attribute__((always_inline)) {  // exact
            const F32x16 zeros = load(w.zero_points + at + h * kLanes);
            products[r][h] = fma(zero() - zeros, broadcast(x_sums[r]), products[r][h]);
          });
        }
        if (w.scales != nullptr) {
          F32x16 scales[kHalves];
          for (int h = 0; h < kHalves; ++h) scales[h] = load(w.scales + at + h * kLanes);
          for_each_sum([&](int r, int h) __attribute__((always_inline)) {
            sum[r][h] = fma(products[r][h], scales[h] * broadcast(x_scales[r]), sum[r][h]);
          });
        } else {
          for_each_sum([&](int r, int h) __attribute__((always_inline)) {
            sum[r][h] = fma(products[r][h], broadcast(x_scales[r]), sum[r][h]);
          });
        }
        add(w.scaled_sums + at, midpoints);
        if (w.minima != nullptr) add(w.minima + at, x_sums);
      }
    }
    end_sums(sum, c, half);
  }
}

// A quantized row times a panel where it is packed -> c [32]. The same arithmetic in the same order.
inline void micro_stored_int8_rows(const QuantizedRows& x, const Int8Panel& w, float* c) {
  const I32x16 zeros = broadcast_i32(-128 * kActivationGroup);
  for (int half = 0; half < 2; half += kRowHalves) {
    F32x16 sum[kRowHalves];
    for (int h = 0; h < kRowHalves; ++h) sum[h] = zero();
    const uint8_t* xi = x.values;
    const uint8_t* wi = w.values + half * 64;
    for (int64_t g = 0; g < w.groups; ++g) {
      I32x16 dots[kRowHalves];
      QuadSums sums[kRowHalves];
      for (int h = 0; h < kRowHalves; ++h) dots[h] = broadcast_i32(x.offsets[g]);
      for (int h = 0; h < kRowHalves; ++h) sums[h] = begin_quad_sums(zeros);
#pragma GCC unroll 8
      for (int step = 0; step < kGroupSteps; ++step, wi += 128, xi += kActivationBytes) {
        const ActivationQuad four = load_activation_quad(xi);
        prefetch(wi);
        prefetch(wi + 64);
#pragma GCC unroll 2
        for (int h = 0; h < kRowHalves; ++h) {
          const U8x64 values = load_u8x64(wi + 64 * h);
          dots[h] = dot(dots[h], values, four);
          sums[h] = add_quads(sums[h], values);
        }
      }
#pragma GCC unroll 2
      for (int h = 0; h < kRowHalves; ++h) {
        sum[h] = fma(to_float(dots[h]), broadcast(x.scales[g]), sum[h]);
        sum[h] = fma(to_float(end_quad_sums(sums[h], zeros)), broadcast(x.midpoints[g]), sum[h]);
      }
    }
    for (int h = 0; h < kRowHalves; ++h) {
      store(c + (half + h) * kLanes, sum[h] * load(w.scales + (half + h) * kLanes));
    }
  }
}

// A row x [k], not quantized, times w without its scales -> c [32].
inline void micro_int8_f32(const float* x, const Int8Panel& w, int64_t k, float* c) {
  const CodeZero zero_point = code_zero(broadcast(128.0f));
  for (int half = 0; half < 2; half += kRowHalves) {
    F32x16 sum[kRowHalves];
    for (int h = 0; h < kRowHalves; ++h) sum[h] = zero();
    const uint8_t* wi = w.values + half * 64;
    const auto step = [&](const float* four, int64_t columns) __attribute__((always_inline)) {
      Bytes64 codes[kRowHalves];
      prefetch(wi);
      prefetch(wi + 64);
#pragma GCC unroll 2
      for (int h = 0; h < kRowHalves; ++h) codes[h] = load_bytes(wi + h * 64);
#pragma GCC unroll 4
      for (int column = 0; column < 4; ++column) {
        if (column >= columns) break;
#pragma GCC unroll 2
        for (int h = 0; h < kRowHalves; ++h) {
          sum[h] = fma(broadcast(four[column]), code_column(codes[h], column, zero_point), sum[h]);
        }
      }
      wi += 128;
    };
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) step(x + i, 4);
    if (i < k) step(x + i, k - i);
    for (int h = 0; h < kRowHalves; ++h) store(c + (half + h) * kLanes, sum[h]);
  }
}

}  // namespace jaxis::JAXIS_ISA
