// Affine quantization of least squared error, as kernels/weights/affine.py defines it, to the same bits.
//
// Sixteen groups are side by side, one a lane, so that every sum has the order of the columns.
#pragma once

#include <cstdint>

#include "quantize.h"
#include "quantize_row.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr float kCandidates[] = {-1.0f, -0.625f, -0.25f, 0.125f, 0.5f, 0.875f, 1.25f};
constexpr float kSmallestRange = 0x1p-100f, kSmallestUnit = 0x1p-40f;
constexpr float kSmallestScale = 0x1p-126f;
constexpr float kSmallestPower = 0x1p-86f, kLargestPower = 0x1p126f;

// 1 / x, and 0 for what is too small to have one.
JAXIS_INLINE F32x16 reciprocal(F32x16 x) {
  const F32x16 tiny = broadcast(kSmallestRange);
  return keep_at_least(x, tiny, broadcast(1.0f) / max(x, tiny));
}

// a where x >= bound, else b.
JAXIS_INLINE F32x16 select_at_least(F32x16 x, F32x16 bound, F32x16 a, F32x16 b) {
  return keep_at_least(x, bound, a) + (b - keep_at_least(x, bound, b));
}

struct Fit {
  F32x16 scale, minimum;
};

// x [size][16].
JAXIS_INLINE Fit best_fit(const float* x, int64_t size, float largest_code) {
  F32x16 low = load(x), high = low;
  for (int64_t i = 1; i < size; ++i) {
    low = min(low, load(x + i * kLanes));
    high = max(high, load(x + i * kLanes));
  }
  const F32x16 one = broadcast(1.0f), top = broadcast(largest_code);
  const F32x16 count = broadcast(static_cast<float>(size)), per_count = broadcast(1.0f / static_cast<float>(size));
  F32x16 width = high - low;
  width = keep_at_least(width, broadcast(kSmallestRange), width);
  const F32x16 inverse = reciprocal(width);
  F32x16 least_error = broadcast(from_bits(kExponent));
  Fit best{low, low};
  for (const float candidate : kCandidates) {
    const float steps = largest_code + candidate;
    const F32x16 step = width * broadcast(1.0f / steps), inverse_step = inverse * broadcast(steps);
    F32x16 sum_q = zero(), sum_qq = zero(), sum_e = zero(), sum_qe = zero(), sum_ee = zero();
    for (int64_t i = 0; i < size; ++i) {
      const F32x16 y = load(x + i * kLanes) - low;
      const F32x16 q = min(round_even(y * inverse_step), top);
      const F32x16 e = y - q * step;
      sum_q = sum_q + q;
      sum_qq = sum_qq + q * q;
      sum_e = sum_e + e;
      sum_qe = sum_qe + q * e;
      sum_ee = sum_ee + e * e;
    }
    const F32x16 determinant = count * sum_qq - sum_q * sum_q;
    const F32x16 slope = keep_at_least(determinant, one, (count * sum_qe - sum_q * sum_e) / max(determinant, one));
    const F32x16 mean = (sum_e - slope * sum_q) * per_count;
    const F32x16 error = sum_ee - mean * sum_e - slope * sum_qe;
    best.scale = select_at_least(error, least_error, best.scale, max(step + slope, zero()));
    best.minimum = select_at_least(error, least_error, best.minimum, low + mean);
    least_error = min(error, least_error);
  }
  return best;
}

JAXIS_INLINE F32x16 code_of(F32x16 y, F32x16 inverse_scale, F32x16 top) {
  return min(max(round_even(y * inverse_scale), zero()), top);
}

// The scale of least squared error for the codes that scale and minimum give.
JAXIS_INLINE F32x16 refitted_scale(const float* x, int64_t size, Fit fit, F32x16 top) {
  const F32x16 inverse = reciprocal(fit.scale), one = broadcast(1.0f);
  F32x16 sum_qq = zero(), sum_qy = zero();
  for (int64_t i = 0; i < size; ++i) {
    const F32x16 y = load(x + i * kLanes) - fit.minimum;
    const F32x16 q = code_of(y, inverse, top);
    sum_qq = sum_qq + q * q;
    sum_qy = sum_qy + q * y;
  }
  return select_at_least(sum_qq, one, max(sum_qy / max(sum_qq, one), zero()), fit.scale);
}

