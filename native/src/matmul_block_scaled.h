// The innermost loops of products with low-precision floats: a few rows times one panel, group by group of columns.
//
// The sum of a group is kept in registers without its scale, which comes once, when the sum is added to what the groups
// before it made. Whether elements are upcast here or were before makes no difference to the result.
#pragma once

#include <cstdint>

#include "low_precision_floats.h"
#include "matmul.h"
#include "matmul_micro.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {

// A panel of low-precision floats, or of the same as float32 [group][32].
struct BlockScaledPanel {
  const uint8_t* values;
  int64_t value_stride;  // bytes from group to group
  const uint8_t* scales;
  int64_t scale_stride;  // bytes from group to group
  int64_t k;
  int64_t group;
  WeightType type;  // of the scales

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t columns(int64_t g) const { return (g + 1) * group < k ? group : k - g * group; }
};

// The scales of half a panel's rows for the elements of a group as they come from load_e4m3_pairs or upcast_e2m1.
JAXIS_INLINE F32x16 load_group_scales(WeightType type, const uint8_t* scales, int half) {
  if (type == WeightType::kMxfp4) return load_e8m0(scales + half * kLanes);
  return load(reinterpret_cast<const float*>(scales) + half * kLanes) * broadcast(kE4m3Factor);
}

template <int R>
JAXIS_INLINE void add_column(const float* x, const F32x16 (&weights)[kHalves], F32x16 (&sum)[R][kHalves]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const F32x16 value = broadcast(x[r]);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) sum[r][h] = fma(value, weights[h], sum[r][h]);
  }
}

// x [columns][R] times a group of w, without its scales; w at the half panel's first number.
template <int R>
JAXIS_INLINE void add_group_f32(const float* x, const float* w, int64_t columns, F32x16 (&sum)[R][kHalves]) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < columns; ++i, w += kPanelRows, x += R) {
    F32x16 weights[kHalves];
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) weights[h] = load(w + h * kLanes);
    add_column<R>(x, weights, sum);
  }
}

template <int R>
JAXIS_INLINE void add_group_e4m3(const float* x, const uint8_t* w, int64_t columns, F32x16 (&sum)[R][kHalves]) {
#pragma GCC unroll 2
  for (int64_t i = 0; i < columns; i += 2, w += 2 * kPanelRows, x += 2 * R) {
    F32x16 even[kHalves], odd[kHalves];
    prefetch(w);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) load_e4m3_pairs(w + 2 * h * kLanes, &even[h], &odd[h]);
    add_column<R>(x, even, sum);
    if (i + 1 < columns) add_column<R>(x + R, odd, sum);
  }
}

template <int R, int kPlace>
JAXIS_INLINE void add_e2m1_column(const float* x, const E2m1Words (&words)[kHalves], F32x16 (&sum)[R][kHalves]) {
  F32x16 weights[kHalves];
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) weights[h] = upcast_e2m1<kPlace>(words[h]);
  add_column<R>(x + kPlace * R, weights, sum);
}

template <int R>
JAXIS_INLINE void add_group_e2m1(const float* x, const uint8_t* w, int64_t columns, F32x16 (&sum)[R][kHalves]) {
  for (int64_t i = 0; i < columns; i += 8, w += 4 * kPanelRows, x += 8 * R) {
    E2m1Words words[kHalves];
    prefetch(w);
    if (kHalves == 2) prefetch(w + 2 * kPanelRows);
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) words[h] = load_e2m1(w + 4 * h * kLanes);
    add_e2m1_column<R, 0>(x, words, sum);
    add_e2m1_column<R, 1>(x, words, sum);
    add_e2m1_column<R, 2>(x, words, sum);
    add_e2m1_column<R, 3>(x, words, sum);
    add_e2m1_column<R, 4>(x, words, sum);
    add_e2m1_column<R, 5>(x, words, sum);
    add_e2m1_column<R, 6>(x, words, sum);
    add_e2m1_column<R, 7>(x, words, sum);
  }
}

// x [columns][R] times a group, without its scales; `half`: where in the panel's rows to begin.
template <int R, WeightType kStored>
JAXIS_INLINE void add_group(const float* x, const uint8_t* values, int64_t columns, int half,
                            F32x16 (&sum)[R][kHalves]) {
  if constexpr (kStored == WeightType::kF32) {
    add_group_f32<R>(x, reinterpret_cast<const float*>(values) + half * kLanes, columns, sum);
  } else if constexpr (kStored == WeightType::kFp8) {
    add_group_e4m3<R>(x, values + 2 * half * kLanes, columns, sum);
  } else {
    add_group_e2m1<R>(x, values + 4 * half * kLanes, columns, sum);
  }
}

