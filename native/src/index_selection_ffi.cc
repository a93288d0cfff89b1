#include "index_selection.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

// `keys` is null where groups of tokens share the keys that the cache has, and `weights` where heads select blocks.
IndexSelection make_arguments(F32 q, const F32* weights, const F32* keys, ffi::AnyBuffer cache, I32 seq_lens,
                              I32 block_tables, I32 query_start_loc, I32 request_distribution, I32Result selected) {
  require_shape("q", q, {kAnySize, kAnySize, kAnySize});
  const int64_t num_tokens = q.dimensions()[0], num_heads = q.dimensions()[1], head_dim = q.dimensions()[2];
  require(head_dim > 0 && head_dim % kAttentionTile == 0, "keys are not a multiple of 16 long");
  const CacheType type = make_cache_type(cache);
  const int64_t scale = type == CacheType::kInt8 ? static_cast<int64_t>(sizeof(float)) : 0;
  require_shape("the cache", cache, {kAnySize, kAnySize, head_dim + scale});
  require(cache.dimensions()[1] > 0, "blocks of the cache have no tokens");

  IndexSelection a{};
  if (weights != nullptr) {
    require_shape("weights", *weights, {num_tokens, num_heads});
    require_shape("selected", *selected, {num_tokens, kAnySize});
    a.weights = weights->typed_data();
  } else {
    require_shape("selected", *selected, {num_tokens, num_heads, kAnySize});
  }
  a.num_selected = selected->dimensions().back();
  require(a.num_selected > 0, "no tokens are to be selected");
  if (keys != nullptr) {
    require_shape("keys", *keys, {num_tokens, head_dim});
    a.keys = keys->typed_data();
  }
  set_paged_requests(a, seq_lens, block_tables, query_start_loc, request_distribution);
  a.q = q.typed_data();
  a.cache = cache.untyped_data();
  a.selected = selected->typed_data();
  a.type = type;
  a.num_tokens = num_tokens;
  a.num_heads = num_heads;
  a.head_dim = head_dim;
  a.block_size = cache.dimensions()[1];
  return a;
}

ffi::Error run_index_selection(ffi::ThreadPool threads, F32 q, F32 weights, F32 keys, ffi::AnyBuffer cache,
                               I32 seq_lens, I32 block_tables, I32 query_start_loc, I32 request_distribution,
                               int64_t num_first, int64_t num_last, ffi::Result<ffi::AnyBuffer> new_cache,
                               I32Result selected) {
  return run_kernel("index_selection", threads, [&](const Pool& pool) {
    IndexSelection a = make_arguments(q, &weights, &keys, cache, seq_lens, block_tables, query_start_loc,
                                      request_distribution, selected);
    require(num_first >= 0 && num_last >= 0 && num_first + num_last <= a.num_selected,
            "more tokens are always selected than are selected");
    a.num_first = num_first;
    a.num_last = num_last;
    require(new_cache->untyped_data() == cache.untyped_data(), "the cache is updated in place only");
    kernels().index_selection(a, pool);
  });
}

ffi::Error run_group_selection(ffi::ThreadPool threads, F32 q, F32 weights, ffi::AnyBuffer cache, I32 seq_lens,
                               I32 block_tables, I32 query_start_loc, I32 request_distribution, int64_t group_size,
                               int64_t delay, I32Result selected) {
  return run_kernel("group_selection", threads, [&](const Pool& pool) {
    IndexSelection a = make_arguments(q, &weights, nullptr, cache, seq_lens, block_tables, query_start_loc,
                                      request_distribution, selected);
    require(group_size > 0 && delay >= 0 && delay <= 1, "a group has no tokens, or is seen too late");
    a.group_size = group_size;
    a.delay = delay;
    kernels().index_selection(a, pool);
  });
}

ffi::Error run_block_selection(ffi::ThreadPool threads, F32 q, F32 keys, ffi::AnyBuffer cache, I32 seq_lens,
                               I32 block_tables, I32 query_start_loc, I32 request_distribution, int64_t group_size,
                               ffi::Result<ffi::AnyBuffer> new_cache, I32Result selected) {
  return run_kernel("block_selection", threads, [&](const Pool& pool) {
    IndexSelection a = make_arguments(q, nullptr, &keys, cache, seq_lens, block_tables, query_start_loc,
                                      request_distribution, selected);
    require(new_cache->untyped_data() == cache.untyped_data(), "the cache is updated in place only");
    require(group_size > 0, "a block has no tokens");
    a.group_size = group_size;
    kernels().index_selection(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_index_selection, run_index_selection,
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
                  .Attr<int64_t>("num_first")
                  .Attr<int64_t>("num_last")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<I32>());

JAXIS_HANDLER(jaxis_group_selection, run_group_selection,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Attr<int64_t>("group_size")
                  .Attr<int64_t>("delay")
                  .Ret<I32>());

JAXIS_HANDLER(jaxis_block_selection, run_block_selection,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Arg<I32>()
                  .Attr<int64_t>("group_size")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<I32>());
