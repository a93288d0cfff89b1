#include <cstdint>

#include "ffi_common.h"
#include "rope.h"

namespace jaxis {
namespace {

RotaryEmbedding make_arguments(const F32& q, const F32& k, const F32& cos, const F32& sin, bool interleaved,
                               F32Result& q_out, F32Result& k_out) {
  require_shape("q", q, {kAnySize, kAnySize, kAnySize});
  const int64_t tokens = q.dimensions()[0], head_dim = q.dimensions()[2];
  require_shape("k", k, {tokens, kAnySize, head_dim});
  require_shape("cos", cos, {tokens, kAnySize});
  const int64_t pairs = cos.dimensions()[1];
  require_shape("sin", sin, {tokens, pairs});
  require(2 * pairs <= head_dim, "there are more angles than pairs of dimensions");
  RotaryEmbedding a{};
  a.q = q.typed_data();
  a.k = k.typed_data();
  a.cos = cos.typed_data();
  a.sin = sin.typed_data();
  a.q_out = q_out->typed_data();
  a.k_out = k_out->typed_data();
  a.tokens = tokens;
  a.q_heads = q.dimensions()[1];
  a.k_heads = k.dimensions()[1];
  a.head_dim = head_dim;
  a.pairs = pairs;
  a.interleaved = interleaved;
  require_shape("q's output", *q_out, {tokens, a.q_heads, head_dim});
  require_shape("k's output", *k_out, {tokens, a.k_heads, head_dim});
  return a;
}

ffi::Error run_rotary_embedding(ffi::ThreadPool threads, F32 q, F32 k, F32 cos, F32 sin, bool interleaved,
                                F32Result q_out, F32Result k_out) {
  return run_kernel("rotary_embedding", threads, [&](const Pool& pool) {
    kernels().rotary_embedding(make_arguments(q, k, cos, sin, interleaved, q_out, k_out), pool);
  });
}

ffi::Error run_norm_rotary_embedding(ffi::ThreadPool threads, F32 q, F32 k, F32 cos, F32 sin, F32 q_norm, F32 k_norm,
                                     bool interleaved, float epsilon, F32Result q_out, F32Result k_out) {
  return run_kernel("norm_rotary_embedding", threads, [&](const Pool& pool) {
    RotaryEmbedding a = make_arguments(q, k, cos, sin, interleaved, q_out, k_out);
    require_shape("q_norm", q_norm, {a.head_dim});
    require_shape("k_norm", k_norm, {a.head_dim});
    a.q_norm = q_norm.typed_data();
    a.k_norm = k_norm.typed_data();
    a.epsilon = epsilon;
    kernels().rotary_embedding(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_rotary_embedding, run_rotary_embedding,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Attr<bool>("interleaved")
                  .Ret<F32>()
                  .Ret<F32>());

JAXIS_HANDLER(jaxis_norm_rotary_embedding, run_norm_rotary_embedding,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Attr<bool>("interleaved")
                  .Attr<float>("epsilon")
                  .Ret<F32>()
                  .Ret<F32>());
