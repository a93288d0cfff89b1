// Top-k, top-p and min-p.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "logit_bisection.h"
#include "sampling.h"
#include "simd.h"
#include "team.h"
#include "vocab_tiles.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Probabilities as integers, in units of at most 2**-29 of the whole: their sums do not depend on the order.
constexpr int kMassBits = 30;
// Logits by their distance from the largest, in steps of 1/64 after the temperature. Beyond 22 no mass is left.
constexpr int kBuckets = 2048;
constexpr float kBucketsPerUnit = 64.0f;

// One row, and the scratch memory it is worked on with.
struct FilterRow {
  const TokenFilters& a;
  const Pool& pool;
  const float* logits;
  const float* tile_max;
  float max;
  float inverse_temperature;
  float units;  // of mass in the weight 1
  float* values;
  int32_t* masses;

  F32x16 scaled(F32x16 x) const { return (x - broadcast(max)) * broadcast(inverse_temperature); }
  F32x16 mass(F32x16 x) const { return round_even(exp(scaled(x)) * broadcast(units)); }

  // A logit's bucket, and what comes behind the point; the last bucket has all that is further away.
  F32x16 place(F32x16 x) const { return min(scaled(x) * broadcast(-kBucketsPerUnit), broadcast(kBuckets - 1)); }
  int bucket(float x) const {
    const float place = (x - max) * inverse_temperature * -kBucketsPerUnit;
    return place < kBuckets - 1 ? static_cast<int>(place) : kBuckets - 1;
  }

  // Gathers in `values` the logits that `keep` accepts, out of tiles whose maximum is at least `lowest`.
  // `may_keep` says of sixteen at a time whether there may be one among them.
  template <typename MayKeep, typename Keep>
  int64_t collect(float lowest, MayKeep&& may_keep, Keep&& keep) const {
    const int64_t tasks = tasks_per_row(a.vocab);
    int64_t* counts = static_cast<int64_t*>(scratch(Scratch::kCounts, tasks * 8));
    for_each_run_of_tiles(pool, 1, a.vocab, [&](int64_t, int64_t first, int64_t end) {
      float* out = values + first * kVocabTile;
      int64_t n = 0;
      for (int64_t tile = first; tile < end; ++tile) {
        if (tile_max[tile] < lowest) continue;
        for_each_lanes(logits + tile * kVocabTile, tile_size(a.vocab, tile), [&](F32x16 x) {
          if (!may_keep(x)) return;
          float lanes[kLanes];
          store(lanes, x);
          for (int j = 0; j < kLanes; ++j) {
            out[n] = lanes[j];
            n += keep(lanes[j]) ? 1 : 0;
          }
        });
      }
      counts[first / kTilesPerTask] = n;
    });
    int64_t n = counts[0];
    for (int64_t task = 1; task < tasks; ++task) {
      std::memmove(values + n, values + task * kTilesPerTask * kVocabTile, static_cast<size_t>(counts[task]) * 4);
      n += counts[task];
    }
    return n;
  }

  float kth_largest(int32_t k) const {
    // k tiles have a token at least as large as the k-th largest of the tiles' maxima.
    const int64_t tiles = num_tiles(a.vocab);
    const float lowest = k <= tiles ? largest_value_reaching(tile_max, nullptr, tiles, k, max) : -kInfinity;
    const int64_t n = collect(
        lowest, [&](F32x16 x) { return any_at_least(x, broadcast(lowest)); }, [&](float x) { return x >= lowest; });
    return largest_value_reaching(values, nullptr, n, k, max);
  }

  // The smallest of the logits that together hold the share `top_p` of the mass from `lowest` upwards, the largest
  // first. That mass is `kept`; 0 if the caller does not know it.
  float top_p_logit(float top_p, float lowest, int32_t kept) const {
    int32_t histogram[kBuckets];
    const int32_t found = fill(histogram, lowest);
    if (kept == 0) kept = found;
    int32_t target = static_cast<int32_t>(std::ceil(static_cast<float>(kept) * top_p));
    if (target < 1) target = 1;
    if (target > kept) target = kept;
    int wanted = 0;
    while (wanted < kBuckets && histogram[wanted] < target) target -= histogram[wanted++];
    if (wanted == kBuckets) return -kInfinity;
    const F32x16 middle = broadcast(static_cast<float>(wanted) + 0.5f), half = broadcast(0.5f);
    const int64_t n = collect(
        lowest, [&](F32x16 x) { return any_at_least(half - abs(place(x) - middle), zero()); },
        [&](float x) { return x >= lowest && bucket(x) == wanted; });
    for (int64_t i = 0; i < n; i += kLanes) {
      float lanes[kLanes], mass_lanes[kLanes];
      for (int j = 0; j < kLanes; ++j) lanes[j] = i + j < n ? values[i + j] : -kInfinity;
      store(mass_lanes, mass(load(lanes)));
      for (int j = 0; j < kLanes && i + j < n; ++j) masses[i + j] = static_cast<int32_t>(mass_lanes[j]);
    }
    return largest_value_reaching(values, masses, n, target, max);
  }

