#include "ffi_common.h"

namespace jaxis {
namespace {

ffi::Error run_rms_norm(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, float epsilon,
                        ffi::ResultBuffer<ffi::F32> out) {
  const int64_t size = weight.element_count();
  const int64_t rows = size == 0 ? 0 : x.element_count() / size;
  return guarded(threads, [&](const Pool& pool) {
    kernels().rms_norm({x.typed_data(), weight.typed_data(), out->typed_data(), rows, size, epsilon}, pool);
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
