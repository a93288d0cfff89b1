// Quantizes rows of weights, as kernels/quantized_matmul/quantize.py defines it, to bit-identical values.
#pragma once

#include <cstdint>

namespace jaxis {

enum class FloatType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

enum class Calibration : int32_t { kInt8AbsMax = 0, kInt4AbsMax = 1, kInt4MinMax = 2, kInt4Mse = 3 };

// How quantizing ended.
enum class QuantizeStatus : int32_t { kOk = 0, kNotFinite = 1, kUnsupported = 2, kOutOfMemory = 3 };

struct Quantize {
  FloatType type;
  Calibration calibration;
  const void* weight;  // [rows, k]
  int64_t rows;
  int64_t k;
  int64_t group;         // columns that share a scale; divides k
  bool wide_scales;      // float32, else bfloat16
  void* qvalue;          // int8 [rows, k]; or uint8 [rows, k / 2], the earlier number in the low half
  void* scales;          // [rows, k / group]
  uint8_t* zero_points;  // [rows, k / group], of kInt4MinMax only
  float* scratch;        // [quantize_scratch_size(k)]
};

constexpr bool is_int8(Calibration calibration) { return calibration == Calibration::kInt8AbsMax; }

// Floats: a row of weights and, of the largest group, what is summed up; at most the next power of two of k.
inline int64_t quantize_scratch_size(int64_t k) { return 3 * k + 16; }

}  // namespace jaxis