  // Mass by bucket of the logits from `lowest` upwards; returns the sum.
  int32_t fill(int32_t* histogram, float lowest) const {
    const int64_t tasks = tasks_per_row(a.vocab);
    int32_t* parts = static_cast<int32_t*>(scratch(Scratch::kHistograms, tasks * kBuckets * 4));
    for_each_run_of_tiles(pool, 1, a.vocab, [&](int64_t, int64_t first, int64_t end) {
      int32_t* part = parts + first / kTilesPerTask * kBuckets;
      std::memset(part, 0, kBuckets * 4);
      for (int64_t tile = first; tile < end; ++tile) {
        if (tile_max[tile] < lowest || bucket(tile_max[tile]) == kBuckets - 1) continue;
        for_each_lanes(logits + tile * kVocabTile, tile_size(a.vocab, tile), [&](F32x16 x) {
          const F32x16 kept = keep_at_least(x, broadcast(lowest), mass(x));
          if (!any_at_least(kept, broadcast(1.0f))) return;
          float mass_lanes[kLanes], bucket_lanes[kLanes];
          store(mass_lanes, kept);
          store(bucket_lanes, place(x));
          int32_t masses16[kLanes], buckets16[kLanes];
          for (int j = 0; j < kLanes; ++j) masses16[j] = static_cast<int32_t>(mass_lanes[j]);
          for (int j = 0; j < kLanes; ++j) buckets16[j] = static_cast<int32_t>(bucket_lanes[j]);
          for (int j = 0; j < kLanes; ++j) part[buckets16[j]] += masses16[j];
        });
      }
    });
    std::memcpy(histogram, parts, kBuckets * 4);
    for (int64_t task = 1; task < tasks; ++task) {
      for (int i = 0; i < kBuckets; ++i) histogram[i] += parts[task * kBuckets + i];
    }
    int32_t sum = 0;
    for (int i = 0; i < kBuckets; ++i) sum += histogram[i];
    return sum;
  }

  void sum_kept(float cutoff, float* kept_mass) const {
    for_each_run_of_tiles(pool, 1, a.vocab, [&](int64_t, int64_t first, int64_t end) {
      for (int64_t tile = first; tile < end; ++tile) {
        F32x16 sum = zero();
        if (tile_max[tile] >= cutoff) {
          for_each_lanes(logits + tile * kVocabTile, tile_size(a.vocab, tile),
                         [&](F32x16 x) { sum = sum + keep_at_least(x, broadcast(cutoff), exp(scaled(x))); });
        }
        kept_mass[tile] = reduce_add(sum);
      }
    });
  }
};

void filter_row(const TokenFilters& a, int64_t row, const Pool& pool) {
  const int64_t tiles = num_tiles(a.vocab);
  const bool has_k = a.top_k[row] < a.vocab;
  const bool has_p = a.top_p[row] < 1.0f;
  const bool has_min_p = a.min_p_logit[row] > -kInfinity;
  const bool is_valid = a.max[row] > -kInfinity && a.max[row] < kInfinity && a.total[row] < kInfinity;
  if (!is_valid || !(has_k || has_p || has_min_p)) {
    a.cutoff[row] = -kInfinity;
    std::memmove(a.kept_mass + row * tiles, a.tile_mass + row * tiles, static_cast<size_t>(tiles) * 4);
    return;
  }
  // The power of two that brings the total weight to between 2**29 and 2**30.
  uint32_t bits;
  std::memcpy(&bits, a.total + row, 4);
  bits = (kMassBits - 1 + 2 * 127 - (bits >> 23)) << 23;
  float units;
  std::memcpy(&units, &bits, 4);
  const int64_t padded = tiles * kVocabTile;
  float* values = static_cast<float*>(scratch(Scratch::kLogits, padded * 4));
  int32_t* masses = static_cast<int32_t*>(scratch(Scratch::kMasses, padded * 4));
  const FilterRow r{
      a,      pool,  a.logits + row * a.vocab, a.tile_max + row * tiles, a.max[row], a.inverse_temperature[row], units,
      values, masses};
  float cutoff = has_min_p ? (a.min_p_logit[row] < r.max ? a.min_p_logit[row] : r.max) : -kInfinity;
  if (has_k) {
    const float k_logit = r.kth_largest(a.top_k[row]);
    cutoff = k_logit > cutoff ? k_logit : cutoff;
  }
  if (has_p) {
    const int32_t kept = has_k || has_min_p ? 0 : static_cast<int32_t>(std::nearbyint(a.total[row] * units));
    const float p_logit = r.top_p_logit(a.top_p[row], cutoff, kept);
    cutoff = p_logit > cutoff ? p_logit : cutoff;
  }
  a.cutoff[row] = cutoff;
  r.sum_kept(cutoff, a.kept_mass + row * tiles);
}

}  // namespace

void filter_tokens(const TokenFilters& a, const Pool& pool) {
  if (a.rows < pool.num_threads) {
    for (int64_t row = 0; row < a.rows; ++row) filter_row(a, row, pool);
  } else {
    parallel_for(pool, a.rows, [&](int64_t row) { filter_row(a, row, pool); });
  }
}

}  // namespace jaxis::JAXIS_ISA