// x [k][R] times w, set in or (not `first`) added to c [R][32]. kStored: the type that the values are in here.
template <int R, WeightType kStored>
void micro_block_scaled(const float* x, const BlockScaledPanel& w, float* c, bool first) {
  for (int half = 0; half < 2; half += kHalves) {
    const int64_t groups = w.groups();
    for (int64_t g = 0; g < groups; ++g) {
      F32x16 sum[R][kHalves];
      for (int r = 0; r < R; ++r) {
        for (int h = 0; h < kHalves; ++h) sum[r][h] = zero();
      }
      add_group<R, kStored>(x + g * w.group * R, w.values + g * w.value_stride, w.columns(g), half, sum);
      const bool is_new = first && g == 0;
#pragma GCC unroll 2
      for (int h = 0; h < kHalves; ++h) {
        const F32x16 scales = load_group_scales(w.type, w.scales + g * w.scale_stride, half + h);
        float* to = c + (half + h) * kLanes;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r, to += kPanelRows) {
          store(to, fma(sum[r][h], scales, is_new ? zero() : load(to)));
        }
      }
    }
  }
}

JAXIS_INLINE BlockScaledPanel block_scaled_panel(const WeightFormat& f, const uint8_t* panel) {
  const bool is_fp8 = f.type == WeightType::kFp8;
  const int64_t scale_bytes = (is_fp8 ? 4 : 1) * kPanelRows;
  const int64_t stride = scale_bytes + (is_fp8 ? f.group : f.group / 2) * kPanelRows;
  return {panel + scale_bytes, stride, panel, stride, f.k, f.group, f.type};
}

// Groups [begin, begin + count) of a panel.
JAXIS_INLINE BlockScaledPanel slice_groups(const BlockScaledPanel& w, int64_t begin, int64_t count) {
  BlockScaledPanel out = w;
  out.values += begin * w.value_stride;
  out.scales += begin * w.scale_stride;
  out.k = (begin + count) * w.group < w.k ? count * w.group : w.k - begin * w.group;
  return out;
}

template <int kPlace>
JAXIS_INLINE void store_e2m1_column(E2m1Words words, float* out) {
  store(out + kPlace * kPanelRows, upcast_e2m1<kPlace>(words));
}

// The elements of a panel, without their scales, as float32 [k][32].
inline BlockScaledPanel upcast_block_scaled(const BlockScaledPanel& w, float* out) {
  BlockScaledPanel upcast = w;
  upcast.values = reinterpret_cast<const uint8_t*>(out);
  upcast.value_stride = w.group * kPanelRows * 4;
  for (int64_t g = 0; g < w.groups(); ++g) {
    const int64_t columns = w.columns(g);
    const uint8_t* values = w.values + g * w.value_stride;
    if (w.type == WeightType::kFp8) {
      for (int64_t i = 0; i < columns; i += 2, values += 2 * kPanelRows, out += 2 * kPanelRows) {
        for (int h = 0; h < 2; ++h) {
          F32x16 even, odd;
          load_e4m3_pairs(values + 2 * h * kLanes, &even, &odd);
          store(out + h * kLanes, even);
          if (i + 1 < columns) store(out + kPanelRows + h * kLanes, odd);
        }
      }
      continue;
    }
    for (int64_t i = 0; i < columns; i += 8, values += 4 * kPanelRows, out += 8 * kPanelRows) {
      for (int h = 0; h < 2; ++h) {
        const E2m1Words words = load_e2m1(values + 4 * h * kLanes);
        float* to = out + h * kLanes;
        store_e2m1_column<0>(words, to);
        store_e2m1_column<1>(words, to);
        store_e2m1_column<2>(words, to);
        store_e2m1_column<3>(words, to);
        store_e2m1_column<4>(words, to);
        store_e2m1_column<5>(words, to);
        store_e2m1_column<6>(words, to);
        store_e2m1_column<7>(words, to);
      }
    }
  }
  return upcast;
}

// One number, scaled: `row` of the panel, `column` of all.
inline float block_scaled_element(const BlockScaledPanel& w, int64_t row, int64_t column) {
  const int64_t g = column / w.group, at = column % w.group;
  const uint8_t* values = w.values + g * w.value_stride;
  const uint8_t* scales = w.scales + g * w.scale_stride;
  if (w.type == WeightType::kFp8) {
    const float scale = reinterpret_cast<const float*>(scales)[row] * kE4m3Factor;
    return e4m3_to_float(values[(at / 2 * kPanelRows + row) * 2 + at % 2]) * scale;
  }
  const uint8_t both = values[(at / 8 * kPanelRows + row) * 4 + at % 8 / 2];
  return kE2m1[at % 2 != 0 ? both >> 4 : both & 15] * e8m0_to_float(scales[row]);
}

}  // namespace jaxis::JAXIS_ISA
