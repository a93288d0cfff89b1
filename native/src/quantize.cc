// What Python's loader calls, from several threads.
#include "quantize.h"

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "kernels.h"
#include "matmul.h"

namespace jaxis {
namespace {

struct Free {
  void operator()(uint8_t* memory) const { std::free(memory); }
};

using Buffer = std::unique_ptr<uint8_t, Free>;

Buffer allocate(int64_t bytes) { return Buffer(static_cast<uint8_t*>(std::malloc(static_cast<size_t>(bytes)))); }

// Quantizes panels [first, last) of a matrix and packs each while it is in cache.
bool quantize_panels(const Quantize& matrix, WeightFormat format, uint8_t* packed, int64_t first, int64_t last) {
  const int64_t k = matrix.k, num_groups = k / matrix.group;
  const Buffer qvalue = allocate(kPanelRows * k), scales = allocate(kPanelRows * num_groups * 4);
  const Buffer zero_points = allocate(kPanelRows * num_groups);
  const Buffer scratch = allocate(quantize_scratch_size(k) * 4);
  const int64_t row_bytes = k * (matrix.type == FloatType::kF32 ? 4 : 2);
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t row = panel * kPanelRows, left = matrix.rows - row;
    Quantize part = matrix;
    part.weight = static_cast<const uint8_t*>(matrix.weight) + row * row_bytes;
    part.rows = left < kPanelRows ? left : kPanelRows;
    part.qvalue = qvalue.get();
    part.scales = scales.get();
    part.zero_points = zero_points.get();
    part.scratch = reinterpret_cast<float*>(scratch.get());
    if (!kernels().quantize(part)) return false;
    pack_panels({format, part.rows, part.qvalue, part.scales, format.has_zero_points ? part.zero_points : nullptr,
                 packed + panel * panel_bytes(format)},
                0, 1);
  }
  return true;
}

}  // namespace
}  // namespace jaxis

using jaxis::Calibration;
using jaxis::FloatType;

// Quantizes a matrix, or some rows of one; see Quantize. False if a weight or a scale is not finite.
extern "C" __attribute__((visibility("default"))) bool jaxis_quantize(int32_t type, int32_t calibration,
                                                                      const void* weight, int64_t rows, int64_t k,
                                                                      int64_t group, bool wide_scales, void* qvalue,
                                                                      void* scales, uint8_t* zero_points) {
  const jaxis::Buffer scratch = jaxis::allocate(jaxis::quantize_scratch_size(k) * 4);
  return jaxis::kernels().quantize({static_cast<FloatType>(type), static_cast<Calibration>(calibration), weight, rows,
                                    k, group, wide_scales, qvalue, scales, zero_points,
                                    reinterpret_cast<float*>(scratch.get())});
}

// The same, straight to panels [first, last). `group` is the packed format's: 0 for one scale a row.
extern "C" __attribute__((visibility("default"))) bool jaxis_quantize_panels(int32_t type, int32_t calibration,
                                                                             const void* weight, int64_t rows,
                                                                             int64_t k, int64_t group, uint8_t* packed,
                                                                             int64_t first, int64_t last) {
  const auto how = static_cast<Calibration>(calibration);
  const jaxis::WeightFormat format = {jaxis::is_int8(how) ? jaxis::WeightType::kInt8 : jaxis::WeightType::kInt4, k,
                                      group, how == Calibration::kInt4MinMax, false};
  const jaxis::Quantize matrix = {static_cast<FloatType>(type),
                                  how,
                                  weight,
                                  rows,
                                  k,
                                  group == 0 ? k : group,
                                  group == 0,
                                  nullptr,
                                  nullptr,
                                  nullptr,
                                  nullptr};
  return jaxis::quantize_panels(matrix, format, packed, first, last);
}
