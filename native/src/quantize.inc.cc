// Quantizes rows of weights.
#include "quantize.h"

#include <cstdint>
#include <cstring>

#include "quantize_affine.h"
#include "quantize_row.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

struct Range {
  float low, high;
};

// Also among integers, in the order of the numbers that they stand for.
JAXIS_INLINE Range range(const float* x, int64_t size) {
  const auto ordered = [](uint32_t bits) {
    const int32_t value = static_cast<int32_t>(bits);
    return value ^ ((value >> 31) & 0x7fffffff);
  };
  int32_t low = INT32_MAX, high = INT32_MIN;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t value = ordered(to_bits(x[i]));
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  const auto back = [&](int32_t value) {
    return from_bits(static_cast<uint32_t>(ordered(static_cast<uint32_t>(value))));
  };
  return {back(low), back(high)};
}

JAXIS_INLINE float clipped(float x, float low, float high) {
  x = x > low ? x : low;
  return x < high ? x : high;
}

constexpr float kShift = 12582912.0f;  // 1.5 * 2**23: what is added to it loses its fraction

// Rounds to nearest even, clipped. `divisor` is infinite where the scale is 0.
JAXIS_INLINE float quotient(float x, float divisor, float low, float high) {
  return clipped(x / divisor, low, high) + kShift - kShift;
}

JAXIS_INLINE F32x16 quotients(F32x16 x, F32x16 divisor, F32x16 low, F32x16 high) {
  return min(max(x / divisor, low), high) + broadcast(kShift) - broadcast(kShift);
}

JAXIS_INLINE float divisor_of(float scale) { return scale == 0.0f ? from_bits(kExponent) : scale; }

JAXIS_INLINE float rounded_scale(float scale, bool wide) {
  scale = flushed(scale) + 0.0f;  // a zero is positive
  return wide ? scale : bf16_to_float(float_to_bf16(scale));
}

// Added up in halves: of a power of two of places, the rest of them 0, the second half onto the first, and again.
JAXIS_INLINE float squared_error(const float* x, int64_t size, float scale, float* scratch) {
  int64_t places = 1;
  while (places < size) places *= 2;
  const float divisor = divisor_of(scale);
  for (int64_t i = 0; i < size; ++i) {
    const float error = quotient(x[i], divisor, -8.0f, 7.0f) * scale - x[i];
    scratch[i] = flushed(error * error);
  }
  for (int64_t i = size; i < places; ++i) scratch[i] = 0.0f;
  for (int64_t half = places / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) scratch[i] += scratch[half + i];
  }
  return scratch[0];
}

JAXIS_INLINE float mse_scale(const float* x, int64_t size, bool wide, float* scratch) {
  const Range r = range(x, size);
  const float extreme = -r.low > r.high ? r.low : r.high;
  const float plain = rounded_scale(extreme / -8.0f, wide);
  const float clipping = rounded_scale(extreme / -8.8f, wide);
  return squared_error(x, size, clipping, scratch) < squared_error(x, size, plain, scratch) ? clipping : plain;
}

// The first `count` of sixteen integral values in [-128, 127].
JAXIS_INLINE void store_part_i8(int8_t* out, F32x16 values, int64_t count) {
  if (count >= kLanes) return store_i8(out, values);
  int8_t lanes[kLanes];
  store_i8(lanes, values);
  std::memcpy(out, lanes, static_cast<size_t>(count));
}

JAXIS_INLINE void quantize_to_int8(const float* x, int64_t size, float scale, int8_t* out) {
  const F32x16 divisor = broadcast(divisor_of(scale)), low = broadcast(-127.0f), high = broadcast(127.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    store_part_i8(out + i, quotients(load_part(x + i, size - i), divisor, low, high), size - i);
  }
}

// To whole numbers from 0 to 15. `out` may begin where x does, or before.
JAXIS_INLINE void quantize_to_int4(const float* x, int64_t size, float scale, float low, float high, float zero_point,
                                   int8_t* out) {
  const F32x16 divisor = broadcast(divisor_of(scale));
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32x16 quotient = quotients(load_part(x + i, size - i), divisor, broadcast(low), broadcast(high));
    const F32x16 code = min(max(quotient + broadcast(zero_point), zero()), broadcast(15.0f));
    store_part_i8(out + i, code, size - i);
  }
}

// Codes of a byte each to codes of half a byte, the earlier one in the low half.
JAXIS_INLINE void join_codes(const int8_t* codes, int64_t size, uint8_t* out) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    eight = (eight | eight >> 4) & 0x00ff00ff00ff00ffu;
    eight = (eight | eight >> 8) & 0x0000ffff0000ffffu;
    eight |= eight >> 16;
    std::memcpy(out + i / 2, &eight, 4);
  }
  for (; i + 2 <= size; i += 2) out[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
}

