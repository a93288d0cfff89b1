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

bool is_known(FloatType type) {
  switch (type) {
    case FloatType::kF32:
    case FloatType::kBf16:
    case FloatType::kF16:
      return true;
  }
  return false;
}

bool is_known(Calibration calibration) {
  switch (calibration) {
    case Calibration::kInt8AbsMax:
    case Calibration::kInt4AbsMax:
    case Calibration::kInt4MinMax:
    case Calibration::kInt4Mse:
    case Calibration::kInt4Affine:
    case Calibration::kInt5Affine:
    case Calibration::kInt6Affine:
      return true;
  }
  return false;
}

bool is_supported(const Quantize& matrix) {
  return is_known(matrix.type) && is_known(matrix.calibration) && matrix.group > 0 && matrix.k % matrix.group == 0;
}

QuantizeStatus quantize_rows(Quantize matrix) {
  if (!is_supported(matrix)) return QuantizeStatus::kUnsupported;
  const Buffer scratch = allocate(quantize_scratch_size(matrix.k, matrix.group) * 4);
  if (scratch == nullptr) return QuantizeStatus::kOutOfMemory;
  matrix.scratch = reinterpret_cast<float*>(scratch.get());
  return kernels().quantize(matrix) ? QuantizeStatus::kOk : QuantizeStatus::kNotFinite;
}

// Quantizes panels [first, last) of a matrix and packs each while it is in cache.
QuantizeStatus quantize_panels(const Quantize& matrix, const WeightFormat& format, uint8_t* packed, int64_t first,
                               int64_t last) {
  if (!is_supported(matrix) || unsupported_reason(format) != nullptr) return QuantizeStatus::kUnsupported;
  const int64_t k = matrix.k, num_groups = k / matrix.group;
  const Buffer qvalue = allocate(kPanelRows * k), scales = allocate(kPanelRows * num_groups * 4);
  // Zero points or minima; and the units of scales and of minima.
  const Buffer origins = allocate(kPanelRows * num_groups), units = allocate(2 * kPanelRows * 4);
  const Buffer scratch = allocate(quantize_scratch_size(k, matrix.group) * 4);
  if (qvalue == nullptr || scales == nullptr || origins == nullptr || units == nullptr || scratch == nullptr) {
    return QuantizeStatus::kOutOfMemory;
  }
  const int64_t row_bytes = k * (matrix.type == FloatType::kF32 ? 4 : 2);
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t row = panel * kPanelRows, left = matrix.rows - row;
    Quantize part = matrix;
    part.weight = static_cast<const uint8_t*>(matrix.weight) + row * row_bytes;
    part.rows = left < kPanelRows ? left : kPanelRows;
    part.qvalue = qvalue.get();
    part.scales = scales.get();
    part.zero_points = origins.get();
    part.minima = reinterpret_cast<int8_t*>(origins.get());
    part.scale_units = reinterpret_cast<float*>(units.get());
    part.minimum_units = part.scale_units + kPanelRows;
    part.scratch = reinterpret_cast<float*>(scratch.get());
    if (!kernels().quantize(part)) return QuantizeStatus::kNotFinite;
    Pack pack{};
    pack.format = format;
    pack.n = part.rows;
    pack.data = part.qvalue;
    pack.scales = part.scales;
    pack.source_bits = is_affine(matrix.calibration) ? 8 : format.bits;
    pack.is_signed = format.bits == 8;
    pack.zero_points = format.has_zero_points ? part.zero_points : nullptr;
    pack.minima = format.minimum != ScaleType::kNone ? part.minima : nullptr;
    pack.super_scales = format.super_scale != ScaleType::kNone ? part.scale_units : nullptr;
    pack.super_minima = format.minimum != ScaleType::kNone ? part.minimum_units : nullptr;
    pack.packed = packed + panel * panel_bytes(format);
    pack_panels(pack, 0, 1);
  }
  return QuantizeStatus::kOk;
}

// How a quantized matrix is packed.
WeightFormat packed_format(const Quantize& matrix) {
  WeightFormat format{};
  format.k = matrix.k;
  if (matrix.wide_scales) {
    format.type = WeightType::kInt8;
    return format;
  }
  const bool affine = is_affine(matrix.calibration), is_int8 = matrix.calibration == Calibration::kInt8AbsMax;
  format.type = WeightType::kCodes;
  format.group = matrix.group;
  format.bits = code_bits(matrix.calibration);
  format.has_zero_points = matrix.calibration == Calibration::kInt4MinMax;
  format.offset = format.has_zero_points || affine ? 0 : int64_t{1} << (format.bits - 1);
  format.scale = affine || is_int8 ? ScaleType::kU8 : ScaleType::kBf16;
  format.minimum = affine ? ScaleType::kI8 : ScaleType::kNone;
  format.super_scale = affine || is_int8 ? ScaleType::kF32 : ScaleType::kNone;
  format.super_block = affine || is_int8 ? matrix.k : 0;
  return format;
}

}  // namespace
}  // namespace jaxis

// Quantizes a matrix, or some rows of one; see Quantize. Returns a QuantizeStatus.
extern "C" __attribute__((visibility("default"))) int32_t jaxis_quantize(
    int32_t type, int32_t calibration, const void* weight, int64_t rows, int64_t k, int64_t group, bool wide_scales,
    void* qvalue, void* scales, uint8_t* zero_points, float* scale_units, int8_t* minima, float* minimum_units) {
  jaxis::Quantize matrix{};
  matrix.type = static_cast<jaxis::FloatType>(type);
  matrix.calibration = static_cast<jaxis::Calibration>(calibration);
  matrix.weight = weight;
  matrix.rows = rows;
  matrix.k = k;
  matrix.group = group;
  matrix.wide_scales = wide_scales;
  matrix.qvalue = qvalue;
  matrix.scales = scales;
  matrix.zero_points = zero_points;
  matrix.scale_units = scale_units;
  matrix.minima = minima;
  matrix.minimum_units = minimum_units;
  return static_cast<int32_t>(jaxis::quantize_rows(matrix));
}

// The same, straight to panels [first, last). `group` is the packed format's: 0 for one scale a row.
extern "C" __attribute__((visibility("default"))) int32_t jaxis_quantize_panels(int32_t type, int32_t calibration,
                                                                                const void* weight, int64_t rows,
                                                                                int64_t k, int64_t group,
                                                                                uint8_t* packed, int64_t first,
                                                                                int64_t last) {
  jaxis::Quantize matrix{};
  matrix.type = static_cast<jaxis::FloatType>(type);
  matrix.calibration = static_cast<jaxis::Calibration>(calibration);
  matrix.weight = weight;
  matrix.rows = rows;
  matrix.k = k;
  matrix.group = group == 0 ? k : group;
  matrix.wide_scales = group == 0;
  return static_cast<int32_t>(jaxis::quantize_panels(matrix, jaxis::packed_format(matrix), packed, first, last));
}
