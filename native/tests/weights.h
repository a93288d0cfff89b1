// Random weights of every format, packed, and what they stand for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "matmul.h"
#include "testing.h"

namespace jaxis::testing {

// A matrix [n, k] packed, and the same as elements.
struct Weight {
  WeightFormat format;
  int64_t n;
  std::vector<uint8_t> packed;
  std::vector<double> dense;  // [n, k]
  // [n, k]: the sizes of the terms that an element is computed from; errors are relative to them.
  std::vector<double> magnitudes;
};

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

inline float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// The number that float16's bits stand for, which are not of an infinity or NaN.
inline double from_f16(uint16_t x) {
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return x < 0x8000 ? magnitude : -magnitude;
}

// The number that an e4m3 byte stands for: its sign, four bits of exponent with a bias of 7, three of mantissa.
inline double from_e4m3(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits < 128 ? magnitude : -magnitude;
}

inline double from_e2m1(int bits) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return bits < 8 ? magnitudes[bits] : -magnitudes[bits - 8];
}

inline Weight make_block_scaled(const WeightFormat& format, int64_t n, uint32_t seed) {
  Weight w{format, n, {}, std::vector<double>(n * format.k), {}};
  const bool is_fp8 = format.type == WeightType::kFp8;
  const int64_t k = format.k, groups = (k + format.group - 1) / format.group;
  const std::vector<int> codes = integers(n * k, 0, is_fp8 ? 255 : 15, seed);
  const std::vector<int> exponents = integers(n * groups, -12, -3, seed + 1);
  std::vector<uint8_t> data, scales;
  std::vector<float> scales32;
  for (const int exponent : exponents) {
    scales.push_back(static_cast<uint8_t>(127 + exponent));
    scales32.push_back(static_cast<float>(std::ldexp(1.25, exponent)));
  }
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t at = i / k * groups + i % k / format.group;
    const int code = is_fp8 && codes[i] % 128 == 127 ? 0 : codes[i];  // not a NaN
    w.dense[i] = is_fp8 ? from_e4m3(code) * scales32[at] : from_e2m1(code) * std::ldexp(1.0, exponents[at]);
    if (is_fp8 || i % 2 == 0) {
      data.push_back(static_cast<uint8_t>(code));
    } else {
      data.back() = static_cast<uint8_t>(data.back() | code << 4);
    }
  }
  w.packed.resize(num_panels(n) * panel_bytes(format));
  Pack pack{};
  pack.format = format;
  pack.n = n;
  pack.data = data.data();
  pack.scales = is_fp8 ? static_cast<const void*>(scales32.data()) : scales.data();
  pack.packed = w.packed.data();
  pack_panels(pack, 0, num_panels(n));
  return w;
}

// Numbers as bytes of their type, and their values.
struct Numbers {
  std::vector<uint8_t> bytes;
  std::vector<double> values;

  const void* data() const { return bytes.empty() ? nullptr : bytes.data(); }
  // Entry `row` of `per_row`, of the column's share of k; `without` where there are none.
  double at(int64_t row, int64_t column, int64_t k, double without) const {
    if (values.empty()) return without;
    const int64_t per_row = static_cast<int64_t>(values.size()) / (n > 0 ? n : 1);
    return values[row * per_row + column / (k / per_row)];
  }
  int64_t n = 0;
};

inline Numbers random_numbers(ScaleType type, int64_t n, int64_t per_row, uint32_t seed) {
  Numbers out;
  out.n = n;
  if (type == ScaleType::kNone) return out;
  const auto append = [&](const void* from, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    out.bytes.insert(out.bytes.end(), bytes, bytes + size);
  };
  const std::vector<int> bits = integers(n * per_row, 0, 1 << 24, seed);
  for (const int bit : bits) {
    const float wide = 0.001f + 0.002f * static_cast<float>(bit) / (1 << 24);
    // Of float16: an exponent of 2 ** -10 to 2 ** -7, or a denormal number.
    const auto half = static_cast<uint16_t>(bit % 8 == 0 ? bit & 1023 : (bit >> 4 & 0xfff) + (5 << 10));
    const uint16_t bf16 = to_bf16(wide);
    const auto byte = static_cast<uint8_t>(bit & 63);
    const auto signed_byte = static_cast<int8_t>((bit & 127) - 64);
    const auto e4m3 = static_cast<uint8_t>(bit & 255 % 127);
    switch (type) {
      case ScaleType::kF32:
        append(&wide, 4);
        out.values.push_back(wide);
        break;
      case ScaleType::kBf16:
        append(&bf16, 2);
        out.values.push_back(from_bf16(bf16));
        break;
      case ScaleType::kF16:
        append(&half, 2);
        out.values.push_back(from_f16(half));
        break;
      case ScaleType::kU8:
        append(&byte, 1);
        out.values.push_back(byte);
        break;
      case ScaleType::kI8:
        append(&signed_byte, 1);
        out.values.push_back(signed_byte);
        break;
      case ScaleType::kE4m3:
        append(&e4m3, 1);
        out.values.push_back(from_e4m3(e4m3));
        break;
      case ScaleType::kNone:
        break;
    }
  }
  return out;
}

