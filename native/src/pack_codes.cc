// Codes from rows of dense bits to units of planes; see matmul.h.
#include "pack_codes.h"

#include <cstdint>
#include <cstring>

#include "matmul.h"

namespace jaxis {
namespace {

constexpr int64_t kSteps = kUnit / 4;

// The first `bits` (1, 2, 4 or 8) of each code of a unit, from dense bits to a byte each; added to what is there.
void add_bits(const uint8_t* dense, int64_t bits, int64_t shift, uint8_t* codes) {
  const int64_t per_byte = 8 / bits;
  const auto mask = static_cast<uint8_t>((1 << bits) - 1);
  for (int64_t i = 0; i < kUnit; i += per_byte) {
    const uint8_t byte = dense[i / per_byte];
    for (int64_t j = 0; j < per_byte; ++j) {
      codes[i + j] = static_cast<uint8_t>(codes[i + j] | (byte >> (j * bits) & mask) << shift);
    }
  }
}

void read_codes(const Pack& p, int64_t row, int64_t column, uint8_t* codes) {
  const int64_t bits = p.source_bits, low_bits = bits < 4 ? 2 : bits < 8 ? 4 : 8, high_bits = bits - low_bits;
  const int64_t at = row * p.format.k + column;
  std::memset(codes, 0, kUnit);
  add_bits(static_cast<const uint8_t*>(p.data) + at * low_bits / 8, low_bits, 0, codes);
  if (high_bits > 0) add_bits(p.high + at * high_bits / 8, high_bits, low_bits, codes);
  if (p.is_signed) {
    for (int64_t i = 0; i < kUnit; ++i) codes[i] ^= 0x80;
  }
}

// Row `r` of a unit of zeros.
void write_codes(const uint8_t* codes, int64_t bits, int64_t r, uint8_t* unit) {
  if (bits == 8) {
    for (int64_t s = 0; s < kSteps; ++s) std::memcpy(unit + (s * kPanelRows + r) * 4, codes + 4 * s, 4);
    return;
  }
  uint8_t* nibbles = unit + 4 * r;
  for (int64_t i = 0; i < kUnit / 2; ++i) {
    nibbles[i / 4 * 4 * kPanelRows + i % 4] = static_cast<uint8_t>((codes[i] & 15) | codes[i + kUnit / 2] << 4);
  }
  uint8_t* upper = unit + kUnit / 2 * kPanelRows;
  for (int64_t i = 0; i < kUnit; ++i) {
    const int high = codes[i] >> 4;
    if (bits == 5) {
      const int64_t bit = r % 16 * 4 + i % 4;
      uint8_t* byte = upper + (i / 4 * 2 + r / 16) * 8 + bit / 8;
      *byte = static_cast<uint8_t>(*byte | high << bit % 8);
    } else if (bits == 6) {
      uint8_t* byte = upper + (i / 16 * kPanelRows + r) * 4 + i % 4;
      *byte = static_cast<uint8_t>(*byte | high << i / 4 % 4 * 2);
    }
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
        uint8_t codes[kUnit];
        read_codes(p, panel * kPanelRows + r, s * layout.span + u * kUnit, codes);
        write_codes(codes, f.bits, r, unit);
      }
    }
    out += layout.span_bytes;
  }
}

}  // namespace jaxis
