#include "sampling.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

// Rows and vocabulary of logits.
struct LogitsShape {
  int64_t rows, vocab, tiles;
};

LogitsShape shape_of(const F32& logits) {
  require_shape("logits", logits, {kAnySize, kAnySize});
  const int64_t rows = logits.dimensions()[0], vocab = logits.dimensions()[1];
  require(vocab > 0, "the vocabulary is empty");
  return {rows, vocab, num_tiles(vocab)};
}

ffi::Error run_argmax(ffi::ThreadPool threads, F32 logits, I32Result ids, F32Result max) {
  return run_kernel("argmax", threads, [&](const Pool& pool) {
    const LogitsShape shape = shape_of(logits);
    require_shape("ids", *ids, {shape.rows});
    require_shape("max", *max, {shape.rows});
    Argmax a{};
    a.logits = logits.typed_data();
    a.ids = ids->typed_data();
    a.max = max->typed_data();
    a.rows = shape.rows;
    a.vocab = shape.vocab;
    kernels().argmax(a, pool);
  });
}

ffi::Error run_tile_weights(ffi::ThreadPool threads, F32 logits, F32 inverse_temperature, F32Result tile_max,
                            F32Result tile_mass, F32Result max, F32Result total) {
  return run_kernel("tile_weights", threads, [&](const Pool& pool) {
    const LogitsShape shape = shape_of(logits);
    require_shape("inverse_temperature", inverse_temperature, {shape.rows});
    require_shape("tile_max", *tile_max, {shape.rows, shape.tiles});
    require_shape("tile_mass", *tile_mass, {shape.rows, shape.tiles});
    require_shape("max", *max, {shape.rows});
    require_shape("total", *total, {shape.rows});
    TileWeights a{};
    a.logits = logits.typed_data();
    a.inverse_temperature = inverse_temperature.typed_data();
    a.tile_max = tile_max->typed_data();
    a.tile_mass = tile_mass->typed_data();
    a.max = max->typed_data();
    a.total = total->typed_data();
    a.rows = shape.rows;
    a.vocab = shape.vocab;
    kernels().tile_weights(a, pool);
  });
}

ffi::Error run_filter_tokens(ffi::ThreadPool threads, F32 logits, F32 inverse_temperature, F32 tile_max, F32 tile_mass,
                             F32 max, F32 total, I32 top_k, F32 top_p, F32 min_p_logit, F32Result cutoff,
                             F32Result kept_mass) {
  return run_kernel("filter_tokens", threads, [&](const Pool& pool) {
    const LogitsShape shape = shape_of(logits);
    require_shape("inverse_temperature", inverse_temperature, {shape.rows});
    require_shape("tile_max", tile_max, {shape.rows, shape.tiles});
    require_shape("tile_mass", tile_mass, {shape.rows, shape.tiles});
    require_shape("max", max, {shape.rows});
    require_shape("total", total, {shape.rows});
    require_shape("top_k", top_k, {shape.rows});
    require_shape("top_p", top_p, {shape.rows});
    require_shape("min_p_logit", min_p_logit, {shape.rows});
    require_shape("cutoff", *cutoff, {shape.rows});
    require_shape("kept_mass", *kept_mass, {shape.rows, shape.tiles});
    TokenFilters a{};
    a.logits = logits.typed_data();
    a.inverse_temperature = inverse_temperature.typed_data();
    a.tile_max = tile_max.typed_data();
    a.tile_mass = tile_mass.typed_data();
    a.max = max.typed_data();
    a.total = total.typed_data();
    a.top_k = top_k.typed_data();
    a.top_p = top_p.typed_data();
    a.min_p_logit = min_p_logit.typed_data();
    a.cutoff = cutoff->typed_data();
    a.kept_mass = kept_mass->typed_data();
    a.rows = shape.rows;
    a.vocab = shape.vocab;
    kernels().filter_tokens(a, pool);
  });
}

ffi::Error run_top_tokens(ffi::ThreadPool threads, F32 logits, F32Result values, I32Result ids) {
  return run_kernel("top_tokens", threads, [&](const Pool& pool) {
    const LogitsShape shape = shape_of(logits);
    require_shape("values", *values, {shape.rows, kAnySize});
    const int64_t k = values->dimensions()[1];
    require_shape("ids", *ids, {shape.rows, k});
    require(k >= 1 && k <= shape.vocab, "k is not from 1 to the size of the vocabulary");
    TopTokens a{};
    a.logits = logits.typed_data();
    a.values = values->typed_data();
    a.ids = ids->typed_data();
    a.rows = shape.rows;
    a.vocab = shape.vocab;
    a.k = k;
    kernels().top_tokens(a, pool);
  });
}

ffi::Error run_token_ranks(ffi::ThreadPool threads, F32 logits, F32 chosen, I32Result ranks) {
  return run_kernel("token_ranks", threads, [&](const Pool& pool) {
    const LogitsShape shape = shape_of(logits);
    require_shape("chosen", chosen, {shape.rows});
    require_shape("ranks", *ranks, {shape.rows});
    TokenRanks a{};
    a.logits = logits.typed_data();
    a.chosen = chosen.typed_data();
    a.ranks = ranks->typed_data();
    a.rows = shape.rows;
    a.vocab = shape.vocab;
    kernels().token_ranks(a, pool);
  });
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