// Numbers of `bits` bits, earlier ones in lower bits of a byte.
inline std::vector<uint8_t> dense_bits(const std::vector<int>& numbers, int64_t bits) {
  std::vector<uint8_t> out(numbers.size() * bits / 8);
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint8_t& byte = out[i * bits / 8];
    byte = static_cast<uint8_t>(byte | numbers[i] << i * bits % 8);
  }
  return out;
}

// `source_bits`: those of the codes before packing, if they are fewer than the format's. `lowest`: the lowest code.
inline Weight make_codes(const WeightFormat& f, int64_t n, uint32_t seed, int64_t source_bits = 0, int lowest = 0) {
  Weight w{f, n, {}, std::vector<double>(n * f.k), std::vector<double>(n * f.k)};
  const int64_t bits = source_bits != 0 ? source_bits : f.bits, low_bits = bits < 4 ? 2 : bits < 8 ? 4 : 8;
  const int64_t groups = f.k / f.group;
  const std::vector<int> codes = integers(n * f.k, lowest, (1 << bits) - 1, seed);
  std::vector<int> low, high;
  for (const int code : codes) {
    low.push_back(code & ((1 << low_bits) - 1));
    high.push_back(code >> low_bits);
  }
  const std::vector<uint8_t> data = dense_bits(low, low_bits);
  const std::vector<uint8_t> upper = bits > low_bits ? dense_bits(high, bits - low_bits) : std::vector<uint8_t>();
  const Numbers scales = random_numbers(f.scale, n, groups, seed + 1);
  const Numbers minima = random_numbers(f.minimum, n, groups, seed + 2);
  const Numbers zeros = random_numbers(f.has_zero_points ? ScaleType::kU8 : ScaleType::kNone, n, groups, seed + 3);
  const bool has_super = f.super_scale != ScaleType::kNone, has_minima = f.minimum != ScaleType::kNone;
  const int64_t blocks = has_super ? f.k / f.super_block : 0;
  const Numbers super_scales = random_numbers(f.super_scale, n, blocks, seed + 4);
  const Numbers super_minima = random_numbers(has_minima ? f.super_scale : ScaleType::kNone, n, blocks, seed + 5);
  for (int64_t i = 0; i < n * f.k; ++i) {
    const int64_t row = i / f.k, column = i % f.k;
    const double scale = scales.at(row, column, f.k, 0.0) * super_scales.at(row, column, f.k, 1.0);
    const double minimum = minima.at(row, column, f.k, 0.0) * super_minima.at(row, column, f.k, 1.0);
    const double value = f.has_levels ? f.levels[codes[i]] : codes[i] - static_cast<double>(f.offset);
    w.dense[i] = (value - zeros.at(row, column, f.k, 0.0)) * scale + minimum;
    // Products of bytes have the offset, or all levels made positive, taken off afterwards.
    w.magnitudes[i] = 256.0 * std::abs(scale) + std::abs(minimum);
  }
  w.packed.resize(num_panels(n) * panel_bytes(f));
  Pack pack{};
  pack.format = f;
  pack.n = n;
  pack.source_bits = bits;
  pack.data = data.data();
  pack.high = upper.empty() ? nullptr : upper.data();
  pack.scales = scales.data();
  pack.minima = minima.data();
  pack.zero_points = static_cast<const uint8_t*>(zeros.data());
  pack.super_scales = super_scales.data();
  pack.super_minima = super_minima.data();
  pack.packed = w.packed.data();
  pack_panels(pack, 0, num_panels(n));
  return w;
}

inline Weight make_weight(const WeightFormat& format, int64_t n, uint32_t seed) {
  if (is_block_scaled(format.type)) return make_block_scaled(format, n, seed);
  if (format.type == WeightType::kCodes) return make_codes(format, n, seed);
  const int64_t k = format.k;
  Weight w{format, n, {}, std::vector<double>(n * k), {}};
  const std::vector<float> elements = normal(n * k, seed), scales = normal(n, seed + 1);
  std::vector<uint16_t> halves;
  std::vector<int8_t> bytes;
  Pack pack{};
  pack.format = format;
  pack.n = n;
  if (format.type == WeightType::kInt8) {
    w.magnitudes.resize(n * k);
    const std::vector<int> q = integers(n * k, -128, 127, seed + 2);
    for (int64_t i = 0; i < n * k; ++i) {
      bytes.push_back(static_cast<int8_t>(q[i]));
      w.dense[i] = q[i] * static_cast<double>(scales[i / k]);
      w.magnitudes[i] = 256.0 * std::abs(scales[i / k]);
    }
    pack.data = bytes.data();
    pack.scales = scales.data();
  } else if (format.type == WeightType::kBf16) {
    for (int64_t i = 0; i < n * k; ++i) {
      halves.push_back(to_bf16(elements[i]));
      w.dense[i] = from_bf16(halves.back());
    }
    pack.data = halves.data();
  } else {
    w.dense.assign(elements.begin(), elements.end());
    pack.data = elements.data();
  }
  w.packed.resize(num_panels(n) * panel_bytes(format));
  pack.packed = w.packed.data();
  pack_panels(pack, 0, num_panels(n));
  return w;
}

