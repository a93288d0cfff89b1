#include <algorithm>

#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr int64_t kHeads = 6, kKvHeads = 2, kHeadDim = 48, kBlockSize = 32;
constexpr int64_t kExtent = 29;  // of biases
constexpr int64_t kRow = kHeads * kHeadDim, kKvRow = kKvHeads * kHeadDim;

struct Options {
  CacheType type = CacheType::kFloat32;
  int64_t window = 1 << 30;
  int64_t chunk_size = 1 << 30;
  int64_t lookahead = 0;
  float soft_cap = 0.0f;
  std::vector<float> sinks = {};
  bool has_bias = false;
  bool has_sinks_of_tokens = false;
};

struct Sequence {
  int64_t length;
  std::vector<float> q, k, v;  // [length, heads, D]
  std::vector<float> bias;     // [length, H, kExtent]
  std::vector<float> sinks;    // [length, H]
};

Sequence make_sequence(int64_t length, uint32_t seed) {
  return {length,
          normal(length * kRow, seed),
          normal(length * kKvRow, seed + 1),
          normal(length * kKvRow, seed + 2),
          normal(length * kHeads * kExtent, seed + 3),
          normal(length * kHeads, seed + 4)};
}

int64_t entry_bytes(CacheType type) { return type == CacheType::kFloat32 ? 4 : type == CacheType::kBfloat16 ? 2 : 1; }

int64_t cache_block_bytes(CacheType type) {
  const int64_t scales = type == CacheType::kInt8 ? 2 * kBlockSize * 4 : 0;
  return kKvHeads * (2 * kBlockSize * kHeadDim * entry_bytes(type) + scales);
}

// Sequences in a cache, fed to the kernel step by step. Blocks lie scattered; those not written are NaN.
class Cache {
 public:
  Cache(const std::vector<Sequence>& sequences, const Options& options) : sequences_(sequences), options_(options) {
    for (const Sequence& s : sequences) {
      max_blocks_ = std::max<int64_t>(max_blocks_, (s.length + kBlockSize - 1) / kBlockSize);
      outputs_.emplace_back(s.length * kRow, std::nanf(""));
    }
    done_.resize(sequences.size());
    const int64_t count = static_cast<int64_t>(sequences.size());
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < max_blocks_; ++i) tables_.push_back(static_cast<int32_t>(i * count + count - 1 - r));
    }
    memory_.assign(count * max_blocks_ * cache_block_bytes(options.type), 0xff);
  }

  // The next tokens[r] of each sequence.
  void step(const std::vector<int64_t>& tokens, const Pool& pool) {
    std::vector<float> q, k, v, bias, sinks;
    std::vector<int32_t> lengths, starts = {0};
    for (size_t r = 0; r < tokens.size(); ++r) {
      const Sequence& s = sequences_[r];
      const int64_t begin = done_[r], end = begin + tokens[r];
      CHECK(end <= s.length);
      q.insert(q.end(), s.q.begin() + begin * kRow, s.q.begin() + end * kRow);
      k.insert(k.end(), s.k.begin() + begin * kKvRow, s.k.begin() + end * kKvRow);
      v.insert(v.end(), s.v.begin() + begin * kKvRow, s.v.begin() + end * kKvRow);
      bias.insert(bias.end(), s.bias.begin() + begin * kHeads * kExtent, s.bias.begin() + end * kHeads * kExtent);
      sinks.insert(sinks.end(), s.sinks.begin() + begin * kHeads, s.sinks.begin() + end * kHeads);
      lengths.push_back(static_cast<int32_t>(end));
      starts.push_back(static_cast<int32_t>(starts.back() + tokens[r]));
    }
    constexpr int64_t kPadding = 3;
    const int64_t num_tokens = starts.back() + kPadding;
    for (auto* rows : {&q, &k, &v}) rows->resize(num_tokens * (rows == &q ? kRow : kKvRow), std::nanf(""));
    std::vector<float> out(num_tokens * kRow, std::nanf(""));
    PagedAttention a{};
    a.q = q.data();
    a.k = k.data();
    a.v = v.data();
    a.cache = memory_.data();
    a.seq_lens = lengths.data();
    a.block_tables = tables_.data();
    a.query_start_loc = starts.data();
    a.sinks = options_.has_sinks_of_tokens ? sinks.data() : options_.sinks.empty() ? nullptr : options_.sinks.data();
    a.sinks_stride = options_.has_sinks_of_tokens ? kHeads : 0;
    a.bias = options_.has_bias ? bias.data() : nullptr;
    a.bias_extent = options_.has_bias ? kExtent : 0;
    a.out = out.data();
    a.type = options_.type;
    a.num_tokens = num_tokens;
    a.num_requests = static_cast<int64_t>(tokens.size());
    a.num_heads = kHeads;
    a.num_kv_heads = kKvHeads;
    a.head_dim = kHeadDim;
    a.block_size = kBlockSize;
    a.max_blocks = max_blocks_;
    a.window = options_.window;
    a.chunk_size = options_.chunk_size;
    a.lookahead = options_.lookahead;
    a.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
    a.soft_cap = options_.soft_cap;
    kernels().paged_attention(a, pool);
    for (size_t r = 0; r < tokens.size(); ++r) {
      std::copy(out.begin() + starts[r] * kRow, out.begin() + starts[r + 1] * kRow,
                outputs_[r].begin() + done_[r] * kRow);
      done_[r] += tokens[r];
    }
    CHECK(std::all_of(out.end() - kPadding * kRow, out.end(), [](float x) { return x == 0.0f; }));
    check_reading_alone(a, out, pool);
  }

  const std::vector<float>& output(size_t r) const { return outputs_[r]; }

 private:
  // Without keys and values, the same queries read what is in the cache, and write nothing.
  void check_reading_alone(PagedAttention a, const std::vector<float>& expected, const Pool& pool) {
    const std::vector<uint8_t> before = memory_;
    std::vector<float> out(expected.size(), std::nanf(""));
    a.k = a.v = nullptr;
    a.out = out.data();
    kernels().paged_attention(a, pool);
    CHECK(out == expected);
    CHECK(memory_ == before);
  }

  const std::vector<Sequence>& sequences_;
  Options options_;
  int64_t max_blocks_ = 0;
  std::vector<int64_t> done_;
  std::vector<int32_t> tables_;
  std::vector<uint8_t> memory_;
  std::vector<std::vector<float>> outputs_;
};

