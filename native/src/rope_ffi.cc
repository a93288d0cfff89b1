#include "ffi_common.h"

namespace jaxis {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

RotaryEmbedding arguments(const F32& q, const F32& k, const F32& cos, const F32& sin, bool interleaved,
                          F32Result& q_out, F32Result& k_out) {
  const auto shape = q.dimensions();
  return {q.typed_data(),
          k.typed_data(),
          cos.typed_data(),
          sin.typed_data(),
          nullptr,
          nullptr,
          q_out->typed_data(),
          k_out->typed_data(),
          shape[0],
          shape[1],
          k.dimensions()[1],
          shape[2],
          cos.dimensions()[1],
          interleaved,
          0.0f};
}

ffi::Error run_rotary_embedding(ffi::ThreadPool threads, F32 q, F32 k, F32 cos, F32 sin, bool interleaved,
                                F32Result q_out, F32Result k_out) {
  const RotaryEmbedding a = arguments(q, k, cos, sin, interleaved, q_out, k_out);
  return run_kernel(threads, [&](const Pool& pool) { kernels().rotary_embedding(a, pool); });
}

ffi::Error run_norm_rotary_embedding(ffi::ThreadPool threads, F32 q, F32 k, F32 cos, F32 sin, F32 q_norm, F32 k_norm,
                                     bool interleaved, float epsilon, F32Result q_out, F32Result k_out) {
  RotaryEmbedding a = arguments(q, k, cos, sin, interleaved, q_out, k_out);
  a.q_norm = q_norm.typed_data();
  a.k_norm = k_norm.typed_data();
  a.epsilon = epsilon;
  return run_kernel(threads, [&](const Pool& pool) { kernels().rotary_embedding(a, pool); });
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
