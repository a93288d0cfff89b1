#include "ffi_common.h"

namespace jaxis {
namespace {

ffi::Error run_rms_norm(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, float epsilon,
                        ffi::ResultBuffer<ffi::F32> out) {
  const int64_t size = weight.element_count();
  const int64_t rows = size == 0 ? 0 : x.element_count() / size;
  return run_kernel(threads, [&](const Pool& pool) {
    kernels().rms_norm({x.typed_data(), weight.typed_data(), out->typed_data(), rows, size, epsilon}, pool);
  });
}

ffi::Error run_layer_norm(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight,
                          ffi::Buffer<ffi::F32> bias, float epsilon, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t size = weight.dimensions().back();
  const int64_t rows = size == 0 ? 0 : x.element_count() / size;
  const int64_t weight_rows = size == 0 ? 0 : weight.element_count() / size;
  return run_kernel(threads, [&](const Pool& pool) {
    kernels().layer_norm(
        {x.typed_data(), weight.typed_data(), bias.typed_data(), out->typed_data(), rows, size, weight_rows, epsilon},
        pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_rms_norm, run_rms_norm,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<ffi::Buffer<ffi::F32>>()
                  .Arg<ffi::Buffer<ffi::F32>>()
                  .Attr<float>("epsilon")
                  .Ret<ffi::Buffer<ffi::F32>>());

JAXIS_HANDLER(jaxis_layer_norm, run_layer_norm,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<ffi::Buffer<ffi::F32>>()
                  .Arg<ffi::Buffer<ffi::F32>>()
                  .Arg<ffi::Buffer<ffi::F32>>()
                  .Attr<float>("epsilon")
                  .Ret<ffi::Buffer<ffi::F32>>());
