#include "attention.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

ffi::Error run_paged_attention(ffi::ThreadPool threads, F32 q, F32 k, F32 v, ffi::AnyBuffer cache, I32 seq_lens,
                               I32 block_tables, I32 query_start_loc, I32 request_distribution, F32 sinks, F32 bias,
                               int64_t block_size, int64_t window, int64_t chunk_size, int64_t lookahead, float scale,
                               float soft_cap, ffi::Result<ffi::AnyBuffer> new_cache, F32Result out) {
  return run_kernel("paged_attention", threads, [&](const Pool& pool) {
    require_shape("q", q, {kAnySize, kAnySize, kAnySize});
    const int64_t num_tokens = q.dimensions()[0], num_heads = q.dimensions()[1], head_dim = q.dimensions()[2];
    // Without rows of keys there is nothing to write: the step's are in the cache.
    const int64_t num_new = k.dimensions().size() == 3 && k.dimensions()[0] == 0 ? 0 : num_tokens;
    require_shape("k", k, {num_new, kAnySize, head_dim});
    const int64_t num_kv_heads = k.dimensions()[1];
    require_shape("v", v, {num_new, num_kv_heads, head_dim});
    require_shape("out", *out, {num_tokens, num_heads, head_dim});
    const bool has_sinks = sinks.element_count() != 0, has_bias = bias.element_count() != 0;
    const bool sinks_of_tokens = sinks.dimensions().size() == 2;
    if (has_sinks && sinks_of_tokens) require_shape("sinks", sinks, {num_tokens, num_heads});
    if (has_sinks && !sinks_of_tokens) require_shape("sinks", sinks, {num_heads});
    if (has_bias) require_shape("bias", bias, {num_tokens, num_heads, kAnySize});
    require(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "the key-value heads do not divide the query heads");
    require(head_dim % kAttentionTile == 0 && head_dim <= kMaxHeadDim, "head_dim is not a multiple of 16 up to 512");
    require(block_size > 0 && block_size % kAttentionTile == 0, "block_size is not a multiple of 16");
    require(window > 0 && chunk_size > 0, "window and chunk_size are not positive");
    require(lookahead >= 0, "lookahead is negative");
    const CacheType type = make_cache_type(cache);
    // An int8 token has a float32 scale for its key and one for its value.
    const int64_t scales = type == CacheType::kInt8 ? 2 * block_size * static_cast<int64_t>(sizeof(float)) : 0;
    require_shape("the cache", cache, {kAnySize, num_kv_heads, 2 * block_size * head_dim + scales});
    require(new_cache->untyped_data() == cache.untyped_data(), "the cache is updated in place only");

    PagedAttention a{};
    set_paged_requests(a, seq_lens, block_tables, query_start_loc, request_distribution);
    a.q = q.typed_data();
    a.k = num_new == 0 ? nullptr : k.typed_data();
    a.v = num_new == 0 ? nullptr : v.typed_data();
    a.cache = cache.untyped_data();
    a.sinks = has_sinks ? sinks.typed_data() : nullptr;
    a.sinks_stride = sinks_of_tokens ? num_heads : 0;
    a.bias = has_bias ? bias.typed_data() : nullptr;
    a.bias_extent = has_bias ? bias.dimensions()[2] : 0;
    a.out = out->typed_data();
    a.type = type;
    a.num_tokens = num_tokens;
    a.num_heads = num_heads;
    a.num_kv_heads = num_kv_heads;
    a.head_dim = head_dim;
    a.block_size = block_size;
    a.window = window;
    a.chunk_size = chunk_size;
    a.lookahead = lookahead;
    a.scale = scale;
    a.soft_cap = soft_cap;
    kernels().paged_attention(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_paged_attention, run_paged_attention,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Attr<int64_t>("block_size")
                  .Attr<int64_t>("window")
                  .Attr<int64_t>("chunk_size")
                  .Attr<int64_t>("lookahead")
                  .Attr<float>("scale")
                  .Attr<float>("soft_cap")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<F32>());
