// The numbers that Python passes for types and sizes: kernels/native_constants.py has the same table, and native.py
// compares the two when it loads the library.
#include <cstdint>

#include "attention.h"
#include "causal_conv.h"
#include "gates.h"
#include "matmul.h"
#include "quantize.h"
#include "sampling.h"

namespace jaxis {
namespace {

struct Constant {
  const char* name;
  int64_t value;
};

template <typename Enum>
constexpr int64_t number(Enum value) {
  return static_cast<int64_t>(value);
}

constexpr Constant kConstants[] = {
    {"weight_type.float32", number(WeightType::kF32)},
    {"weight_type.bfloat16", number(WeightType::kBf16)},
    {"weight_type.int8", number(WeightType::kInt8)},
    {"weight_type.codes", number(WeightType::kCodes)},
    {"weight_type.float8_e4m3fn", number(WeightType::kFp8)},
    {"weight_type.float4_e2m1fn", number(WeightType::kMxfp4)},
    {"scale_type.none", number(ScaleType::kNone)},
    {"scale_type.float32", number(ScaleType::kF32)},
    {"scale_type.bfloat16", number(ScaleType::kBf16)},
    {"scale_type.float16", number(ScaleType::kF16)},
    {"scale_type.uint8", number(ScaleType::kU8)},
    {"scale_type.int8", number(ScaleType::kI8)},
    {"scale_type.float8_e4m3fn", number(ScaleType::kE4m3)},
    {"activation.none", number(Activation::kNone)},
    {"activation.silu", number(Activation::kSilu)},
    {"activation.gelu_tanh", number(Activation::kGeluTanh)},
    {"activation.clamped_swiglu", number(Activation::kClampedSwiglu)},
    {"activation.relu2", number(Activation::kReluSquared)},
    {"activation.capped_swiglu", number(Activation::kCappedSwiglu)},
    {"activation.limited_swiglu", number(Activation::kLimitedSwiglu)},
    {"activation.situ", number(Activation::kSitu)},
    {"gate.sigmoid", number(Gate::kSigmoid)},
    {"gate.silu", number(Gate::kSilu)},
    {"gate.normal_cdf", number(Gate::kNormalCdf)},
    {"gate.softplus", number(Gate::kSoftplus)},
    {"float_type.float32", number(FloatType::kF32)},
    {"float_type.bfloat16", number(FloatType::kBf16)},
    {"float_type.float16", number(FloatType::kF16)},
    {"calibration.int8_absmax", number(Calibration::kInt8AbsMax)},
    {"calibration.int4_absmax", number(Calibration::kInt4AbsMax)},
    {"calibration.int4_minmax", number(Calibration::kInt4MinMax)},
    {"calibration.int4_mse", number(Calibration::kInt4Mse)},
    {"calibration.int4_affine", number(Calibration::kInt4Affine)},
    {"calibration.int5_affine", number(Calibration::kInt5Affine)},
    {"calibration.int6_affine", number(Calibration::kInt6Affine)},
    {"quantize_status.ok", number(QuantizeStatus::kOk)},
    {"quantize_status.not_finite", number(QuantizeStatus::kNotFinite)},
    {"quantize_status.unsupported", number(QuantizeStatus::kUnsupported)},
    {"quantize_status.out_of_memory", number(QuantizeStatus::kOutOfMemory)},
    {"panel_rows", kPanelRows},
    {"max_matrices", kMaxMatrices},
    {"activation_group", kActivationGroup},
    {"code_unit", kUnit},
    {"max_code_group", kMaxGroup},
    {"max_levels", kMaxLevels},
    {"attention_tile", kAttentionTile},
    {"max_head_dim", kMaxHeadDim},
    {"max_conv_width", kMaxConvWidth},
    {"vocab_tile", kVocabTile},
    {nullptr, 0},
};

}  // namespace
}  // namespace jaxis

// The constants; the last one has no name.
extern "C" __attribute__((visibility("default"))) const void* jaxis_constants() { return jaxis::kConstants; }
