#include "causal_conv.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

FloatType make_float_type(const ffi::AnyBuffer& x) {
  switch (x.element_type()) {
    case ffi::F32:
      return FloatType::kF32;
    case ffi::BF16:
      return FloatType::kBf16;
    case ffi::F16:
      return FloatType::kF16;
    default:
      break;
  }
  std::ostringstream text;
  text << "x has dtype " << x.element_type() << ", expected F32, BF16 or F16";
  throw std::invalid_argument(text.str());
}

ffi::Error run_causal_conv(ffi::ThreadPool threads, ffi::AnyBuffer x, F32 weight, F32 bias, ffi::AnyBuffer state,
                           I32 read, I32 write, I32 keep, I32 keep_after, I32 query_start_loc, I32 num_requests,
                           int32_t activation, ffi::Result<ffi::AnyBuffer> new_state, F32Result y) {
  return run_kernel("causal_conv", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize});
    CausalConv a{};
    a.type = make_float_type(x);
    a.num_tokens = x.dimensions()[0];
    a.num_channels = x.dimensions()[1];
    require_shape("weight", weight, {a.num_channels, kAnySize});
    a.width = weight.dimensions()[1];
    require(a.width >= 2 && a.width <= kMaxConvWidth, "the weight has not 2 to 8 taps");
    if (bias.element_count() != 0) require_shape("bias", bias, {a.num_channels});
    require_shape("the state", state, {kAnySize, a.width - 1, a.num_channels});
    require(state.element_type() == x.element_type(), "the state is not of x's type");
    require_shape("y", *y, {a.num_tokens, a.num_channels});
    require(new_state->untyped_data() == state.untyped_data(), "the state is updated in place only");
    a.slots = make_state_slots(read, write, keep, keep_after, query_start_loc, num_requests, state.dimensions()[0],
                               a.num_tokens);
    a.activation = make_activation(activation);
    require(a.activation == Activation::kNone || a.activation == Activation::kSilu,
            "the activation is neither none nor silu");
    a.x = x.untyped_data();
    a.weight = weight.typed_data();
    a.bias = bias.element_count() == 0 ? nullptr : bias.typed_data();
    a.state = state.untyped_data();
    a.y = y->typed_data();
    kernels().causal_conv(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_causal_conv, run_causal_conv,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Attr<int32_t>("activation")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<F32>());
