// Which formats of weights there are, and where things are in their panels.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "matmul.h"

namespace jaxis {
namespace {

constexpr int64_t kFields = 10;  // before the levels

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

int64_t unit_bytes(int64_t bits) { return bits * kUnit * kPanelRows / 8; }

const char* unsupported_codes(const WeightFormat& f) {
  if (f.bits != 2 && f.bits != 4 && f.bits != 5 && f.bits != 6 && f.bits != 8) return "codes have 2, 4, 5, 6 or 8 bits";
  if (f.group != kUnit / 2 && (f.group < kUnit || f.group % kUnit != 0 || f.group > kMaxGroup)) {
    return "codes have groups of 16, 32, 64, 96 or 128";
  }
  const int64_t span = f.group < kUnit ? kUnit : f.group;
  if (f.k % span != 0) return "groups of codes divide the columns, and those of 16 their half";
  if (f.offset < 0 || f.offset >= int64_t{1} << f.bits) return "the offset of codes is one of them";
  if (bytes_of(f.scale) < 1) return "the type of the scales is unknown";
  if (bytes_of(f.minimum) < 0) return "the type of the minima is unknown";
  if (f.minimum != ScaleType::kNone && f.has_zero_points) return "codes have minima or zero points, not both";
  if (f.super_scale != ScaleType::kNone) {
    if (f.super_scale != ScaleType::kF16 && f.super_scale != ScaleType::kF32)
      return "super-scales are float16 or float32";
    if (f.super_block <= 0 || f.super_block % span != 0 || f.k % f.super_block != 0) {
      return "super-blocks are of whole groups and divide the columns";
    }
  }
  if (f.has_levels) {
    if (f.bits != 4 || f.offset != 0 || f.has_zero_points)
      return "levels are of 4 bits, without an offset or zero points";
    for (const float level : f.levels) {
      if (!std::isfinite(level)) return "levels are finite";
    }
  }
  return nullptr;
}

}  // namespace

const char* unsupported_reason(const WeightFormat& f) {
  // Sizes whose products with those of a panel's elements are far from int64's end.
  if (f.k < 0 || f.group < 0 || f.k > int64_t{1} << 40) return "sizes are not negative, nor absurd";
  switch (f.type) {
    case WeightType::kF32:
    case WeightType::kBf16:
      return f.group == 0 ? nullptr : "weights without scales have no groups";
    case WeightType::kInt8:
      return f.group == 0 ? nullptr : "int8 weights have one scale a row";
    case WeightType::kCodes:
      return unsupported_codes(f);
    case WeightType::kFp8:
      return f.group != 0 && f.group % 2 == 0 ? nullptr : "fp8 weights have groups of an even number of columns";
    case WeightType::kMxfp4:
      if (f.group == 0 || f.group % 8 != 0) return "mxfp4 weights have groups of a multiple of 8 columns";
      return f.k % f.group == 0 ? nullptr : "groups of mxfp4 weights divide the columns";
  }
  return "unknown weight type";
}

bool are_equal(const WeightFormat& a, const WeightFormat& b) {
  return a.type == b.type && a.k == b.k && a.group == b.group && a.bits == b.bits && a.offset == b.offset &&
         a.scale == b.scale && a.minimum == b.minimum && a.has_zero_points == b.has_zero_points &&
         a.super_scale == b.super_scale && a.super_block == b.super_block && a.has_levels == b.has_levels &&
         std::memcmp(a.levels, b.levels, sizeof a.levels) == 0;
}

WeightFormat decode_format(const int64_t* fields, int64_t size, int64_t k) {
  WeightFormat f{};
  f.k = k;
  f.type = static_cast<WeightType>(-1);
  if (size != kFields + kMaxLevels) return f;
  // A number that does not fit its field must not become one that does.
  for (int64_t i = 0; i < kFields; ++i) {
    if (fields[i] < 0 || fields[i] > int64_t{1} << 40) return f;
  }
  const auto checked_int = [&](int64_t i) { return static_cast<int32_t>(fields[i] < 1 << 20 ? fields[i] : -1); };
  f.type = static_cast<WeightType>(checked_int(0));
  f.group = fields[1];
  f.bits = fields[2];
  f.offset = fields[3];
  f.scale = static_cast<ScaleType>(checked_int(4));
  f.minimum = static_cast<ScaleType>(checked_int(5));
  f.has_zero_points = fields[6] != 0;
  f.super_scale = static_cast<ScaleType>(checked_int(7));
  f.super_block = fields[8];
  f.has_levels = fields[9] != 0;
  for (int i = 0; i < kMaxLevels; ++i) {
    const auto bits = static_cast<uint32_t>(fields[kFields + i]);
    std::memcpy(&f.levels[i], &bits, 4);
  }
  return f;
}

CodeLayout code_layout(const WeightFormat& f) {
  CodeLayout out{};
  out.span = f.group < kUnit ? kUnit : f.group;
  out.groups_per_span = out.span / f.group;
  out.units_per_span = out.span / kUnit;
  out.num_spans = f.k / out.span;
  const bool has_minima = f.minimum != ScaleType::kNone;
  if (f.super_scale != ScaleType::kNone) {
    out.spans_per_super = f.super_block / out.span;
    out.super_minimum_at = bytes_of(f.super_scale) * kPanelRows;
    out.super_bytes = out.super_minimum_at * (has_minima ? 2 : 1);
  } else {
    out.spans_per_super = out.num_spans;
  }
  out.scale_bytes = bytes_of(f.scale);
  out.minimum_bytes = bytes_of(f.minimum);
  const int64_t numbers = out.groups_per_span * kPanelRows;
  out.minimum_at = out.scale_bytes * numbers;
  out.zero_point_at = out.minimum_at + out.minimum_bytes * numbers;
  out.unit_at = out.zero_point_at + (f.has_zero_points ? numbers : 0);
  out.unit_bytes = unit_bytes(f.bits);
  out.span_bytes = out.unit_at + out.units_per_span * out.unit_bytes;
  return out;
}

ByteLevels byte_levels(const WeightFormat& f) {
  ByteLevels out{};
  if (!f.has_levels) return out;
  float lowest = f.levels[0], highest = f.levels[0];
  for (const float level : f.levels) {
    if (std::abs(level) > 255.0f || level != std::floor(level)) return out;
    lowest = level < lowest ? level : lowest;
    highest = level > highest ? level : highest;
  }
  if (highest - lowest > 255.0f) return out;
  out.exist = true;
  out.zero = -static_cast<int32_t>(lowest);
  for (int i = 0; i < kMaxLevels; ++i) out.bytes[i] = static_cast<uint8_t>(f.levels[i] - lowest);
  return out;
}

bool has_integer_products(const WeightFormat& f) {
  if (f.type == WeightType::kCodes) return !f.has_levels || byte_levels(f).exist;
  return f.type == WeightType::kInt8;
}

int64_t panel_bytes(const WeightFormat& f) {
  switch (f.type) {
    case WeightType::kF32:
      return f.k * kPanelRows * 4;
    case WeightType::kBf16:
      return round_up(f.k, 2) * kPanelRows * 2;
    case WeightType::kInt8:
      return (round_up(f.k, kActivationGroup) + 4) * kPanelRows;
    case WeightType::kFp8:
      return (round_up(f.k, 2) + 4 * ((f.k + f.group - 1) / f.group)) * kPanelRows;
    case WeightType::kMxfp4:
      return (f.k / 2 + f.k / f.group) * kPanelRows;
    case WeightType::kCodes:
      break;
  }
  const CodeLayout layout = code_layout(f);
  const int64_t supers = layout.super_bytes == 0 ? 0 : f.k / f.super_block;
  return layout.num_spans * layout.span_bytes + supers * layout.super_bytes;
}

}  // namespace jaxis
