#include <cstdint>

#include "ffi_common.h"
#include "head_matmul.h"

namespace jaxis {
namespace {

ffi::Error run_head_matmul(ffi::ThreadPool threads, F32 x, U8 weight, bool quantize_activations,
                           ffi::Span<const int64_t> format, F32Result out) {
  return run_kernel("head_matmul", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize, kAnySize});
    const int64_t tokens = x.dimensions()[0], heads = x.dimensions()[1], k = x.dimensions()[2];
    require_shape("out", *out, {tokens, heads, kAnySize});
    HeadMatmul a{};
    a.x = x.typed_data();
    a.tokens = tokens;
    a.heads = heads;
    a.weight.data = weight.typed_data();
    a.weight.format = make_weight_format(format, k);
    a.weight.n = out->dimensions()[2];
    a.quantize_activations = quantize_activations;
    if (quantize_activations) require_quantizable_activations(a.weight.format);
    a.out = out->typed_data();
    require_packed("weight", weight, heads, a.weight.n, a.weight.format);
    kernels().head_matmul(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_head_matmul, run_head_matmul,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<U8>()
                  .Attr<bool>("quantize_activations")
                  .Attr<ffi::Span<const int64_t>>("format")
                  .Ret<F32>());
