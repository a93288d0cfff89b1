#include <cstdint>

#include "ffi_common.h"
#include "latent_attention.h"

namespace jaxis {
namespace {

// `selected` is null where every token sees all before it.
ffi::Error run(const char* name, ffi::ThreadPool threads, F32 q, F32 entries, ffi::AnyBuffer cache, I32 seq_lens,
               I32 block_tables, I32 query_start_loc, I32 request_distribution, F32 sinks, const I32* selected,
               int64_t block_size, float scale, ffi::Result<ffi::AnyBuffer> new_cache, F32Result out) {
  return run_kernel(name, threads, [&](const Pool& pool) {
    require_shape("q", q, {kAnySize, kAnySize, kAnySize});
    const int64_t num_tokens = q.dimensions()[0], num_heads = q.dimensions()[1], head_dim = q.dimensions()[2];
    require_shape("entries", entries, {num_tokens, head_dim});
    require_shape("out", *out, {num_tokens, num_heads, kAnySize});
    const int64_t value_dim = out->dimensions()[2];
    require(head_dim % kAttentionTile == 0 && value_dim % kAttentionTile == 0,
            "entries and values are not multiples of 16 long");
    require(value_dim <= head_dim, "values are longer than entries");
    require(block_size > 0, "block_size is not positive");
    const CacheType type = make_cache_type(cache);
    // An int8 entry has two float32 scales.
    const int64_t scales = type == CacheType::kInt8 ? 2 * static_cast<int64_t>(sizeof(float)) : 0;
    require_shape("the cache", cache, {kAnySize, 1, block_size * (head_dim + scales)});
    require(new_cache->untyped_data() == cache.untyped_data(), "the cache is updated in place only");

    LatentAttention a{};
    set_paged_requests(a, seq_lens, block_tables, query_start_loc, request_distribution);
    a.q = q.typed_data();
    a.entries = entries.typed_data();
    a.cache = cache.untyped_data();
    if (sinks.element_count() != 0) require_shape("sinks", sinks, {num_heads});
    a.sinks = sinks.element_count() == 0 ? nullptr : sinks.typed_data();
    a.out = out->typed_data();
    a.type = type;
    a.num_tokens = num_tokens;
    a.num_heads = num_heads;
    a.head_dim = head_dim;
    a.value_dim = value_dim;
    a.block_size = block_size;
    a.scale = scale;
    if (selected != nullptr) {
      require_shape("selected", *selected, {num_tokens, kAnySize});
      a.selected = selected->typed_data();
      a.num_selected = selected->dimensions()[1];
      require(a.num_selected > 0, "no tokens are selected");
    }
    kernels().latent_attention(a, pool);
  });
}

ffi::Error run_latent_attention(ffi::ThreadPool threads, F32 q, F32 entries, ffi::AnyBuffer cache, I32 seq_lens,
                                I32 block_tables, I32 query_start_loc, I32 request_distribution, F32 sinks,
                                int64_t block_size, float scale, ffi::Result<ffi::AnyBuffer> new_cache, F32Result out) {
  return run("latent_attention", threads, q, entries, cache, seq_lens, block_tables, query_start_loc,
             request_distribution, sinks, nullptr, block_size, scale, new_cache, out);
}

ffi::Error run_selected_latent_attention(ffi::ThreadPool threads, F32 q, F32 entries, ffi::AnyBuffer cache,
                                         I32 seq_lens, I32 block_tables, I32 query_start_loc, I32 request_distribution,
                                         F32 sinks, I32 selected, int64_t block_size, float scale,
                                         ffi::Result<ffi::AnyBuffer> new_cache, F32Result out) {
  return run("selected_latent_attention", threads, q, entries, cache, seq_lens, block_tables, query_start_loc,
             request_distribution, sinks, &selected, block_size, scale, new_cache, out);
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_latent_attention, run_latent_attention,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<F32>()
                  .Attr<int64_t>("block_size")
                  .Attr<float>("scale")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<F32>());

JAXIS_HANDLER(jaxis_selected_latent_attention, run_selected_latent_attention,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<F32>()
                  .Arg<I32>()
                  .Attr<int64_t>("block_size")
                  .Attr<float>("scale")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<F32>());
