#include "ffi_common.h"

namespace jaxis {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

ffi::Error run_latent_attention(ffi::ThreadPool threads, Floats q, Floats entries, ffi::AnyBuffer cache, Ints seq_lens,
                                Ints block_tables, Ints query_start_loc, Ints request_distribution, int64_t block_size,
                                float scale, ffi::Result<ffi::AnyBuffer> new_cache, ffi::ResultBuffer<ffi::F32> out) {
  if (new_cache->untyped_data() != cache.untyped_data()) {
    return ffi::Error(ffi::ErrorCode::kInternal, "latent attention updates its cache in place");
  }
  LatentAttention a;
  a.q = q.typed_data();
  a.entries = entries.typed_data();
  a.cache = cache.untyped_data();
  a.seq_lens = seq_lens.typed_data();
  a.block_tables = block_tables.typed_data();
  a.query_start_loc = query_start_loc.typed_data();
  a.out = out->typed_data();
  a.type = cache.element_type() == ffi::F32    ? CacheType::kFloat32
           : cache.element_type() == ffi::BF16 ? CacheType::kBfloat16
                                               : CacheType::kInt8;
  a.num_tokens = q.dimensions()[0];
  a.num_requests = request_distribution.typed_data()[2];
  a.num_heads = q.dimensions()[1];
  a.head_dim = q.dimensions()[2];
  a.value_dim = out->dimensions()[2];
  a.block_size = block_size;
  a.max_blocks = block_tables.dimensions()[1];
  a.scale = scale;
  return run_kernel(threads, [&](const Pool& pool) { kernels().latent_attention(a, pool); });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_latent_attention, run_latent_attention,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<Floats>()
                  .Arg<Floats>()
                  .Arg<ffi::AnyBuffer>()
                  .Arg<Ints>()
                  .Arg<Ints>()
                  .Arg<Ints>()
                  .Arg<Ints>()
                  .Attr<int64_t>("block_size")
                  .Attr<float>("scale")
                  .Ret<ffi::AnyBuffer>()
                  .Ret<Floats>());
