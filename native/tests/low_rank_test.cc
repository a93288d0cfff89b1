#include "low_rank.h"

#include <algorithm>
#include <vector>

#include "testing.h"
#include "weights.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr int64_t kSlots = 3, kRank = 9;

struct Pair {
  std::vector<float> a, b;
  std::vector<int32_t> ranks;
  int64_t n;
  std::vector<uint16_t> low_a, low_b;  // the same in bfloat16, if the pair is
};

std::vector<uint16_t> rounded(std::vector<float>* values) {
  std::vector<uint16_t> low;
  for (float& value : *values) {
    low.push_back(to_bf16(value));
    value = from_bf16(low.back());
  }
  return low;
}

Pair make_pair(int64_t k, int64_t n, int seed, bool is_bf16 = false) {
  Pair pair = {normal(kSlots * kRank * k, seed), normal(kSlots * kRank * n, seed + 1), {4, 0, 9}, n, {}, {}};
  if (is_bf16) pair.low_a = rounded(&pair.a), pair.low_b = rounded(&pair.b);
  return pair;
}

std::vector<std::vector<float>> run(const std::vector<float>& x, const std::vector<int32_t>& slots,
                                    const std::vector<Pair>& pairs, const Pool& pool) {
  LowRank a{};
  a.x = x.data();
  a.slots = slots.data();
  a.rows = static_cast<int64_t>(slots.size());
  a.k = static_cast<int64_t>(x.size()) / a.rows;
  a.num_slots = kSlots;
  a.rank = kRank;
  a.num_matrices = static_cast<int>(pairs.size());
  std::vector<std::vector<float>> out(pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    out[i].assign(a.rows * pairs[i].n, std::nanf(""));
    a.is_bf16 = !pairs[i].low_a.empty();
    a.a[i] = a.is_bf16 ? static_cast<const void*>(pairs[i].low_a.data()) : pairs[i].a.data();
    a.b[i] = a.is_bf16 ? static_cast<const void*>(pairs[i].low_b.data()) : pairs[i].b.data();
    a.ranks[i] = pairs[i].ranks.data();
    a.n[i] = pairs[i].n, a.out[i] = out[i].data();
  }
  kernels().low_rank(a, pool);
  return out;
}

}  // namespace

TEST(low_rank, equals_the_formula) {
  ThreadPool threads(3);
  const std::vector<int32_t> slots = {0, 3, 1, 2, 3, 0, 1};
  const int64_t sizes[] = {1, 15, 16, 67, 512};
  for (int i = 0; i < 10; ++i) {
    const int64_t k = sizes[i / 2];
    const bool is_bf16 = i % 2;
    const std::vector<Pair> pairs = {make_pair(k, 5, 1, is_bf16), make_pair(k, 300, 3, is_bf16)};
    const std::vector<float> x = normal(slots.size() * k, 7);
    const auto out = run(x, slots, pairs, threads.pool());
    for (size_t p = 0; p < pairs.size(); ++p) {
      const Pair& pair = pairs[p];
      std::vector<double> expected(slots.size() * pair.n, 0.0);
      for (size_t row = 0; row < slots.size(); ++row) {
        if (slots[row] == 0) continue;
        const int64_t slot = slots[row] - 1;
        for (int64_t j = 0; j < pair.ranks[slot]; ++j) {
          double u = 0.0;
          for (int64_t c = 0; c < k; ++c) {
            u += static_cast<double>(x[row * k + c]) * pair.a[(slot * kRank + j) * k + c];
          }
          for (int64_t c = 0; c < pair.n; ++c) {
            expected[row * pair.n + c] += u * pair.b[(slot * kRank + j) * pair.n + c];
          }
        }
      }
      check_close(out[p], expected, 1e-4, 1e-3);
    }
  }
}

TEST(low_rank, of_a_row_does_not_depend_on_rows_or_threads) {
  ThreadPool threads(4);
  constexpr int64_t kSize = 1027;
  std::vector<int32_t> slots;
  for (int i = 0; i < 50; ++i) slots.push_back(i % 4);
  const std::vector<Pair> pairs = {make_pair(kSize, 777, 1)};
  const std::vector<float> x = normal(50 * kSize, 3);
  const std::vector<float> together = run(x, slots, pairs, threads.pool())[0];
  for (int row = 0; row < 50; ++row) {
    const std::vector<float> one(x.begin() + row * kSize, x.begin() + (row + 1) * kSize);
    const std::vector<float> alone = run(one, {slots[row]}, pairs, no_pool())[0];
    CHECK(std::equal(alone.begin(), alone.end(), together.begin() + row * 777), row);
  }
}
