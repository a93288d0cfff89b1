// Packing, once, when weights are loaded: plain code, bound by memory.
#include <cstdint>
#include <cstring>

#include "matmul.h"
#include "pack_codes.h"

namespace jaxis {
namespace {

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Rows of 32-bit words to columns of them, turned by so many bits, with the bits of `flipped` flipped. In squares that
// stay in cache: rows are far apart in the source, columns in the panel.
void transpose_words(const uint8_t* rows, int64_t row_bytes, int64_t num_words, int turned, uint32_t flipped,
                     uint8_t* out) {
  constexpr int64_t kWords = 32;
  for (int64_t begin = 0; begin < num_words; begin += kWords) {
    const int64_t end = begin + kWords < num_words ? begin + kWords : num_words;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* from = rows + r * row_bytes;
      for (int64_t c = begin; c < end; ++c) {
        uint32_t word;
        std::memcpy(&word, from + c * 4, 4);
        word = (word << turned | word >> (32 - turned) % 32) ^ flipped;
        std::memcpy(out + (c * kPanelRows + r) * 4, &word, 4);
      }
    }
  }
}

template <typename T>
void pack_plain(const Pack& p, int64_t panel) {
  constexpr int64_t interleave = 4 / sizeof(T);
  const int64_t k = p.format.k, padded = round_up(k, interleave);
  uint8_t* packed = p.packed + panel * panel_bytes(p.format);
  const T* data = static_cast<const T*>(p.data) + panel * kPanelRows * k;
  if ((panel + 1) * kPanelRows <= p.n && k == padded) {
    transpose_words(reinterpret_cast<const uint8_t*>(data), k * sizeof(T), k / interleave, sizeof(T) == 2 ? 16 : 0, 0,
                    packed);
    return;
  }
  T* out = reinterpret_cast<T*>(packed);
  for (int64_t r = 0; r < kPanelRows; ++r) {
    for (int64_t c = 0; c < padded; ++c) {
      const T value = panel * kPanelRows + r < p.n && c < k ? data[r * k + c] : T(0);
      out[(c / interleave * kPanelRows + r) * interleave + interleave - 1 - c % interleave] = value;
    }
  }
}

void pack_int8(const Pack& p, int64_t panel) {
  const int64_t k = p.format.k, num_words = round_up(k, kActivationGroup) / 4;
  uint8_t* out = p.packed + panel * panel_bytes(p.format);
  const auto* rows = static_cast<const uint8_t*>(p.data) + panel * kPanelRows * k;
  if ((panel + 1) * kPanelRows <= p.n && k % kActivationGroup == 0) {
    transpose_words(rows, k, num_words, 0, kByteSigns, out);
  } else {
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t columns = panel * kPanelRows + r < p.n ? k : 0;
      for (int64_t w = 0; w < num_words; ++w) {
        const int64_t left = columns - 4 * w;
        uint32_t word = 0;
        if (left > 0) std::memcpy(&word, rows + r * k + 4 * w, static_cast<size_t>(left < 4 ? left : 4));
        word ^= kByteSigns;
        std::memcpy(out + (w * kPanelRows + r) * 4, &word, 4);
      }
    }
  }
  for (int64_t r = 0; r < kPanelRows; ++r) {
    const int64_t row = panel * kPanelRows + r;
    const float scale = row < p.n ? static_cast<const float*>(p.scales)[row] : 0.0f;
    std::memcpy(out + (num_words * kPanelRows + r) * 4, &scale, 4);
  }
}

// What is past the matrix's end is zeros, with scales of zero.
void pack_block_scaled(const Pack& p, int64_t panel) {
  const WeightFormat& f = p.format;
  const bool is_fp8 = f.type == WeightType::kFp8;
  const int64_t num_groups = (f.k + f.group - 1) / f.group, row_bytes = is_fp8 ? f.k : f.k / 2;
  const int64_t group_bytes = is_fp8 ? f.group : f.group / 2;
  const int64_t unit = is_fp8 ? 2 : 4, scale_bytes = is_fp8 ? 4 : 1;  // a unit: what stands together of a row
  uint8_t* out = p.packed + panel * panel_bytes(f);
  std::memset(out, 0, static_cast<size_t>(panel_bytes(f)));
  const int64_t rows = p.n - panel * kPanelRows < kPanelRows ? p.n - panel * kPanelRows : kPanelRows;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t begin = g * group_bytes;
    const int64_t size = begin + group_bytes < row_bytes ? group_bytes : row_bytes - begin;
    uint8_t* values = out + scale_bytes * kPanelRows;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      std::memcpy(out + r * scale_bytes, static_cast<const uint8_t*>(p.scales) + (row * num_groups + g) * scale_bytes,
                  static_cast<size_t>(scale_bytes));
      const uint8_t* data = static_cast<const uint8_t*>(p.data) + row * row_bytes + begin;
      uint8_t* to = values + r * unit;
      if (is_fp8) {
        for (int64_t i = 0; i + 2 <= size; i += 2, to += 2 * kPanelRows) std::memcpy(to, data + i, 2);
        if (size % 2 != 0) *to = data[size - 1];
      } else {
        for (int64_t i = 0; i < size; i += 4, to += 4 * kPanelRows) std::memcpy(to, data + i, 4);
      }
    }
    out = values + round_up(size, unit) * kPanelRows;
  }
}

}  // namespace

void pack_panels(const Pack& p, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    switch (p.format.type) {
      case WeightType::kF32:
        pack_plain<float>(p, panel);
        break;
      case WeightType::kBf16:
        pack_plain<uint16_t>(p, panel);
        break;
      case WeightType::kInt8:
        pack_int8(p, panel);
        break;
      case WeightType::kCodes:
        pack_codes(p, panel);
        break;
      case WeightType::kFp8:
      case WeightType::kMxfp4:
        pack_block_scaled(p, panel);
        break;
    }
  }
}

}  // namespace jaxis

// What Python's loader calls. Panels [first, last) are packed, from several threads; see Pack. False, and nothing is
// done, if the format is not supported.
extern "C" __attribute__((visibility("default"))) bool jaxis_pack(
    const int64_t* format, int64_t format_size, int64_t n, int64_t k, int64_t source_bits, bool is_signed,
    const void* data, const void* scales, const uint8_t* high, const uint8_t* zero_points, const void* minima,
    const void* super_scales, const void* super_minima, uint8_t* packed, int64_t first, int64_t last) {
  jaxis::Pack pack{};
  pack.format = jaxis::decode_format(format, format_size, k);
  if (jaxis::unsupported_reason(pack.format) != nullptr) return false;
  pack.n = n;
  pack.data = data;
  pack.scales = scales;
  pack.source_bits = source_bits;
  pack.is_signed = is_signed;
  pack.high = high;
  pack.zero_points = zero_points;
  pack.minima = minima;
  pack.super_scales = super_scales;
  pack.super_minima = super_minima;
  pack.packed = packed;
  jaxis::pack_panels(pack, first, last);
  return true;
}

// -1 if the format is not supported.
extern "C" __attribute__((visibility("default"))) int64_t jaxis_panel_bytes(const int64_t* format, int64_t format_size,
                                                                            int64_t k) {
  const jaxis::WeightFormat decoded = jaxis::decode_format(format, format_size, k);
  return jaxis::unsupported_reason(decoded) == nullptr ? jaxis::panel_bytes(decoded) : -1;
}
