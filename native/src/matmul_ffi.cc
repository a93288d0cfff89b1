#include "ffi_common.h"

namespace jaxis {
namespace {

using Bytes = ffi::Buffer<ffi::U8>;

WeightFormat format_of(int32_t type, int64_t k, int64_t group, bool has_zero_points, bool has_wide_scales) {
  return {static_cast<WeightType>(type), k, group, has_zero_points, has_wide_scales};
}

// Operands: x [rows, k], then one packed matrix for each entry of `n`. Results: one for each matrix, or one in all
// with an activation.
ffi::Error run_matmul(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results, int32_t type,
                      int64_t group, bool has_zero_points, bool has_wide_scales, bool quantize_activations,
                      int32_t activation, ffi::Span<const int64_t> n) {
  const auto x = operands.get<ffi::Buffer<ffi::F32>>(0);
  if (!x.has_value() || n.size() > kMaxMatrices || operands.size() != n.size() + 1) {
    return ffi::Error::InvalidArgument("matmul: operands do not fit its attributes");
  }
  const auto dimensions = x->dimensions();
  const int64_t k = dimensions.back();
  Matmul a{};
  a.x = x->typed_data();
  a.rows = k == 0 ? 0 : static_cast<int64_t>(x->element_count()) / k;
  a.format = format_of(type, k, group, has_zero_points, has_wide_scales);
  a.quantize_activations = quantize_activations;
  a.activation = static_cast<Activation>(activation);
  a.num_matrices = static_cast<int>(n.size());
  for (size_t i = 0; i < n.size(); ++i) {
    const auto weight = operands.get<Bytes>(i + 1);
    if (!weight.has_value()) return ffi::Error::InvalidArgument("matmul: a weight is not packed");
    if (static_cast<int64_t>(weight->element_count()) != num_panels(n[i]) * panel_bytes(a.format)) {
      return ffi::Error::InvalidArgument("matmul: a packed weight has not the size that its shape needs");
    }
    a.weight[i] = weight->typed_data();
    a.n[i] = n[i];
    if (i < results.size()) {
      auto out = results.get<ffi::Buffer<ffi::F32>>(i);
      if (!out.has_value()) return ffi::Error::InvalidArgument("matmul: a result is not float32");
      a.out[i] = (*out)->typed_data();
    }
  }
  return run_kernel(threads, [&](const Pool& pool) { kernels().matmul(a, pool); });
}

ffi::Error run_packed_rows(ffi::ThreadPool threads, ffi::Buffer<ffi::S32> ids, Bytes weight, int32_t type,
                           int64_t group, bool has_zero_points, bool has_wide_scales, int64_t n,
                           ffi::ResultBuffer<ffi::F32> out) {
  const int64_t count = ids.element_count();
  const int64_t k = out->dimensions().back();
  const WeightFormat format = format_of(type, k, group, has_zero_points, has_wide_scales);
  if (static_cast<int64_t>(weight.element_count()) != num_panels(n) * panel_bytes(format)) {
    return ffi::Error::InvalidArgument("packed_rows: the packed weight has not the size that its shape needs");
  }
  return run_kernel(threads, [&](const Pool& pool) {
    kernels().packed_rows({ids.typed_data(), count, format, weight.typed_data(), n, out->typed_data()}, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_matmul, run_matmul,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<int32_t>("type")
                  .Attr<int64_t>("group")
                  .Attr<bool>("has_zero_points")
                  .Attr<bool>("has_wide_scales")
                  .Attr<bool>("quantize_activations")
                  .Attr<int32_t>("activation")
                  .Attr<ffi::Span<const int64_t>>("n"));

JAXIS_HANDLER(jaxis_packed_rows, run_packed_rows,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<ffi::Buffer<ffi::S32>>()
                  .Arg<Bytes>()
                  .Attr<int32_t>("type")
                  .Attr<int64_t>("group")
                  .Attr<bool>("has_zero_points")
                  .Attr<bool>("has_wide_scales")
                  .Attr<int64_t>("n")
                  .Ret<ffi::Buffer<ffi::F32>>());
