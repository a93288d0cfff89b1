#include "ffi_common.h"

namespace jaxis {
namespace {

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;
using I32Result = ffi::ResultBuffer<ffi::S32>;

ffi::Error run_argmax(ffi::ThreadPool threads, F32 logits, I32Result ids, F32Result max) {
  const auto shape = logits.dimensions();
  const Argmax a{logits.typed_data(), ids->typed_data(), max->typed_data(), shape[0], shape[1]};
  return run_kernel(threads, [&](const Pool& pool) { kernels().argmax(a, pool); });
}

ffi::Error run_tile_weights(ffi::ThreadPool threads, F32 logits, F32 inverse_temperature, F32Result tile_max,
                            F32Result tile_mass, F32Result max, F32Result total) {
  const auto shape = logits.dimensions();
  const TileWeights a{logits.typed_data(),
                      inverse_temperature.typed_data(),
                      tile_max->typed_data(),
                      tile_mass->typed_data(),
                      max->typed_data(),
                      total->typed_data(),
                      shape[0],
                      shape[1]};
  return run_kernel(threads, [&](const Pool& pool) { kernels().tile_weights(a, pool); });
}

ffi::Error run_filter_tokens(ffi::ThreadPool threads, F32 logits, F32 inverse_temperature, F32 tile_max, F32 tile_mass,
                             F32 max, F32 total, I32 top_k, F32 top_p, F32 min_p_logit, F32Result cutoff,
                             F32Result kept_mass) {
  const auto shape = logits.dimensions();
  const TokenFilters a{logits.typed_data(),
                       inverse_temperature.typed_data(),
                       tile_max.typed_data(),
                       tile_mass.typed_data(),
                       max.typed_data(),
                       total.typed_data(),
                       top_k.typed_data(),
                       top_p.typed_data(),
                       min_p_logit.typed_data(),
                       cutoff->typed_data(),
                       kept_mass->typed_data(),
                       shape[0],
                       shape[1]};
  return run_kernel(threads, [&](const Pool& pool) { kernels().filter_tokens(a, pool); });
}

ffi::Error run_top_tokens(ffi::ThreadPool threads, F32 logits, F32Result values, I32Result ids) {
  const auto shape = logits.dimensions();
  const TopTokens a{logits.typed_data(),    values->typed_data(), ids->typed_data(), shape[0], shape[1],
                    values->dimensions()[1]};
  return run_kernel(threads, [&](const Pool& pool) { kernels().top_tokens(a, pool); });
}

ffi::Error run_token_ranks(ffi::ThreadPool threads, F32 logits, F32 chosen, I32Result ranks) {
  const auto shape = logits.dimensions();
  const TokenRanks a{logits.typed_data(), chosen.typed_data(), ranks->typed_data(), shape[0], shape[1]};
  return run_kernel(threads, [&](const Pool& pool) { kernels().token_ranks(a, pool); });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_argmax, run_argmax, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<I32>().Ret<F32>());

JAXIS_HANDLER(
    jaxis_tile_weights, run_tile_weights,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>().Ret<F32>().Ret<F32>());

JAXIS_HANDLER(jaxis_filter_tokens, run_filter_tokens,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Arg<I32>()
                  .Arg<F32>()
                  .Arg<F32>()
                  .Ret<F32>()
                  .Ret<F32>());

JAXIS_HANDLER(jaxis_top_tokens, run_top_tokens,
              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Ret<F32>().Ret<I32>());

JAXIS_HANDLER(jaxis_token_ranks, run_token_ranks,
              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<I32>());
