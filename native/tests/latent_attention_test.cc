#include <algorithm>

#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr int64_t kHeads = 5, kHeadDim = 48, kValueDim = 32, kBlockSize = 8;
constexpr int64_t kRow = kHeads * kHeadDim, kOutRow = kHeads * kValueDim;
constexpr float kScale = 0.2f;

struct Sequence {
  int64_t length;
  std::vector<float> q;        // [length, H, D]
  std::vector<float> entries;  // [length, D]
};

Sequence make_sequence(int64_t length, uint32_t seed) {
  return {length, normal(length * kRow, seed), normal(length * kHeadDim, seed + 1)};
}

int64_t entry_bytes(CacheType type) {
  switch (type) {
    case CacheType::kFloat32:
      return kHeadDim * 4;
    case CacheType::kBfloat16:
      return kHeadDim * 2;
    case CacheType::kInt8:
      break;
  }
  return kHeadDim + 2 * 4;
}

// Sequences in a cache, fed to the kernel step by step. Blocks lie scattered; those not written are NaN.
class Cache {
 public:
  Cache(const std::vector<Sequence>& sequences, CacheType type) : sequences_(sequences), type_(type) {
    for (const Sequence& s : sequences) {
      max_blocks_ = std::max<int64_t>(max_blocks_, (s.length + kBlockSize - 1) / kBlockSize);
      outputs_.emplace_back(s.length * kOutRow, std::nanf(""));
    }
    done_.resize(sequences.size());
    const int64_t count = static_cast<int64_t>(sequences.size());
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < max_blocks_; ++i) tables_.push_back(static_cast<int32_t>(i * count + count - 1 - r));
    }
    memory_.assign(count * max_blocks_ * kBlockSize * entry_bytes(type), 0xff);
  }

  // The next tokens[r] of each sequence.
  void step(const std::vector<int64_t>& tokens, const Pool& pool) {
    std::vector<float> q, entries;
    std::vector<int32_t> lengths, starts = {0};
    for (size_t r = 0; r < tokens.size(); ++r) {
      const Sequence& s = sequences_[r];
      const int64_t begin = done_[r], end = begin + tokens[r];
      CHECK(end <= s.length);
      q.insert(q.end(), s.q.begin() + begin * kRow, s.q.begin() + end * kRow);
      entries.insert(entries.end(), s.entries.begin() + begin * kHeadDim, s.entries.begin() + end * kHeadDim);
      lengths.push_back(static_cast<int32_t>(end));
      starts.push_back(static_cast<int32_t>(starts.back() + tokens[r]));
    }
    constexpr int64_t kPadding = 3;
    const int64_t num_tokens = starts.back() + kPadding;
    q.resize(num_tokens * kRow, std::nanf(""));
    entries.resize(num_tokens * kHeadDim, std::nanf(""));
    std::vector<float> out(num_tokens * kOutRow, std::nanf(""));
    LatentAttention a;
    a.q = q.data();
    a.entries = entries.data();
    a.cache = memory_.data();
    a.seq_lens = lengths.data();
    a.block_tables = tables_.data();
    a.query_start_loc = starts.data();
    a.out = out.data();
    a.type = type_;
    a.num_tokens = num_tokens;
    a.num_requests = static_cast<int64_t>(tokens.size());
    a.num_heads = kHeads;
    a.head_dim = kHeadDim;
    a.value_dim = kValueDim;
    a.block_size = kBlockSize;
    a.max_blocks = max_blocks_;
    a.scale = kScale;
    kernels().latent_attention(a, pool);
    for (size_t r = 0; r < tokens.size(); ++r) {
      std::copy(out.begin() + starts[r] * kOutRow, out.begin() + starts[r + 1] * kOutRow,
                outputs_[r].begin() + done_[r] * kOutRow);
      done_[r] += tokens[r];
    }
    CHECK(std::all_of(out.end() - kPadding * kOutRow, out.end(), [](float x) { return x == 0.0f; }));
  }

  const std::vector<float>& output(size_t r) const { return outputs_[r]; }

 private:
  const std::vector<Sequence>& sequences_;
  CacheType type_;
  int64_t max_blocks_ = 0;
  std::vector<int64_t> done_;
  std::vector<int32_t> tables_;
  std::vector<uint8_t> memory_;
  std::vector<std::vector<float>> outputs_;
};

// Dense causal attention.
std::vector<double> expected(const Sequence& s) {
  std::vector<double> out(s.length * kOutRow);
  for (int64_t t = 0; t < s.length; ++t) {
    for (int64_t head = 0; head < kHeads; ++head) {
      double sum = 0.0;
      double* to = out.data() + t * kOutRow + head * kValueDim;
      for (int64_t u = 0; u <= t; ++u) {
        double score = 0.0;
        for (int64_t i = 0; i < kHeadDim; ++i) {
          score += double(s.q[t * kRow + head * kHeadDim + i]) * s.entries[u * kHeadDim + i];
        }
        const double weight = std::exp(score * double(kScale));
        sum += weight;
        for (int64_t i = 0; i < kValueDim; ++i) to[i] += weight * s.entries[u * kHeadDim + i];
      }
      for (int64_t i = 0; i < kValueDim; ++i) to[i] /= sum;
    }
  }
  return out;
}

constexpr CacheType kTypes[] = {CacheType::kFloat32, CacheType::kBfloat16, CacheType::kInt8};

}  // namespace

TEST(latent_attention, equals_dense_attention) {
  ThreadPool threads(4);
  const std::vector<Sequence> sequences = {make_sequence(70, 1), make_sequence(401, 4), make_sequence(1, 7)};
  for (const CacheType type : kTypes) {
    Cache cache(sequences, type);
    cache.step({64, 390, 0}, threads.pool());
    cache.step({5, 10, 1}, threads.pool());
    cache.step({1, 1, 0}, threads.pool());
    // What the lower-precision types round off the entries.
    const double error = type == CacheType::kFloat32 ? 2e-5 : type == CacheType::kBfloat16 ? 0.02 : 0.06;
    for (size_t r = 0; r < sequences.size(); ++r) check_close(cache.output(r), expected(sequences[r]), 0.0, error);
  }
}

TEST(latent_attention, of_a_request_does_not_depend_on_others_steps_or_threads) {
  ThreadPool threads(4);
  const std::vector<Sequence> sequences = {make_sequence(70, 1), make_sequence(401, 4)};
  for (const CacheType type : kTypes) {
    Cache together(sequences, type);
    together.step({70, 401}, threads.pool());
    for (size_t r = 0; r < sequences.size(); ++r) {
      const std::vector<Sequence> one = {sequences[r]};
      Cache alone(one, type);
      int64_t left = one[0].length;
      for (const int64_t tokens : {1, 30, 1, 8}) {
        alone.step({tokens}, no_pool());
        left -= tokens;
      }
      alone.step({left}, no_pool());
      CHECK(alone.output(0) == together.output(r), r, static_cast<int>(type));
    }
  }
}