// Scales of groups of int8, rounded up to codes times a power of two of the row; then the row's integers.
JAXIS_INLINE void quantize_row_to_int8(const Quantize& a, int64_t row, const float* x, int64_t size, float* scales) {
  const int64_t num_groups = a.k / size;
  float largest = 0.0f;
  for (int64_t g = 0; g < num_groups; ++g) {
    scales[g] = flushed(largest_magnitude(x + g * size, size) / 127.0f);
    largest = scales[g] > largest ? scales[g] : largest;
  }
  const float unit = unit_of(largest, kScaleBits), per_unit = 1.0f / unit;
  for (int64_t g = 0; g < num_groups; ++g) {
    const float multiple = scales[g] * per_unit;
    int32_t code = static_cast<int32_t>(multiple);
    code += static_cast<float>(code) < multiple ? 1 : 0;
    code = code == 0 && scales[g] > 0.0f ? 1 : code;
    static_cast<uint8_t*>(a.scales)[row * num_groups + g] = static_cast<uint8_t>(code);
    quantize_to_int8(x + g * size, size, static_cast<float>(code) * unit,
                     static_cast<int8_t*>(a.qvalue) + row * a.k + g * size);
  }
  a.scale_units[row] = unit;
}

// kGroup is `group`, where the compiler is to know it; else 0.
template <int64_t kGroup>
bool quantize_groups(const Quantize& a) {
  const int64_t group_size = kGroup != 0 ? kGroup : a.group;
  const int64_t num_groups = a.k / group_size;
  float* const x = a.scratch;
  float* const sums = a.scratch + a.k;
  int8_t* const codes = reinterpret_cast<int8_t*>(x);  // in place of the groups that were quantized
  for (int64_t row = 0; row < a.rows; ++row) {
    upcast_row(a, row, x);
    if ((to_bits(largest_magnitude(x, a.k)) & kExponent) == kExponent) return false;
    if (a.calibration == Calibration::kInt8AbsMax && !a.wide_scales) {
      quantize_row_to_int8(a, row, x, group_size, sums);
      continue;
    }
    for (int64_t g = 0; g < num_groups; ++g) {
      float* const group = x + g * group_size;
      float scale = 0.0f;
      switch (a.calibration) {
        case Calibration::kInt8AbsMax:
          scale = rounded_scale(largest_magnitude(group, group_size) / 127.0f, true);
          quantize_to_int8(group, group_size, scale, static_cast<int8_t*>(a.qvalue) + row * a.k + g * group_size);
          break;
        case Calibration::kInt4AbsMax:
          scale = rounded_scale(largest_magnitude(group, group_size) / 7.0f, a.wide_scales);
          quantize_to_int4(group, group_size, scale, -8.0f, 7.0f, 8.0f, codes + g * group_size);
          break;
        case Calibration::kInt4MinMax: {
          const Range r = range(group, group_size);
          // 0 among them, so that it is exact and the zero point fits.
          const float low = r.low < 0.0f ? r.low : 0.0f, high = r.high > 0.0f ? r.high : 0.0f;
          scale = rounded_scale((high - low) / 15.0f, a.wide_scales);
          const float zero_point = quotient(-low, divisor_of(scale), 0.0f, 15.0f);
          quantize_to_int4(group, group_size, scale, -15.0f, 15.0f, zero_point, codes + g * group_size);
          a.zero_points[row * num_groups + g] = static_cast<uint8_t>(zero_point);
          break;
        }
        case Calibration::kInt4Mse:
          scale = mse_scale(group, group_size, a.wide_scales, sums);
          quantize_to_int4(group, group_size, scale, -8.0f, 7.0f, 8.0f, codes + g * group_size);
          break;
        case Calibration::kInt4Affine:
        case Calibration::kInt5Affine:
        case Calibration::kInt6Affine:
          return false;  // quantize_affine's
      }
      if ((to_bits(scale) & kExponent) == kExponent) return false;
      if (a.wide_scales) {
        static_cast<float*>(a.scales)[row * num_groups + g] = scale;
      } else {
        static_cast<uint16_t*>(a.scales)[row * num_groups + g] = static_cast<uint16_t>(to_bits(scale) >> 16);
      }
    }
    if (a.calibration != Calibration::kInt8AbsMax) {
      join_codes(codes, a.k, static_cast<uint8_t*>(a.qvalue) + row * (a.k / 2));
    }
  }
  return true;
}

}  // namespace

bool quantize(const Quantize& a) {
  if (is_affine(a.calibration)) return quantize_affine(a);
  switch (a.group) {
    case 32:
      return quantize_groups<32>(a);
    case 64:
      return quantize_groups<64>(a);
    case 128:
      return quantize_groups<128>(a);
    default:
      return quantize_groups<0>(a);
  }
}

}  // namespace jaxis::JAXIS_ISA
