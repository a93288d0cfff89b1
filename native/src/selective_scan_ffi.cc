#include "selective_scan.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

ffi::Error run_selective_scan(ffi::ThreadPool threads, F32 x, F32 dt, F32 a, F32 b, F32 c, F32 d, F32 state, I32 read,
                              I32 write, I32 keep, I32 keep_after, I32 query_start_loc, I32 num_requests,
                              F32Result new_state, F32Result y) {
  return run_kernel("selective_scan", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize});
    SelectiveScan s{};
    s.num_tokens = x.dimensions()[0];
    s.num_channels = x.dimensions()[1];
    require_shape("dt", dt, {s.num_tokens, s.num_channels});
    require_shape("a", a, {s.num_channels, kAnySize});
    s.state_size = a.dimensions()[1];
    require_shape("b", b, {s.num_tokens, s.state_size});
    require_shape("c", c, {s.num_tokens, s.state_size});
    require_shape("d", d, {s.num_channels});
    require_shape("the state", state, {kAnySize, s.state_size, s.num_channels});
    require_shape("y", *y, {s.num_tokens, s.num_channels});
    require(new_state->untyped_data() == state.untyped_data(), "the state is updated in place only");
    s.slots = make_state_slots(read, write, keep, keep_after, query_start_loc, num_requests, state.dimensions()[0],
                               s.num_tokens);
    s.x = x.typed_data();
    s.dt = dt.typed_data();
    s.a = a.typed_data();
    s.b = b.typed_data();
    s.c = c.typed_data();
    s.d = d.typed_data();
    s.state = state.typed_data();
    s.y = y->typed_data();
    kernels().selective_scan(s, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_selective_scan, run_selective_scan,
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
