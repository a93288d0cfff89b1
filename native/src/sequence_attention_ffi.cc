#include "sequence_attention.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

SequenceAttention make_arguments(const F32& q, const F32& k, const F32& v, const I32& first, const I32& last,
                                 float scale) {
  require_shape("q", q, {kAnySize, kAnySize, kAnySize});
  SequenceAttention a{};
  a.num_heads = q.dimensions()[0];
  a.num_queries = q.dimensions()[1];
  a.head_dim = q.dimensions()[2];
  require_shape("k", k, {kAnySize, kAnySize, a.head_dim});
  a.num_kv_heads = k.dimensions()[0];
  a.num_tokens = k.dimensions()[1];
  require_shape("v", v, {a.num_kv_heads, a.num_tokens, a.head_dim});
  require_shape("first", first, {a.num_queries});
  require_shape("last", last, {a.num_queries});
  require(a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "the key-value heads do not divide the query heads");
  require(a.head_dim % kAttentionTile == 0 && a.head_dim <= kMaxHeadDim, "head_dim is not a multiple of 16 up to 512");
  for (int64_t t = 0; t < a.num_queries; ++t) {
    const int32_t from = first.typed_data()[t], to = last.typed_data()[t];
    require(0 <= from && from <= to && to < a.num_tokens, "a token sees none, or tokens that are not there");
  }
  a.q = q.typed_data();
  a.k = k.typed_data();
  a.v = v.typed_data();
  a.first = first.typed_data();
  a.last = last.typed_data();
  a.scale = scale;
  return a;
}

ffi::Error run_sequence_attention(ffi::ThreadPool threads, F32 q, F32 k, F32 v, I32 first, I32 last, float scale,
                                  F32Result out, F32Result log_sums) {
  return run_kernel("sequence_attention", threads, [&](const Pool& pool) {
    SequenceAttention a = make_arguments(q, k, v, first, last, scale);
    require_shape("out", *out, {a.num_heads, a.num_queries, a.head_dim});
    require_shape("log_sums", *log_sums, {a.num_heads, a.num_queries});
    a.out = out->typed_data();
    a.log_sums = log_sums->typed_data();
    kernels().sequence_attention(a, pool);
  });
}

ffi::Error run_sequence_attention_gradient(ffi::ThreadPool threads, F32 q, F32 k, F32 v, I32 first, I32 last, F32 out,
                                           F32 log_sums, F32 out_gradient, float scale, F32Result q_gradient,
                                           F32Result k_gradient, F32Result v_gradient) {
  return run_kernel("sequence_attention_gradient", threads, [&](const Pool& pool) {
    SequenceAttentionGradient g{};
    g.forward = make_arguments(q, k, v, first, last, scale);
    const SequenceAttention& a = g.forward;
    require_shape("out", out, {a.num_heads, a.num_queries, a.head_dim});
    require_shape("log_sums", log_sums, {a.num_heads, a.num_queries});
    require_shape("out_gradient", out_gradient, {a.num_heads, a.num_queries, a.head_dim});
    require_shape("q_gradient", *q_gradient, {a.num_heads, a.num_queries, a.head_dim});
    require_shape("k_gradient", *k_gradient, {a.num_kv_heads, a.num_tokens, a.head_dim});
    require_shape("v_gradient", *v_gradient, {a.num_kv_heads, a.num_tokens, a.head_dim});
    g.forward.out = out.typed_data();
    g.forward.log_sums = log_sums.typed_data();
    g.out_gradient = out_gradient.typed_data();
    g.q_gradient = q_gradient->typed_data();
    g.k_gradient = k_gradient->typed_data();
    g.v_gradient = v_gradient->typed_data();
    kernels().sequence_attention_gradient(g, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_sequence_attention, run_sequence_attention,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Attr<float>("scale")
                  .Ret<F32>()
                  .Ret<F32>());

JAXIS_HANDLER(jaxis_sequence_attention_gradient, run_sequence_attention_gradient,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Attr<float>("scale")
                  .Ret<F32>()
                  .Ret<F32>()
                  .Ret<F32>());
