#include "ffi_common.h"

namespace jaxis {
namespace {

using Floats = ffi::Buffer<ffi::F32>;

ffi::Error run_head_matmul(ffi::ThreadPool threads, Floats x, ffi::Buffer<ffi::U8> weight, int32_t type,
                           ffi::ResultBuffer<ffi::F32> out) {
  if (x.dimensions().size() != 3 || out->dimensions().size() != 3) {
    return ffi::Error::InvalidArgument("head_matmul: operands do not fit each other");
  }
  const WeightFormat format{static_cast<WeightType>(type), x.dimensions()[2], 0, false, false};
  HeadMatmul a{};
  a.x = x.typed_data();
  a.tokens = x.dimensions()[0];
  a.heads = x.dimensions()[1];
  a.weight = {weight.typed_data(), nullptr, format, out->dimensions()[2]};
  a.out = out->typed_data();
  if (static_cast<int64_t>(weight.element_count()) != a.heads * num_panels(a.weight.n) * panel_bytes(format)) {
    return ffi::Error::InvalidArgument("head_matmul: a packed weight has not the size that its shape needs");
  }
  return run_kernel(threads, [&](const Pool& pool) { kernels().head_matmul(a, pool); });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_head_matmul, run_head_matmul,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<Floats>()
                  .Arg<ffi::Buffer<ffi::U8>>()
                  .Attr<int32_t>("type")
                  .Ret<Floats>());
