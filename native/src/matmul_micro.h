// The innermost loops of the products: a few rows times one panel of 32 outputs, sums kept in registers.
//
// Each sum runs over the columns in order, whatever the number of rows, so a row's result does not depend on which
// other rows there are.
#pragma once

#include <cstdint>

#include "dot.h"
#include "matmul.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {

// Registers decide how many rows at most, and how many of a panel's two halves, are worked on at once.
#if defined(JAXIS_SIMD_AVX512)
constexpr int kHalves = 2;
constexpr int kMaxRows = 12;
#if defined(JAXIS_SIMD_VNNI)
constexpr int kMaxQuantizedRows = 6;
#else
constexpr int kMaxQuantizedRows = 4;
#endif
#elif defined(JAXIS_SIMD_NEON)
constexpr int kHalves = 1;
constexpr int kMaxRows = 5;
constexpr int kMaxQuantizedRows = 2;
#else
constexpr int kHalves = 1;
constexpr int kMaxRows = 5;
constexpr int kMaxQuantizedRows = 3;
#endif

// How far ahead of its use memory is asked for: the hardware's own prefetching stops at each page's end.
constexpr int64_t kPrefetchBytes = 2048;

JAXIS_INLINE void prefetch(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + kPrefetchBytes); }

// The sums that a micro-kernel begins with: zeros, or where the columns before it left off.
template <int R>
JAXIS_INLINE void begin_sums(F32x16 (&sum)[R][kHalves], const float* c, int half, bool first) {
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < kHalves; ++h) sum[r][h] = first ? zero() : load(c + r * kPanelRows + (half + h) * kLanes);
  }
}

template <int R>
JAXIS_INLINE void end_sums(const F32x16 (&sum)[R][kHalves], float* c, int half) {
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < kHalves; ++h) store(c + r * kPanelRows + (half + h) * kLanes, sum[r][h]);
  }
}

// x [k][R] times w [k][32], set in or (not `first`) added to c [R][32].
template <int R>
void micro_f32(const float* x, const float* w, int64_t k, float* c, bool first) {
  for (int half = 0; half < 2; half += kHalves) {
    F32x16 sum[R][kHalves];
    begin_sums<R>(sum, c, half, first);
    const float* wi = w + half * kLanes;
    const float* xi = x;
#pragma GCC unroll 4
    for (int64_t i = 0; i < k; ++i, wi += kPanelRows, xi += R) {
      F32x16 weights[kHalves];
      prefetch(wi);
      prefetch(wi + kLanes);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) weights[h] = load(wi + h * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32x16 value = broadcast(xi[r]);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) sum[r][h] = fma(value, weights[h], sum[r][h]);
      }
    }
    end_sums<R>(sum, c, half);
  }
}

// The same with w [k2 / 2][32][2].
template <int R>
void micro_bf16(const float* x, const bf16_t* w, int64_t k, float* c, bool first) {
  for (int half = 0; half < 2; half += kHalves) {
    F32x16 sum[R][kHalves];
    begin_sums<R>(sum, c, half, first);
    const bf16_t* wi = w + 2 * half * kLanes;
    const float* xi = x;
    const auto pair = [&](bool has_second) __attribute__((always_inline)) {
      F32x16 even[kHalves], odd[kHalves];
      prefetch(wi);
      prefetch(wi + 2 * kLanes);
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) load_bf16_pairs(wi + 2 * h * kLanes, &even[h], &odd[h]);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const F32x16 value = broadcast(xi[r]);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) sum[r][h] = fma(value, even[h], sum[r][h]);
      }
      if (has_second) {
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const F32x16 value = broadcast(xi[R + r]);
#pragma GCC unroll 2
          for (int h = 0; h < kHalves; ++h) sum[r][h] = fma(value, odd[h], sum[r][h]);
        }
      }
      wi += 2 * kPanelRows;
      xi += 2 * R;
    };
    for (int64_t i = 0; i + 2 <= k; i += 2) pair(true);
    if (k % 2 != 0) pair(false);
    end_sums<R>(sum, c, half);
  }
}

// R rows of quantized activations, [groups] of them side by side.
struct QuantizedRows {
  const uint8_t* values;   // [groups * steps][R][kActivationBytes], four columns a step
  const float* scales;     // [groups][R]
  const int32_t* offsets;  // [groups][R], what a sum begins with: -zero_point * sum of the values
  const float* sums;       // [groups][R], the sum of the values; used with zero points
};

