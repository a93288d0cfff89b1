// Quantizes rows of weights, as kernels/weights/quantize.py defines it, to bit-identical values.
#pragma once

#include <cstdint>

namespace jaxis {

enum class FloatType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

enum class Calibration : int32_t {
  kInt8AbsMax = 0,
  kInt4AbsMax = 1,
  kInt4MinMax = 2,
  kInt4Mse = 3,
  kInt4Affine = 4,
  kInt5Affine = 5,
  kInt6Affine = 6,
};

// How quantizing ended.
enum class QuantizeStatus : int32_t { kOk = 0, kNotFinite = 1, kUnsupported = 2, kOutOfMemory = 3 };

struct Quantize {
  FloatType type;
  Calibration calibration;
  const void* weight;  // [rows, k]
  int64_t rows;
  int64_t k;
  int64_t group;     // columns that share a scale; divides k
  bool wide_scales;  // float32, else bfloat16, or codes where there are units
  void* qvalue;      // int8 [rows, k]; of affine ones uint8 [rows, k]; of other int4 uint8 [rows, k / 2], the earlier
                     // number in the low half
  void* scales;      // [rows, k / group]
  uint8_t* zero_points;  // [rows, k / group], of kInt4MinMax only
  // Of kInt8AbsMax in groups and of affine ones only: scales are uint8, which these powers of two multiply, float32
  // [rows].
  float* scale_units;
  int8_t* minima;  // [rows, k / group], of affine ones only, and their powers of two
  float* minimum_units;
  float* scratch;  // [quantize_scratch_size(k, group)]
};

constexpr bool is_affine(Calibration calibration) {
  return calibration == Calibration::kInt4Affine || calibration == Calibration::kInt5Affine ||
         calibration == Calibration::kInt6Affine;
}

constexpr int64_t code_bits(Calibration calibration) {
  switch (calibration) {
    case Calibration::kInt8AbsMax:
      return 8;
    case Calibration::kInt5Affine:
      return 5;
    case Calibration::kInt6Affine:
      return 6;
    default:
      return 4;
  }
}

// Floats. A row of weights and, of the largest group, what is summed up: at most the next power of two of k. Of affine
// ones: a row twice, in blocks of sixteen groups the second time, and a scale and a minimum for each group of these.
inline int64_t quantize_scratch_size(int64_t k, int64_t group) {
  const int64_t groups = k / group + 16;
  const int64_t affine = k + groups * (group + 2), other = 3 * k + 16;
  return affine > other ? affine : other;
}

}  // namespace jaxis
