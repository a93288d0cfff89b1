#include <algorithm>
#include <limits>
#include <numeric>

#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kRows = 5;

// Token ids of a row, the largest logit first, lower ids first among equals.
std::vector<int32_t> sorted_ids(const float* logits, int64_t vocab) {
  std::vector<int32_t> ids(vocab);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  return ids;
}

// Logits with equals among them: multiples of 1/4 in the odd rows.
std::vector<float> make_logits(int64_t vocab, uint32_t seed) {
  std::vector<float> logits = normal(kRows * vocab, seed);
  for (int64_t i = 0; i < kRows * vocab; ++i) {
    if (i / vocab % 2 == 1) logits[i] = std::round(logits[i] * 4.0f) / 4.0f;
  }
  return logits;
}

struct Weights {
  std::vector<float> tile_max, tile_mass, max, total;
};

Weights weigh(const float* logits, const float* inverse_temperature, int64_t rows, int64_t vocab, const Pool& pool) {
  const size_t tiles = rows * num_tiles(vocab);
  Weights w{std::vector<float>(tiles), std::vector<float>(tiles), std::vector<float>(rows), std::vector<float>(rows)};
  kernels().tile_weights(
      {logits, inverse_temperature, w.tile_max.data(), w.tile_mass.data(), w.max.data(), w.total.data(), rows, vocab},
      pool);
  return w;
}

struct Filters {
  std::vector<int32_t> top_k;
  std::vector<float> top_p, min_p_logit;
};

struct Filtered {
  std::vector<float> cutoff, kept_mass;
};

Filtered filter(const float* logits, const float* inverse_temperature, const Filters& f, int64_t first, int64_t rows,
                int64_t vocab, const Pool& pool) {
  const float* from = logits + first * vocab;
  const Weights w = weigh(from, inverse_temperature + first, rows, vocab, pool);
  Filtered out{std::vector<float>(rows), std::vector<float>(w.tile_mass.size())};
  kernels().filter_tokens({from, inverse_temperature + first, w.tile_max.data(), w.tile_mass.data(), w.max.data(),
                           w.total.data(), f.top_k.data() + first, f.top_p.data() + first, f.min_p_logit.data() + first,
                           out.cutoff.data(), out.kept_mass.data(), rows, vocab},
                          pool);
  return out;
}

}  // namespace

TEST(sampling, argmax_top_tokens_and_ranks_equal_sorting) {
  ThreadPool threads(4);
  for (const int64_t vocab : {1, 100, 128, 1000, 20011}) {
    const std::vector<float> logits = make_logits(vocab, 1);
    const int64_t k = std::min<int64_t>(vocab, 20);
    std::vector<int32_t> best(kRows), ids(kRows * k), ranks(kRows);
    std::vector<float> max(kRows), values(kRows * k), chosen(kRows);
    kernels().argmax({logits.data(), best.data(), max.data(), kRows, vocab}, threads.pool());
    kernels().top_tokens({logits.data(), values.data(), ids.data(), kRows, vocab, k}, threads.pool());
    for (int64_t row = 0; row < kRows; ++row) chosen[row] = logits[row * vocab + row * 31 % vocab];
    kernels().token_ranks({logits.data(), chosen.data(), ranks.data(), kRows, vocab}, threads.pool());
    for (int64_t row = 0; row < kRows; ++row) {
      const float* x = logits.data() + row * vocab;
      const std::vector<int32_t> sorted = sorted_ids(x, vocab);
      CHECK(best[row] == sorted[0] && max[row] == x[sorted[0]], vocab, row, best[row], sorted[0]);
      for (int64_t i = 0; i < k; ++i) {
        CHECK(ids[row * k + i] == sorted[i] && values[row * k + i] == x[sorted[i]], vocab, row, i, ids[row * k + i]);
      }
      const auto above = std::count_if(x, x + vocab, [&](float logit) { return logit > chosen[row]; });
      CHECK(ranks[row] == 1 + above, vocab, row, ranks[row], above);
    }
  }
}

TEST(sampling, argmax_of_a_row_with_nan_is_its_first_nan) {
  constexpr int64_t kVocab = 20000;
  std::vector<float> logits = normal(kVocab, 1);
  logits[15001] = logits[9000] = std::nanf("");
  int32_t id;
  float max;
  kernels().argmax({logits.data(), &id, &max, 1, kVocab}, no_pool());
  CHECK(id == 9000 && std::isnan(max), id, max);
}