inline WeightFormat plain_format(WeightType type, int64_t k, int64_t group = 0) {
  WeightFormat out{};
  out.type = type;
  out.k = k;
  out.group = group;
  return out;
}

inline WeightFormat code_format(int64_t k, int64_t group, int64_t bits, int64_t offset, ScaleType scale,
                                ScaleType minimum = ScaleType::kNone) {
  WeightFormat out = plain_format(WeightType::kCodes, k, group);
  out.bits = bits;
  out.offset = offset;
  out.scale = scale;
  out.minimum = minimum;
  return out;
}

inline WeightFormat super_format(WeightFormat out, ScaleType type, int64_t block) {
  out.super_scale = type;
  out.super_block = block;
  return out;
}

inline WeightFormat level_format(WeightFormat out, float factor) {
  const float levels[kMaxLevels] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  out.has_levels = true;
  for (int i = 0; i < kMaxLevels; ++i) out.levels[i] = levels[i] * factor;
  return out;
}

inline WeightFormat with_zero_points(WeightFormat out) {
  out.has_zero_points = true;
  return out;
}

// Formats of codes, those whose groups and super-blocks divide k.
inline std::vector<WeightFormat> code_formats(int64_t k) {
  constexpr ScaleType kF16 = ScaleType::kF16, kF32 = ScaleType::kF32, kBf16 = ScaleType::kBf16, kU8 = ScaleType::kU8,
                      kI8 = ScaleType::kI8;
  const std::vector<WeightFormat> all = {
      code_format(k, 32, 8, 128, kF16),
      code_format(k, 64, 8, 128, kF32),
      code_format(k, 128, 8, 0, kBf16, kBf16),
      with_zero_points(code_format(k, 32, 8, 0, kBf16)),
      code_format(k, 32, 2, 1, kF16),
      super_format(code_format(k, 128, 2, 1, kU8), kF32, k),
      with_zero_points(code_format(k, 64, 2, 0, kBf16)),
      super_format(code_format(k, 16, 2, 0, kU8, kU8), kF16, 128),
      code_format(k, 32, 4, 8, kF16),
      code_format(k, 96, 4, 8, kBf16),
      with_zero_points(code_format(k, 64, 4, 0, kBf16)),
      with_zero_points(code_format(k, 16, 4, 0, kF32)),
      code_format(k, 32, 4, 0, kF16, kF16),
      code_format(k, 64, 5, 16, kF16),
      code_format(k, 16, 5, 0, kF16, kF32),
      code_format(k, 128, 6, 32, kF16),
      super_format(code_format(k, 16, 6, 32, kI8), kF16, 128),
      super_format(code_format(k, 16, 4, 0, kU8, kU8), kF16, 64),
      super_format(code_format(k, 32, 4, 0, kU8, kU8), kF16, 128),
      super_format(code_format(k, 32, 5, 0, kU8, kU8), kF16, 64),
      super_format(code_format(k, 32, 8, 0, kU8, kI8), kF32, 128),
      level_format(code_format(k, 32, 4, 0, kF16), 1.0f),
      super_format(level_format(code_format(k, 32, 4, 0, kI8), 1.0f), kF16, 128),
      super_format(level_format(code_format(k, 16, 4, 0, ScaleType::kE4m3), 0.5f), kF32, k),
      level_format(code_format(k, 64, 4, 0, kF32), 0.01f),
  };
  std::vector<WeightFormat> out;
  for (const WeightFormat& format : all) {
    if (unsupported_reason(format) == nullptr) out.push_back(format);
  }
  return out;
}

// Calls function(format, quantize) for each way to multiply.
template <typename Function>
void for_each_way(const std::vector<WeightFormat>& formats, const Function& function) {
  for (const WeightFormat& format : formats) {
    function(format, false);
    if (has_integer_products(format)) function(format, true);
  }
}

inline std::string name(const WeightFormat& f) {
  return text("type", static_cast<int>(f.type), "k", f.k, "group", f.group, "bits", f.bits, "offset", f.offset, "scale",
              static_cast<int>(f.scale), "minimum", static_cast<int>(f.minimum), "zero points", f.has_zero_points,
              "super", static_cast<int>(f.super_scale), f.super_block, "levels", f.has_levels);
}

}  // namespace jaxis::testing