// Steps of four columns that are unrolled; groups have a multiple of it, and of its double.
constexpr int kStepsAtOnce = 4;

// A panel of quantized weights.
struct QuantizedPanel {
  const uint8_t* values;
  int64_t value_stride;  // bytes from group to group
  const uint8_t* scales;
  const uint8_t* zero_points;  // or null
  int64_t scale_stride;        // bytes from group to group, of scales and zero points both
  bool wide_scales;            // float32, not bfloat16
  int64_t groups;
  int64_t steps;  // of four columns in a group
};

JAXIS_INLINE F32x16 load_scales(const uint8_t* scales, int half, bool wide) {
  return wide ? load(reinterpret_cast<const float*>(scales) + half * kLanes)
              : load_bf16(reinterpret_cast<const bf16_t*>(scales) + half * kLanes);
}

// x times w, set in or added to c [R][32]. kNibbles: two values a byte. kGrouped: scales a group; otherwise float32
// ones that come once, after the last group.
template <int R, bool kNibbles, bool kGrouped>
void micro_quantized(const QuantizedRows& x, const QuantizedPanel& w, float* c, bool first, bool last) {
  for (int half = 0; half < 2; half += kHalves) {
    F32x16 sum[R][kHalves];
    begin_sums<R>(sum, c, half, first);
    const uint8_t* xi = x.values;
    for (int64_t g = 0; g < w.groups; ++g) {
      I32x16 dots[R][kHalves];
      for (int r = 0; r < R; ++r) {
        for (int h = 0; h < kHalves; ++h) dots[r][h] = broadcast_i32(x.offsets[g * R + r]);
      }
      const uint8_t* wi = w.values + g * w.value_stride + half * 64;
      if constexpr (kNibbles) {
        const uint8_t* xj = xi + w.steps / 2 * R * kActivationBytes;
        for (int64_t s = 0; s < w.steps / 2; s += kStepsAtOnce) {
#pragma GCC unroll 4
          for (int u = 0; u < kStepsAtOnce; ++u, wi += 128) {
            U8x64 low[kHalves], high[kHalves];
            prefetch(wi);
            prefetch(wi + 64);
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) load_nibbles(wi + 64 * h, &low[h], &high[h]);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r, xi += kActivationBytes, xj += kActivationBytes) {
              const ActivationQuad early = load_activation_quad(xi), late = load_activation_quad(xj);
#pragma GCC unroll 2
              for (int h = 0; h < kHalves; ++h) dots[r][h] = dot(dot(dots[r][h], low[h], early), high[h], late);
            }
          }
        }
        xi = xj;
      } else {
        for (int64_t s = 0; s < w.steps; s += kStepsAtOnce) {
#pragma GCC unroll 4
          for (int u = 0; u < kStepsAtOnce; ++u, wi += 128) {
            U8x64 values[kHalves];
            prefetch(wi);
            prefetch(wi + 64);
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) values[h] = load_u8x64(wi + 64 * h);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r, xi += kActivationBytes) {
              const ActivationQuad four = load_activation_quad(xi);
#pragma GCC unroll 2
              for (int h = 0; h < kHalves; ++h) dots[r][h] = dot(dots[r][h], values[h], four);
            }
          }
        }
      }
      const uint8_t* scales = w.scales + g * w.scale_stride;
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        F32x16 weight_scales = zero(), zero_points = zero();
        if constexpr (kGrouped) {
          weight_scales = load_scales(scales, half + h, w.wide_scales);
          if (w.zero_points != nullptr) {
            zero_points = load_u8(w.zero_points + g * w.scale_stride + (half + h) * kLanes);
          }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          F32x16 value = to_float(dots[r][h]);
          if constexpr (kGrouped) {
            if (w.zero_points != nullptr) value = value - zero_points * broadcast(x.sums[g * R + r]);
            sum[r][h] = fma(value, weight_scales * broadcast(x.scales[g * R + r]), sum[r][h]);
          } else {
            sum[r][h] = fma(value, broadcast(x.scales[g * R + r]), sum[r][h]);
          }
        }
      }
    }
    if (!kGrouped && last) {
      for (int h = 0; h < kHalves; ++h) {
        const F32x16 scales = load(reinterpret_cast<const float*>(w.scales) + (half + h) * kLanes);
        for (int r = 0; r < R; ++r) sum[r][h] = sum[r][h] * scales;
      }
    }
    end_sums<R>(sum, c, half);
  }
}

}  // namespace jaxis::JAXIS_ISA