TEST(sampling, weights_are_the_softmax_before_its_division) {
  ThreadPool threads(4);
  for (const int64_t vocab : {1, 130, 20011}) {
    const std::vector<float> logits = make_logits(vocab, 2), inverse_temperature = {1.0f, 0.5f, 3.0f, 1.0f, 10.0f};
    const Weights w = weigh(logits.data(), inverse_temperature.data(), kRows, vocab, threads.pool());
    for (int64_t row = 0; row < kRows; ++row) {
      const float* x = logits.data() + row * vocab;
      const float largest = *std::max_element(x, x + vocab);
      CHECK(w.max[row] == largest);
      double total = 0.0;
      for (int64_t tile = 0; tile < num_tiles(vocab); ++tile) {
        const int64_t begin = tile * kVocabTile, end = std::min(vocab, begin + kVocabTile);
        double mass = 0.0;
        for (int64_t i = begin; i < end; ++i) mass += std::exp((double(x[i]) - largest) * inverse_temperature[row]);
        check_close({w.tile_mass[row * num_tiles(vocab) + tile]}, {mass}, 1e-5, 1e-30);
        CHECK(w.tile_max[row * num_tiles(vocab) + tile] == *std::max_element(x + begin, x + end));
        total += mass;
      }
      check_close({w.total[row]}, {total}, 1e-5, 0.0);
    }
  }
}

TEST(sampling, filters_keep_what_sorting_keeps) {
  ThreadPool threads(4);
  const std::vector<float> inverse_temperature = {1.0f, 0.5f, 3.0f, 1.0f, 1.0f};
  for (const int64_t vocab : {1, 100, 20011}) {
    const std::vector<float> logits = make_logits(vocab, 3);
    const int32_t all = static_cast<int32_t>(vocab);
    const Filters filters{
        {all, all, 40, 3000, 1}, {1.0f, 0.7f, 0.9f, 0.5f, 1.0f}, {-kInfinity, -kInfinity, -1.0f, 0.3f, -kInfinity}};
    const Filtered found = filter(logits.data(), inverse_temperature.data(), filters, 0, kRows, vocab, threads.pool());
    CHECK(found.cutoff[0] == -kInfinity);
    for (int64_t row = 1; row < kRows; ++row) {
      const float* x = logits.data() + row * vocab;
      const std::vector<int32_t> sorted = sorted_ids(x, vocab);
      const float largest = x[sorted[0]];
      float cutoff = std::min(filters.min_p_logit[row], largest);
      if (filters.top_k[row] < vocab) cutoff = std::max(cutoff, x[sorted[filters.top_k[row] - 1]]);
      double kept = 0.0;
      const auto weight = [&](float logit) { return std::exp((double(logit) - largest) * inverse_temperature[row]); };
      for (int64_t i = 0; i < vocab; ++i) kept += x[i] >= cutoff ? weight(x[i]) : 0.0;
      // Of logits all different, the last few kept may differ by what their weights are rounded to.
      double above = 0.0;
      for (int64_t i = 0; i < vocab; ++i) above += x[i] > found.cutoff[row] ? weight(x[i]) : 0.0;
      double from = 0.0;
      for (int64_t i = 0; i < vocab; ++i) from += x[i] >= found.cutoff[row] ? weight(x[i]) : 0.0;
      if (filters.top_p[row] == 1.0f) {
        CHECK(found.cutoff[row] == cutoff, vocab, row, found.cutoff[row], cutoff);
      } else {
        CHECK(found.cutoff[row] >= cutoff, vocab, row, found.cutoff[row], cutoff);
        CHECK(from >= kept * filters.top_p[row] * (1 - 1e-4), vocab, row, from, kept);
        CHECK(above < kept * filters.top_p[row] * (1 + 1e-4), vocab, row, above, kept);
      }
      const int64_t tiles = num_tiles(vocab);
      const float* mass = found.kept_mass.data() + row * tiles;
      check_close({std::accumulate(mass, mass + tiles, 0.0f)}, {from}, 1e-4, 0.0);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      const Filtered alone = filter(logits.data(), inverse_temperature.data(), filters, row, 1, vocab, no_pool());
      CHECK(alone.cutoff[0] == found.cutoff[row], vocab, row);
      const auto mass = found.kept_mass.begin() + row * num_tiles(vocab);
      CHECK(std::equal(alone.kept_mass.begin(), alone.kept_mass.end(), mass), vocab, row);
    }
  }
}
