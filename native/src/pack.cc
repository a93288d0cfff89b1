// Packing, once, when weights are loaded: plain code, bound by memory.
#include <cstring>

#include "matmul.h"

namespace jaxis {
namespace {

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

template <typename T>
void pack_plain(const Pack& p, int64_t panel, int64_t interleave) {
  const int64_t k = p.format.k, padded = round_up(k, interleave);
  T* out = reinterpret_cast<T*>(p.packed + panel * panel_bytes(p.format));
  const T* data = static_cast<const T*>(p.data);
  // In squares that stay in cache: rows are far apart in the source, columns in the panel.
  constexpr int64_t kColumns = 64;
  for (int64_t begin = 0; begin < padded; begin += kColumns) {
    const int64_t end = begin + kColumns < padded ? begin + kColumns : padded;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      T* to = out + r * interleave;
      for (int64_t c = begin; c < end; ++c) {
        const T value = row < p.n && c < k ? data[row * k + c] : T(0);
        to[c / interleave * interleave * kPanelRows + c % interleave] = value;
      }
    }
  }
}

uint8_t quantized_value(const Pack& p, int64_t row, int64_t column) {
  const uint8_t* data = static_cast<const uint8_t*>(p.data);
  if (p.format.type == WeightType::kInt4) {
    const uint8_t both = data[row * (p.format.k / 2) + column / 2];
    return column % 2 == 0 ? both & 15 : both >> 4;
  }
  const uint8_t value = data[row * p.format.k + column];
  return p.format.has_zero_points ? value : value ^ 0x80;
}

// What stands for zero where a matrix is filled up.
uint8_t neutral_value(const WeightFormat& f) {
  if (f.has_zero_points) return 0;
  return f.type == WeightType::kInt4 ? 8 : 128;
}

void pack_quantized(const Pack& p, int64_t panel) {
  const WeightFormat& f = p.format;
  const int64_t group = f.group != 0 ? f.group : round_up(f.k, kActivationGroup);
  const int64_t num_groups = f.group != 0 ? f.k / f.group : 1;
  uint8_t* out = p.packed + panel * panel_bytes(f);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t data_bytes = (f.type == WeightType::kInt4 ? group / 2 : group) * kPanelRows;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      const auto value = [&](int64_t column) {
        const int64_t at = g * group + column;
        return row < p.n && at < f.k ? quantized_value(p, row, at) : neutral_value(f);
      };
      if (f.type == WeightType::kInt4) {
        for (int64_t c = 0; c < group / 2; ++c) {
          out[(c / 4 * kPanelRows + r) * 4 + c % 4] = static_cast<uint8_t>(value(c) | value(c + group / 2) << 4);
        }
      } else {
        for (int64_t c = 0; c < group; ++c) out[(c / 4 * kPanelRows + r) * 4 + c % 4] = value(c);
      }
    }
    out += data_bytes;
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const int64_t row = panel * kPanelRows + r;
      if (f.group == 0) {
        const float scale = row < p.n ? static_cast<const float*>(p.scales)[row] : 0.0f;
        std::memcpy(out + 4 * r, &scale, 4);
      } else {
        const uint16_t scale = row < p.n ? static_cast<const uint16_t*>(p.scales)[row * num_groups + g] : 0;
        std::memcpy(out + 2 * r, &scale, 2);
      }
    }
    out += kPanelRows * (f.group == 0 ? 4 : 2);
    if (f.has_zero_points) {
      for (int64_t r = 0; r < kPanelRows; ++r) {
        const int64_t row = panel * kPanelRows + r;
        out[r] = row < p.n ? p.zero_points[row * num_groups + g] : 0;
      }
      out += kPanelRows;
    }
  }
}

}  // namespace

int64_t panel_bytes(const WeightFormat& f) {
  switch (f.type) {
    case WeightType::kF32:
      return f.k * kPanelRows * 4;
    case WeightType::kBf16:
      return round_up(f.k, 2) * kPanelRows * 2;
    case WeightType::kInt8:
    case WeightType::kInt4:
      break;
  }
  if (f.group == 0) return (round_up(f.k, kActivationGroup) + 4) * kPanelRows;
  const int64_t data_bytes = f.type == WeightType::kInt4 ? f.group / 2 : f.group;
  return f.k / f.group * (data_bytes + 2 + (f.has_zero_points ? 1 : 0)) * kPanelRows;
}

void pack_panels(const Pack& p, int64_t first, int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    switch (p.format.type) {
      case WeightType::kF32:
        pack_plain<float>(p, panel, 1);
        break;
      case WeightType::kBf16:
        pack_plain<uint16_t>(p, panel, 2);
        break;
      case WeightType::kInt8:
      case WeightType::kInt4:
        pack_quantized(p, panel);
        break;
    }
  }
}

}  // namespace jaxis

// Packs panels [first, last); what Python's loader calls, from several threads. See Pack.
extern "C" __attribute__((visibility("default"))) void jaxis_pack(int32_t type, int64_t n, int64_t k, int64_t group,
                                                                  const void* data, const void* scales,
                                                                  const uint8_t* zero_points, uint8_t* packed,
                                                                  int64_t first, int64_t last) {
  const jaxis::WeightFormat format = {static_cast<jaxis::WeightType>(type), k, group, zero_points != nullptr};
  jaxis::pack_panels({format, n, data, scales, zero_points, packed}, first, last);
}

extern "C" __attribute__((visibility("default"))) int64_t jaxis_panel_bytes(int32_t type, int64_t k, int64_t group,
                                                                            bool has_zero_points) {
  return jaxis::panel_bytes({static_cast<jaxis::WeightType>(type), k, group, has_zero_points});
}
