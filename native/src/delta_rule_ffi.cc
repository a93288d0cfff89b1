#include "delta_rule.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

ffi::Error run_gated_delta_rule(ffi::ThreadPool threads, F32 q, F32 k, F32 v, F32 log_decay, F32 beta, F32 state,
                                I32 read, I32 write, I32 keep, I32 keep_after, I32 query_start_loc, I32 num_requests,
                                bool has_norm, float epsilon, float scale, F32Result new_state, F32Result out) {
  return run_kernel("gated_delta_rule", threads, [&](const Pool& pool) {
    require_shape("k", k, {kAnySize, kAnySize, kAnySize});
    require_shape("v", v, {k.dimensions()[0], kAnySize, kAnySize});
    GatedDeltaRule a{};
    a.num_tokens = k.dimensions()[0];
    a.num_key_heads = k.dimensions()[1];
    a.key_dim = k.dimensions()[2];
    a.num_heads = v.dimensions()[1];
    a.value_dim = v.dimensions()[2];
    require(a.num_key_heads > 0 && a.num_heads % a.num_key_heads == 0, "the key heads do not divide the value heads");
    require_shape("q", q, {a.num_tokens, a.num_key_heads, a.key_dim});
    require_shape("log_decay", log_decay, {a.num_tokens, a.num_heads, kAnySize});
    a.num_decays = log_decay.dimensions()[2];
    require(a.num_decays == 1 || a.num_decays == a.key_dim, "there is one decay a head, or one for each key dimension");
    require_shape("beta", beta, {a.num_tokens, a.num_heads});
    require_shape("the state", state, {kAnySize, a.num_heads, a.key_dim, a.value_dim});
    require_shape("out", *out, {a.num_tokens, a.num_heads, a.value_dim});
    require(new_state->untyped_data() == state.untyped_data(), "the state is updated in place only");
    a.slots = make_state_slots(read, write, keep, keep_after, query_start_loc, num_requests, state.dimensions()[0],
                               a.num_tokens);
    a.q = q.typed_data();
    a.k = k.typed_data();
    a.v = v.typed_data();
    a.log_decay = log_decay.typed_data();
    a.beta = beta.typed_data();
    a.state = state.typed_data();
    a.out = out->typed_data();
    a.has_norm = has_norm;
    a.epsilon = epsilon;
    a.scale = scale;
    kernels().gated_delta_rule(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_gated_delta_rule, run_gated_delta_rule,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Attr<bool>("has_norm")
                  .Attr<float>("epsilon")
                  .Attr<float>("scale")
                  .Ret<F32>()
                  .Ret<F32>());
