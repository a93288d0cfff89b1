#include <algorithm>
#include <numeric>

#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr int64_t kHeads = 18, kHeadDim = 32, kBlockSize = 8, kSelected = 11;

// Whole numbers: sums are exact in any order and every type, and many scores are equal.
std::vector<float> whole_numbers(int64_t count, uint32_t seed) {
  std::vector<float> x = normal(count, seed);
  for (float& value : x) value = value < -0.5f ? -1.0f : value > 0.5f ? 1.0f : 0.0f;
  return x;
}

struct Sequence {
  int64_t length;
  std::vector<float> q, weights, keys;
};

Sequence make_sequence(int64_t length, uint32_t seed) {
  return {length, whole_numbers(length * kHeads * kHeadDim, seed), whole_numbers(length * kHeads, seed + 1),
          whole_numbers(length * kHeadDim, seed + 2)};
}

int64_t key_bytes(CacheType type) {
  return type == CacheType::kFloat32 ? kHeadDim * 4 : type == CacheType::kBfloat16 ? kHeadDim * 2 : kHeadDim + 4;
}

// A sequence in a cache whose blocks lie backwards, fed to the kernel step by step; what is not written is NaN. With
// `block_tokens`, heads select blocks of so many.
class Cache {
 public:
  Cache(const Sequence& sequence, CacheType type, int64_t block_tokens = 0)
      : sequence_(sequence), type_(type), block_tokens_(block_tokens) {
    const int64_t blocks = (sequence.length + kBlockSize - 1) / kBlockSize;
    for (int64_t i = 0; i < blocks; ++i) table_.push_back(static_cast<int32_t>(blocks - 1 - i));
    memory_.assign(blocks * kBlockSize * key_bytes(type), 0xff);
  }

  // The selections of the next tokens, after which the step has padding.
  void step(int64_t tokens, const Pool& pool) {
    constexpr int64_t kPadding = 3;
    const int64_t end = done_ + tokens, rows = tokens + kPadding;
    const auto part = [&](const std::vector<float>& x, int64_t size) {
      std::vector<float> result(x.begin() + done_ * size, x.begin() + end * size);
      result.resize(rows * size, std::nanf(""));
      return result;
    };
    const std::vector<float> q = part(sequence_.q, kHeads * kHeadDim), weights = part(sequence_.weights, kHeads),
                             keys = part(sequence_.keys, kHeadDim);
    const int32_t length = static_cast<int32_t>(end), starts[2] = {0, static_cast<int32_t>(tokens)};
    const int64_t size = (block_tokens_ > 0 ? kHeads : 1) * kSelected;
    std::vector<int32_t> selected(rows * size, 7);
    IndexSelection a{};
    a.q = q.data();
    a.weights = block_tokens_ > 0 ? nullptr : weights.data();
    a.group_size = block_tokens_ > 0 ? block_tokens_ : 1;
    a.keys = keys.data();
    a.cache = memory_.data();
    a.seq_lens = &length;
    a.block_tables = table_.data();
    a.query_start_loc = starts;
    a.selected = selected.data();
    a.type = type_;
    a.num_tokens = rows;
    a.num_requests = 1;
    a.num_heads = kHeads;
    a.head_dim = kHeadDim;
    a.block_size = kBlockSize;
    a.max_blocks = static_cast<int64_t>(table_.size());
    a.num_selected = kSelected;
    kernels().index_selection(a, pool);
    CHECK(std::all_of(selected.begin() + tokens * size, selected.end(), [](int32_t x) { return x == -1; }));
    selected_.insert(selected_.end(), selected.begin(), selected.begin() + tokens * size);
    done_ = end;
  }

  const std::vector<int32_t>& selected() const { return selected_; }

 private:
  const Sequence& sequence_;
  CacheType type_;
  int64_t block_tokens_;
  int64_t done_ = 0;
  std::vector<int32_t> table_;
  std::vector<uint8_t> memory_;
  std::vector<int32_t> selected_;
};

// The numbers of the best scores by a stable sort, ascending, then -1.
void add_best(const std::vector<double>& scores, std::vector<int32_t>& result) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  order.resize(std::min<int64_t>(scores.size(), kSelected));
  std::sort(order.begin(), order.end());
  order.resize(kSelected, -1);
  result.insert(result.end(), order.begin(), order.end());
}

double product(const Sequence& s, int64_t token, int64_t head, int64_t key) {
  double sum = 0.0;
  for (int64_t d = 0; d < kHeadDim; ++d) {
    sum += double(s.q[(token * kHeads + head) * kHeadDim + d]) * s.keys[key * kHeadDim + d];
  }
  return sum;
}

std::vector<int32_t> expected(const Sequence& s) {
  std::vector<int32_t> result;
  for (int64_t t = 0; t < s.length; ++t) {
    std::vector<double> scores(t + 1, 0.0);
    for (int64_t u = 0; u <= t; ++u) {
      for (int64_t h = 0; h < kHeads; ++h) {
        scores[u] += s.weights[t * kHeads + h] * std::max(product(s, t, h, u), 0.0);
      }
    }
    add_best(scores, result);
  }
  return result;
}

std::vector<int32_t> expected_blocks(const Sequence& s, int64_t block_tokens) {
  std::vector<int32_t> result;
  for (int64_t t = 0; t < s.length; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      std::vector<double> scores(t / block_tokens + 1, -1e9);
      for (int64_t u = 0; u <= t; ++u) {
        double& score = scores[u / block_tokens];
        score = std::max(score, product(s, t, h, u));
      }
      scores.back() = 1e9;
      add_best(scores, result);
    }
  }
  return result;
}

}  // namespace

TEST(index_selection, takes_the_best_and_of_equals_the_earliest_in_any_steps) {
  ThreadPool threads(4);
  const Sequence sequence = make_sequence(300, 1);
  for (const CacheType type : {CacheType::kFloat32, CacheType::kBfloat16, CacheType::kInt8}) {
    Cache at_once(sequence, type), in_parts(sequence, type);
    at_once.step(300, threads.pool());
    for (const int64_t tokens : {1, 70, 1, 228}) in_parts.step(tokens, no_pool());
    CHECK(at_once.selected() == expected(sequence), static_cast<int>(type));
    CHECK(in_parts.selected() == at_once.selected(), static_cast<int>(type));
  }
}

TEST(index_selection, takes_for_each_head_the_blocks_with_the_best_keys_in_any_steps) {
  ThreadPool threads(4);
  const Sequence sequence = make_sequence(300, 1);
  for (const CacheType type : {CacheType::kFloat32, CacheType::kBfloat16, CacheType::kInt8}) {
    for (const int64_t block_tokens : {4, 10}) {
      Cache at_once(sequence, type, block_tokens), in_parts(sequence, type, block_tokens);
      at_once.step(300, threads.pool());
      for (const int64_t tokens : {1, 70, 1, 228}) in_parts.step(tokens, no_pool());
      CHECK(at_once.selected() == expected_blocks(sequence, block_tokens), static_cast<int>(type));
      CHECK(in_parts.selected() == at_once.selected(), static_cast<int>(type));
    }
  }
}
