#include "norm.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

// How many rows of `size` elements x has; the output has as many.
int64_t count_rows(const F32& x, F32Result& out, int64_t size) {
  require(out->element_count() == x.element_count(), "the output has not x's size");
  if (size == 0) return 0;
  require(last_dimension("x", x) == size, "the weight has not the size of x's rows");
  return static_cast<int64_t>(x.element_count()) / size;
}

ffi::Error run_rms_norm(ffi::ThreadPool threads, F32 x, F32 weight, float epsilon, F32Result out) {
  return run_kernel("rms_norm", threads, [&](const Pool& pool) {
    require_shape("weight", weight, {kAnySize});
    RmsNorm a{};
    a.x = x.typed_data();
    a.weight = weight.typed_data();
    a.out = out->typed_data();
    a.size = weight.dimensions()[0];
    a.rows = count_rows(x, out, a.size);
    a.epsilon = epsilon;
    kernels().rms_norm(a, pool);
  });
}

// Weights and biases of one row [size], or of several [..., size], which the rows of x take in turn.
ffi::Error run_layer_norm(ffi::ThreadPool threads, F32 x, F32 weight, F32 bias, float epsilon, F32Result out) {
  return run_kernel("layer_norm", threads, [&](const Pool& pool) {
    require(bias.element_count() == weight.element_count(), "the bias has not the weight's size");
    LayerNorm a{};
    a.x = x.typed_data();
    a.weight = weight.typed_data();
    a.bias = bias.typed_data();
    a.out = out->typed_data();
    a.size = last_dimension("weight", weight);
    a.rows = count_rows(x, out, a.size);
    a.weight_rows = a.size == 0 ? 0 : static_cast<int64_t>(weight.element_count()) / a.size;
    a.epsilon = epsilon;
    kernels().layer_norm(a, pool);
  });
}

ffi::Error run_row_moments(ffi::ThreadPool threads, F32 x, F32Result mean, F32Result variance) {
  return run_kernel("row_moments", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize});
    RowMoments a{};
    a.rows = x.dimensions()[0];
    a.size = x.dimensions()[1];
    require(a.size > 0, "rows without elements have no mean");
    require_shape("mean", *mean, {a.rows});
    require_shape("variance", *variance, {a.rows});
    a.x = x.typed_data();
    a.mean = mean->typed_data();
    a.variance = variance->typed_data();
    kernels().row_moments(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_rms_norm, run_rms_norm,
              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Attr<float>("epsilon").Ret<F32>());

JAXIS_HANDLER(
    jaxis_layer_norm, run_layer_norm,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<F32>().Attr<float>("epsilon").Ret<F32>());

JAXIS_HANDLER(jaxis_row_moments, run_row_moments,
              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<F32>().Ret<F32>());
