#include "gates.h"

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ffi_common.h"

namespace jaxis {
namespace {

Gate make_gate(int32_t number) {
  const auto gate = static_cast<Gate>(number);
  switch (gate) {
    case Gate::kSigmoid:
    case Gate::kSilu:
    case Gate::kSoftplus:
    case Gate::kNormalCdf:
      return gate;
  }
  throw std::invalid_argument("unknown gate " + std::to_string(number));
}

ffi::Error run_softplus(ffi::ThreadPool threads, F32 x, F32 bias, F32Result out) {
  return run_kernel("softplus", threads, [&](const Pool& pool) {
    require_shape("bias", bias, {kAnySize});
    const int64_t size = bias.dimensions()[0];
    require_shape("x", x, {kAnySize, size});
    const int64_t rows = x.dimensions()[0];
    require_shape("the output", *out, {rows, size});
    kernels().softplus({x.typed_data(), bias.typed_data(), out->typed_data(), rows, size}, pool);
  });
}

ffi::Error run_softmax(ffi::ThreadPool threads, F32 x, F32Result out) {
  return run_kernel("softmax", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize});
    const int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
    require(size > 0, "x has no columns");
    require_shape("the output", *out, {rows, size});
    kernels().softmax({x.typed_data(), out->typed_data(), rows, size}, pool);
  });
}

ffi::Error run_gated(ffi::ThreadPool threads, F32 x, F32 logits, int32_t gate, F32Result out) {
  return run_kernel("gated", threads, [&](const Pool& pool) {
    require_shape("the logits", logits, {kAnySize, kAnySize});
    const int64_t rows = logits.dimensions()[0], size = logits.dimensions()[1];
    require_shape("x", x, {rows, kAnySize});
    require(size > 0 && x.dimensions()[1] % size == 0, "the logits do not divide x's rows");
    require_shape("the output", *out, {rows, x.dimensions()[1]});
    kernels().gated(
        {x.typed_data(), logits.typed_data(), out->typed_data(), rows, size, x.dimensions()[1] / size, make_gate(gate)},
        pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_softplus, run_softplus, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>());

JAXIS_HANDLER(jaxis_softmax, run_softmax, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<F32>());

JAXIS_HANDLER(jaxis_gated, run_gated,
              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Attr<int32_t>("gate").Ret<F32>());
