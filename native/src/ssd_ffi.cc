#include "ssd.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

ffi::Error run_ssd(ffi::ThreadPool threads, F32 x, F32 dt, F32 a, F32 b, F32 c, F32 d, F32 state, I32 read, I32 write,
                   I32 keep, I32 keep_after, I32 query_start_loc, I32 num_requests, F32Result new_state, F32Result y) {
  return run_kernel("ssd", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize, kAnySize});
    Ssd s{};
    s.num_tokens = x.dimensions()[0];
    s.num_heads = x.dimensions()[1];
    s.head_dim = x.dimensions()[2];
    require_shape("dt", dt, {s.num_tokens, s.num_heads});
    require_shape("a", a, {s.num_heads});
    require_shape("b", b, {s.num_tokens, kAnySize, kAnySize});
    s.num_groups = b.dimensions()[1];
    s.state_size = b.dimensions()[2];
    require(s.num_groups > 0 && s.num_heads % s.num_groups == 0, "the groups do not divide the heads");
    require_shape("c", c, {s.num_tokens, s.num_groups, s.state_size});
    if (d.element_count() != 0) require_shape("d", d, {s.num_heads});
    require_shape("the state", state, {kAnySize, s.num_heads, s.head_dim, s.state_size});
    require_shape("y", *y, {s.num_tokens, s.num_heads, s.head_dim});
    require(new_state->untyped_data() == state.untyped_data(), "the state is updated in place only");
    s.slots = make_state_slots(read, write, keep, keep_after, query_start_loc, num_requests, state.dimensions()[0],
                               s.num_tokens);
    s.x = x.typed_data();
    s.dt = dt.typed_data();
    s.a = a.typed_data();
    s.b = b.typed_data();
    s.c = c.typed_data();
    s.d = d.element_count() == 0 ? nullptr : d.typed_data();
    s.state = state.typed_data();
    s.y = y->typed_data();
    kernels().ssd(s, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_ssd, run_ssd,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
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
                  .Ret<F32>()
                  .Ret<F32>());