// Dense attention.
std::vector<double> expected(const Sequence& s, const Options& options) {
  std::vector<double> out(s.q.size());
  for (int64_t t = 0; t < s.length; ++t) {
    for (int64_t head = 0; head < kHeads; ++head) {
      const int64_t kv_head = head / (kHeads / kKvHeads);
      double sum = options.sinks.empty() ? 0.0 : std::exp(double(options.sinks[head]));
      if (options.has_sinks_of_tokens) sum = std::exp(double(s.sinks[t * kHeads + head]));
      double* to = out.data() + t * kRow + head * kHeadDim;
      const int64_t first = std::max(t - options.window + 1, t / options.chunk_size * options.chunk_size);
      const int64_t end = std::min(t + options.lookahead + 1, s.length);
      for (int64_t u = std::max<int64_t>(0, first); u < end; ++u) {
        const int64_t at = u * kKvRow + kv_head * kHeadDim;
        double score = 0.0;
        for (int64_t i = 0; i < kHeadDim; ++i) score += double(s.q[t * kRow + head * kHeadDim + i]) * s.k[at + i];
        score /= std::sqrt(double(kHeadDim));
        const bool is_biased = options.has_bias && u <= t && t - u < kExtent;
        if (is_biased) score += s.bias[(t * kHeads + head) * kExtent + t - u];
        if (options.soft_cap != 0.0f) score = options.soft_cap * std::tanh(score / options.soft_cap);
        const double weight = std::exp(score);
        sum += weight;
        for (int64_t i = 0; i < kHeadDim; ++i) to[i] += weight * s.v[at + i];
      }
      for (int64_t i = 0; i < kHeadDim; ++i) to[i] /= sum;
    }
  }
  return out;
}

std::vector<Options> all_options() {
  std::vector<Options> out;
  for (const CacheType type : {CacheType::kFloat32, CacheType::kBfloat16, CacheType::kInt8}) {
    out.push_back({type});
    out.push_back({type, 37, 100, 0, 5.0f, {-1.0f, 0.0f, 0.5f, 1.0f, 2.0f, -3.0f}});
    out.push_back({type, 1 << 30, 1 << 30, 0, 0.0f, {}, true, true});
    out.push_back({type, 17, 1 << 30, 0, 5.0f, {}, true});
  }
  return out;
}

}  // namespace

TEST(attention, equals_dense_attention) {
  ThreadPool threads(4);
  const std::vector<Sequence> sequences = {make_sequence(70, 1), make_sequence(301, 4), make_sequence(1, 7)};
  for (const Options& options : all_options()) {
    Cache cache(sequences, options);
    cache.step({64, 290, 0}, threads.pool());
    cache.step({5, 10, 1}, threads.pool());
    cache.step({1, 1, 0}, threads.pool());
    // What the lower-precision types round off the keys and values.
    const double error = options.type == CacheType::kFloat32    ? 2e-5
                         : options.type == CacheType::kBfloat16 ? 0.02
                                                                : 0.06;
    for (size_t r = 0; r < sequences.size(); ++r)
      check_close(cache.output(r), expected(sequences[r], options), 0.0, error);
  }
}

TEST(attention, of_a_request_does_not_depend_on_others_steps_or_threads) {
  ThreadPool threads(4);
  const std::vector<Sequence> sequences = {make_sequence(70, 1), make_sequence(301, 4)};
  for (const Options& options : all_options()) {
    Cache together(sequences, options);
    together.step({70, 301}, threads.pool());
    for (size_t r = 0; r < sequences.size(); ++r) {
      const std::vector<Sequence> one = {sequences[r]};
      Cache alone(one, options);
      int64_t left = one[0].length;
      for (const int64_t tokens : {1, 30, 1, 8}) {
        alone.step({tokens}, no_pool());
        left -= tokens;
      }
      alone.step({left}, no_pool());
      CHECK(alone.output(0) == together.output(r), r, static_cast<int>(options.type));
    }
  }
}

TEST(attention, to_tokens_after_a_token_of_whole_sequences) {
  ThreadPool threads(4);
  const std::vector<Sequence> sequences = {make_sequence(70, 1), make_sequence(301, 4), make_sequence(1, 7)};
  for (const int64_t lookahead : {int64_t{1} << 40, int64_t{36}}) {
    const Options options{CacheType::kFloat32, lookahead + 1, 1 << 30, lookahead};
    Cache together(sequences, options);
    together.step({70, 301, 1}, threads.pool());
    for (size_t r = 0; r < sequences.size(); ++r) {
      check_close(together.output(r), expected(sequences[r], options), 0.0, 2e-5);
      const std::vector<Sequence> one = {sequences[r]};
      Cache alone(one, options);
      alone.step({one[0].length}, no_pool());
      CHECK(alone.output(0) == together.output(r), r, lookahead);
    }
  }
}
