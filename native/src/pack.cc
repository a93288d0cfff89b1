// Packing, once, when weights are loaded: plain code, bound by memory.
#include <cstdint>
#include <cstring>

#include "matmul.h"

namespace jaxis {
namespace {

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Rows of 32-bit words to columns of them. In squares that stay in cache: rows are far apart in the source, columns in
// the panel.
void transpose_words(const uint8_t* rows, int64_t row_bytes, int64_t num_words, uint8_t* out) {
  constexpr int64_t kWords = 32;
  for (int64_t begin = 0; begin < num_words; begin += kWords) {
    const int64_t end = begin + kWords < num_words ? begin + kWords : num_words;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const uint8_t* from = rows + r * row_bytes;
      for (int64_t c = begin; c < end; ++c) std::memcpy(out + (c * kPanelRows + r) * 4, from + c * 4, 4);
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
    transpose_words(reinterpret_cast<const uint8_t*>(data), k * sizeof(T), k / interleave, packed);
    return;
  }
  T* out = reinterpret_cast<T*>(packed);
  for (int64_t r = 0; r < kPanelRows; ++r) {
    for (int64_t c = 0; c < padded; ++c) {
      const T value = panel * kPanelRows + r < p.n && c < k ? data[r * k + c] : T(0);
      out[(c / interleave * kPanelRows + r) * interleave + c % interleave] = value;
    }
  }
}

// ActivationQuad bytes, each a number of the two bytes given: the low half first.
uint32_t spread_halves(const uint8_t* both) {
  uint32_t x = both[0] | static_cast<uint32_t>(both[1]) << 8;
  x = (x | x << 8) & 0x00ff00ffu;
  return (x | x << 4) & 0x0f0f0f0fu;
}

// ActivationQuad columns of a group of a row, for kInt4 eight, as they stand in a panel.
uint32_t quantized_word(const Pack& p, const uint8_t* group, int64_t column, int64_t group_size) {
  if (p.format.type == WeightType::kInt4) {
    return spread_halves(group + column / 2) | spread_halves(group + (column + group_size / 2) / 2) << 4;
  }
  uint32_t word;
  std::memcpy(&word, group + column, 4);
  return p.format.has_zero_points ? word : word ^ 0x80808080u;
}

// What stands for zero where a matrix is filled up.
uint32_t neutral_word(const WeightFormat& f) {
  if (f.has_zero_points) return 0;
  return f.type == WeightType::kInt4 ? 0x88888888u : 0x80808080u;
}

void pack_quantized(const Pack& p, int64_t panel) {
  const WeightFormat& f = p.format;
  const bool is_int4 = f.type == WeightType::kInt4;
  const int64_t group = f.group != 0 ? f.group : round_up(f.k, kActivationGroup);
  const int64_t num_groups = f.group != 0 ? f.k / f.group : 1;
  const bool wide_scales = f.group == 0 || f.has_wide_scales;
  const uint32_t neutral = neutral_word(f);
  uint8_t* out = p.packed + panel * panel_bytes(f);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t num_words = is_int4 ? group / 8 : group / 4;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      const uint8_t* data = static_cast<const uint8_t*>(p.data) + (row * f.k + g * group) / (is_int4 ? 2 : 1);
      const int64_t columns = row < p.n ? f.k - g * group : 0;
      for (int64_t w = 0; w < num_words; ++w) {
        uint32_t word = neutral;
        if (4 * w + 4 <= columns) {
          word = quantized_word(p, data, 4 * w, group);
        } else if (4 * w < columns) {  // a last word that the row only begins; its group is the row
          uint8_t last[4] = {};
          std::memcpy(last, data + 4 * w, columns - 4 * w);
          word = quantized_word(p, last, 0, group);
        }
        std::memcpy(out + (w * kPanelRows + r) * 4, &word, 4);
      }
    }
    out += num_words * kPanelRows * 4;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      if (wide_scales) {
        const float scale = row < p.n ? static_cast<const float*>(p.scales)[row * num_groups + g] : 0.0f;
        std::memcpy(out + 4 * r, &scale, 4);
      } else {
        const uint16_t scale = row < p.n ? static_cast<const uint16_t*>(p.scales)[row * num_groups + g] : 0;
        std::memcpy(out + 2 * r, &scale, 2);
      }
    }
    out += kPanelRows * (wide_scales ? 4 : 2);
    if (f.has_zero_points) {
      for (int64_t r = 0; r < kPanelRows; ++r) {
        const int64_t row = panel * kPanelRows + r;
        out[r] = row < p.n ? p.zero_points[row * num_groups + g] : 0;
      }
      out += kPanelRows;
    }
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

const char* unsupported_reason(const WeightFormat& f) {
  if (f.k < 0 || f.group < 0) return "sizes are not negative";
  switch (f.type) {
    case WeightType::kF32:
    case WeightType::kBf16:
      return f.group == 0 ? nullptr : "weights without scales have no groups";
    case WeightType::kInt8:
      if (f.group == 0) return nullptr;
      [[fallthrough]];
    case WeightType::kInt4:
      if (f.group == 0) return "int4 weights have groups";
      if (f.group % kGroupUnit != 0 || f.group > kMaxGroup) return "integer weights have groups of 32, 64, 96 or 128";
      return f.k % f.group == 0 ? nullptr : "groups of integer weights divide the columns";
    case WeightType::kFp8:
      return f.group != 0 && f.group % 2 == 0 ? nullptr : "fp8 weights have groups of an even number of columns";
    case WeightType::kMxfp4:
      if (f.group == 0 || f.group % 8 != 0) return "mxfp4 weights have groups of a multiple of 8 columns";
      return f.k % f.group == 0 ? nullptr : "groups of mxfp4 weights divide the columns";
  }
  return "unknown weight type";
}

int64_t panel_bytes(const WeightFormat& f) {
  switch (f.type) {
    case WeightType::kF32:
      return f.k * kPanelRows * 4;
    case WeightType::kBf16:
      return round_up(f.k, 2) * kPanelRows * 2;
    case WeightType::kFp8:
      return (round_up(f.k, 2) + 4 * ((f.k + f.group - 1) / f.group)) * kPanelRows;
    case WeightType::kMxfp4:
      return (f.k / 2 + f.k / f.group) * kPanelRows;
    case WeightType::kInt8:
    case WeightType::kInt4:
      break;
  }
  if (f.group == 0) return (round_up(f.k, kActivationGroup) + 4) * kPanelRows;
  const int64_t data_bytes = f.type == WeightType::kInt4 ? f.group / 2 : f.group;
  return f.k / f.group * (data_bytes + (f.has_wide_scales ? 4 : 2) + (f.has_zero_points ? 1 : 0)) * kPanelRows;
}

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
      case WeightType::kInt4:
        pack_quantized(p, panel);
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
extern "C" __attribute__((visibility("default"))) bool jaxis_pack(int32_t type, int64_t n, int64_t k, int64_t group,
                                                                  bool has_wide_scales, const void* data,
                                                                  const void* scales, const uint8_t* zero_points,
                                                                  uint8_t* packed, int64_t first, int64_t last) {
  const jaxis::WeightFormat format = {static_cast<jaxis::WeightType>(type), k, group, zero_points != nullptr,
                                      has_wide_scales};
  if (jaxis::unsupported_reason(format) != nullptr) return false;
  jaxis::pack_panels({format, n, data, scales, zero_points, packed}, first, last);
  return true;
}

// -1 if the format is not supported.
extern "C" __attribute__((visibility("default"))) int64_t jaxis_panel_bytes(int32_t type, int64_t k, int64_t group,
                                                                            bool has_zero_points,
                                                                            bool has_wide_scales) {
  const jaxis::WeightFormat format = {static_cast<jaxis::WeightType>(type), k, group, has_zero_points, has_wide_scales};
  return jaxis::unsupported_reason(format) == nullptr ? jaxis::panel_bytes(format) : -1;
}
