// What quantizing a row begins with, and powers of two that scales are multiples of.
#pragma once

#include <cstdint>

#include "low_precision_floats.h"
#include "quantize.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr uint32_t kSign = 0x80000000u, kExponent = 0x7f800000u;

// Denormal numbers are zeros: XLA may compute without them.
JAXIS_INLINE float flushed(float x) {
  const uint32_t bits = to_bits(x);
  return from_bits((bits & kExponent) != 0 ? bits : bits & kSign);
}

void upcast_row(const Quantize& a, int64_t row, float* out) {
  switch (a.type) {
    case FloatType::kF32: {
      const float* in = static_cast<const float*>(a.weight) + row * a.k;
      for (int64_t i = 0; i < a.k; ++i) out[i] = flushed(in[i]);
      break;
    }
    case FloatType::kBf16: {
      const uint16_t* in = static_cast<const uint16_t*>(a.weight) + row * a.k;
      for (int64_t i = 0; i < a.k; ++i) out[i] = flushed(bf16_to_float(in[i]));
      break;
    }
    case FloatType::kF16: {
      const uint16_t* in = static_cast<const uint16_t*>(a.weight) + row * a.k;
      for (int64_t i = 0; i < a.k; ++i) out[i] = f16_to_float(in[i]);
      break;
    }
  }
}

// Among bits as integers, so that a NaN is larger than everything.
JAXIS_INLINE float largest_magnitude(const float* x, int64_t size) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = to_bits(x[i]) & ~kSign;
    largest = bits > largest ? bits : largest;
  }
  return from_bits(largest);
}

// Bits of the largest code of a row: scales are 0 to 255, minima -127 to 127.
constexpr int kScaleBits = 8, kMinimumBits = 7;

// The smallest power of two, no denormal number, by which codes of so many bits reach `largest`.
JAXIS_INLINE float unit_of(float largest, int bits) {
  const int32_t exponent = static_cast<int32_t>(to_bits(largest) & kExponent);
  const int32_t unit_bits = exponent - ((bits - 1) << 23);
  const float unit = from_bits(static_cast<uint32_t>(unit_bits > 1 << 23 ? unit_bits : 1 << 23));
  return largest > unit * static_cast<float>((1 << bits) - 1) ? unit * 2.0f : unit;
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
