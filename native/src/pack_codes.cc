// Codes from rows of dense bits to units of planes; see matmul.h.
#include "pack_codes.h"

#include <cstdint>
#include <cstring>

#include "matmul.h"

namespace jaxis {
namespace {

constexpr int64_t kSteps = kUnit / 4;  // of four columns

// Adds kBits bits of each code of a unit, from dense bits, to a byte each.
template <int kBits>
void add_bits(const uint8_t* dense, int shift, uint8_t* codes) {
  constexpr int kPerByte = 8 / kBits;
  constexpr auto kMask = static_cast<uint8_t>((1 << kBits) - 1);
  for (int64_t i = 0; i < kUnit / kPerByte; ++i) {
    for (int j = 0; j < kPerByte; ++j) {
      uint8_t& code = codes[i * kPerByte + j];
      code = static_cast<uint8_t>(code | (dense[i] >> (j * kBits) & kMask) << shift);
    }
  }
}

// The codes of a unit of four bits each, to a byte each.
void split_codes(const uint8_t* dense, uint8_t* codes) {
  for (int64_t i = 0; i < kUnit / 2; i += 4) {
    uint32_t joined;
    std::memcpy(&joined, dense + i, 4);
    uint64_t eight = joined;
    eight = (eight | eight << 16) & 0x0000ffff0000ffffu;
    eight = (eight | eight << 8) & 0x00ff00ff00ff00ffu;
    eight = (eight | eight << 4) & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(codes + 2 * i, &eight, 8);
  }
}

// A row's codes of a unit: four columns a word, the first in the lowest byte.
void read_codes(const Pack& p, int64_t row, int64_t column, uint32_t* steps) {
  const int64_t at = row * p.format.k + column;
  const auto* data = static_cast<const uint8_t*>(p.data);
  if (p.source_bits == 8) {
    std::memcpy(steps, data + at, kUnit);
    for (int64_t s = 0; p.is_signed && s < kSteps; ++s) steps[s] ^= kByteSigns;
    return;
  }
  uint8_t codes[kUnit] = {};
  if (p.source_bits < 4) {
    add_bits<2>(data + at / 4, 0, codes);
    if (p.source_bits == 3) add_bits<1>(p.high + at / 8, 2, codes);
  } else {
    split_codes(data + at / 2, codes);
    if (p.source_bits == 5) add_bits<1>(p.high + at / 8, 4, codes);
    if (p.source_bits == 6) add_bits<2>(p.high + at / 4, 4, codes);
  }
  std::memcpy(steps, codes, kUnit);
}

// Row `r` of a unit of zeros.
void write_codes(const uint32_t* steps, int64_t bits, int64_t r, uint8_t* unit) {
  const auto write = [&](uint8_t* plane, int64_t place, uint32_t word) {
    std::memcpy(plane + (place * kPanelRows + r) * 4, &word, 4);
  };
  if (bits == 8) {
    for (int64_t s = 0; s < kSteps; ++s) write(unit, s, steps[s]);
    return;
  }
  constexpr int64_t kHalf = kSteps / 2;
  // Bits `from` and the next of each code, of sixteen columns a plane.
  const auto write_pairs = [&](uint8_t* planes, int from) {
    for (int64_t half = 0; half < 2; ++half) {
      uint32_t word = 0;
      for (int64_t s = 0; s < kHalf; ++s) word |= (steps[half * kHalf + s] >> from & 0x03030303u) << 2 * s;
      write(planes, half, word);
    }
  };
  if (bits == 2) return write_pairs(unit, 0);
  constexpr uint32_t kLow = 0x0f0f0f0fu;
  for (int64_t s = 0; s < kHalf; ++s) write(unit, s, (steps[s] & kLow) | (steps[s + kHalf] & kLow) << 4);
  uint8_t* upper = unit + kUnit / 2 * kPanelRows;
  if (bits == 5) {
    for (int64_t s = 0; s < kSteps; ++s) {
      // The product moves the lowest bits of the four bytes next to each other, to the top.
      const uint32_t four = (steps[s] >> 4 & 0x01010101u) * 0x10204080u >> 28;
      uint8_t* byte = upper + (s * 2 + r / 16) * 8 + r % 16 / 2;
      *byte = static_cast<uint8_t>(*byte | four << r % 2 * 4);
    }
  } else if (bits == 6) {
    write_pairs(upper, 4);
  }
}

// Numbers `index` to `index + count` of each row, which has `per_row`, to [count][32]; nothing where there are none.
void pack_numbers(const Pack& p, const void* numbers, int64_t bytes, int64_t panel, int64_t index, int64_t per_row,
                  int64_t count, uint8_t* out) {
  if (numbers == nullptr) return;
  for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < p.n; ++r) {
    const auto* from = static_cast<const uint8_t*>(numbers) + ((panel * kPanelRows + r) * per_row + index) * bytes;
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(out + (i * kPanelRows + r) * bytes, from + i * bytes, static_cast<size_t>(bytes));
    }
  }
}

}  // namespace

// What is past the matrix's end is zeros, with scales and minima of zero.
void pack_codes(const Pack& p, int64_t panel) {
  const WeightFormat& f = p.format;
  const CodeLayout layout = code_layout(f);
  const int64_t groups = f.k / f.group, size = panel_bytes(f);
  const int64_t supers = layout.super_bytes == 0 ? 0 : f.k / f.super_block;
  uint8_t* out = p.packed + panel * size;
  std::memset(out, 0, static_cast<size_t>(size));
  for (int64_t s = 0; s < layout.num_spans; ++s) {
    if (supers != 0 && s % layout.spans_per_super == 0) {
      const int64_t index = s / layout.spans_per_super, bytes = layout.super_minimum_at / kPanelRows;
      pack_numbers(p, p.super_scales, bytes, panel, index, supers, 1, out);
      pack_numbers(p, p.super_minima, bytes, panel, index, supers, 1, out + layout.super_minimum_at);
      out += layout.super_bytes;
    }
    const int64_t g = s * layout.groups_per_span, count = layout.groups_per_span;
    pack_numbers(p, p.scales, layout.scale_bytes, panel, g, groups, count, out);
    pack_numbers(p, p.minima, layout.minimum_bytes, panel, g, groups, count, out + layout.minimum_at);
    pack_numbers(p, p.zero_points, 1, panel, g, groups, count, out + layout.zero_point_at);
    for (int64_t u = 0; u < layout.units_per_span; ++u) {
      uint8_t* unit = out + layout.unit_at + u * layout.unit_bytes;
      for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < p.n; ++r) {
        uint32_t steps[kSteps];
        read_codes(p, panel * kPanelRows + r, s * layout.span + u * kUnit, steps);
        write_codes(steps, f.bits, r, unit);
      }
    }
    out += layout.span_bytes;
  }
}

}  // namespace jaxis