JAXIS_INLINE float at_least_smallest_unit(float unit) { return unit > kSmallestUnit ? unit : kSmallestUnit; }

JAXIS_INLINE float largest_power_of_two(float largest) {
  const float power = from_bits(to_bits(largest) & kExponent);
  return power < kSmallestPower ? kSmallestPower : power > kLargestPower ? kLargestPower : power;
}

// One row, from x [k] to codes [k].
JAXIS_INLINE void quantize_row_affinely(const Quantize& a, int64_t row, float* x, float largest, float largest_code) {
  const int64_t size = a.group, num_groups = a.k / size, num_blocks = (num_groups + kLanes - 1) / kLanes;
  float* const blocks = x + a.k;  // [num_blocks][size][16]
  float* const scales = blocks + num_blocks * kLanes * size;
  float* const minima = scales + num_blocks * kLanes;
  const F32x16 top = broadcast(largest_code);
  const float power = largest_power_of_two(largest), per_power = 1.0f / power;
  for (int64_t b = 0; b < num_blocks; ++b) {
    float* const block = blocks + b * kLanes * size;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t g = b * kLanes + lane;
      for (int64_t i = 0; i < size; ++i) {
        block[i * kLanes + lane] = g < num_groups ? flushed(x[g * size + i] * per_power) : 0.0f;
      }
    }
    const Fit fit = best_fit(block, size, largest_code);
    store(scales + b * kLanes, fit.scale);
    store(minima + b * kLanes, fit.minimum);
  }

  const float minimum_unit = at_least_smallest_unit(unit_of(largest_magnitude(minima, num_groups), kMinimumBits));
  int8_t* const minimum_codes = a.minima + row * num_groups;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const F32x16 codes = round_even(load(minima + b * kLanes) * broadcast(1.0f / minimum_unit));
    const F32x16 minimum = codes * broadcast(minimum_unit);
    store(minima + b * kLanes, minimum);
    const Fit fit{load(scales + b * kLanes), minimum};
    store(scales + b * kLanes, refitted_scale(blocks + b * kLanes * size, size, fit, top));
    float numbers[kLanes];
    store(numbers, codes);
    for (int64_t lane = 0; lane < kLanes && b * kLanes + lane < num_groups; ++lane) {
      minimum_codes[b * kLanes + lane] = static_cast<int8_t>(numbers[lane]);
    }
  }

  const float scale_unit = at_least_smallest_unit(unit_of(largest_magnitude(scales, num_groups), kScaleBits));
  uint8_t* const scale_codes = static_cast<uint8_t*>(a.scales) + row * num_groups;
  uint8_t* const qvalue = static_cast<uint8_t*>(a.qvalue) + row * a.k;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const F32x16 scale = load(scales + b * kLanes), one = broadcast(1.0f);
    const F32x16 codes =
        keep_at_least(scale, broadcast(kSmallestScale), max(round_even(scale * broadcast(1.0f / scale_unit)), one));
    const F32x16 inverse = reciprocal(codes * broadcast(scale_unit)), minimum = load(minima + b * kLanes);
    float* const block = blocks + b * kLanes * size;
    for (int64_t i = 0; i < size; ++i) {
      store(block + i * kLanes, code_of(load(block + i * kLanes) - minimum, inverse, top));
    }
    float numbers[kLanes];
    store(numbers, codes);
    for (int64_t lane = 0; lane < kLanes && b * kLanes + lane < num_groups; ++lane) {
      const int64_t g = b * kLanes + lane;
      scale_codes[g] = static_cast<uint8_t>(numbers[lane]);
      for (int64_t i = 0; i < size; ++i) {
        qvalue[g * size + i] = static_cast<uint8_t>(static_cast<int32_t>(block[i * kLanes + lane]));
      }
    }
  }
  a.scale_units[row] = scale_unit * power;
  a.minimum_units[row] = minimum_unit * power;
}

inline bool quantize_affine(const Quantize& a) {
  const auto largest_code = static_cast<float>((1 << code_bits(a.calibration)) - 1);
  for (int64_t row = 0; row < a.rows; ++row) {
    float* const x = a.scratch;
    upcast_row(a, row, x);
    const float largest = largest_magnitude(x, a.k);
    if ((to_bits(largest) & kExponent) == kExponent) return false;
    quantize_row_affinely(a, row, x, largest, largest_code);
  }
  return true;
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
