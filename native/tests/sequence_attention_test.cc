#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr int64_t kHeads = 6, kKvHeads = 2;

// A row of sequences, seen as far back as a window allows, and ahead up to their ends if `is_causal` is false.
struct Case {
  std::vector<int64_t> lengths;
  int64_t window;
  bool is_causal;
};

struct Ranges {
  std::vector<int32_t> first, last;
};

Ranges ranges_of(const Case& c) {
  Ranges ranges;
  int64_t start = 0;
  for (const int64_t length : c.lengths) {
    for (int64_t i = 0; i < length; ++i) {
      ranges.first.push_back(static_cast<int32_t>(start + std::max<int64_t>(0, i - c.window + 1)));
      ranges.last.push_back(static_cast<int32_t>(c.is_causal ? start + i : start + length - 1));
    }
    start += length;
  }
  return ranges;
}

struct Results {
  std::vector<float> out, log_sums, q, k, v;
};

struct Inputs {
  std::vector<float> q, k, v, out_gradient;
  Ranges ranges;
  int64_t tokens, head_dim;
  float scale;

  Inputs(const Case& c, int64_t head_dim) : ranges(ranges_of(c)), head_dim(head_dim), scale(0.2f) {
    tokens = static_cast<int64_t>(ranges.first.size());
    q = normal(static_cast<size_t>(tokens * kHeads * head_dim), 1);
    k = normal(static_cast<size_t>(tokens * kKvHeads * head_dim), 2);
    v = normal(static_cast<size_t>(tokens * kKvHeads * head_dim), 3);
    out_gradient = normal(q.size(), 4);
  }

  Results run(const Pool& pool) const {
    Results r;
    r.out.resize(q.size());
    r.log_sums.resize(static_cast<size_t>(tokens * kHeads));
    r.q.resize(q.size());
    r.k.resize(k.size());
    r.v.resize(v.size());
    const SequenceAttention a{q.data(),
                              k.data(),
                              v.data(),
                              ranges.first.data(),
                              ranges.last.data(),
                              r.out.data(),
                              r.log_sums.data(),
                              tokens,
                              tokens,
                              kHeads,
                              kKvHeads,
                              head_dim,
                              scale};
    kernels().sequence_attention(a, pool);
    kernels().sequence_attention_gradient({a, out_gradient.data(), r.q.data(), r.k.data(), r.v.data()}, pool);
    return r;
  }
};

double dot(const float* a, const float* b, int64_t size) {
  double sum = 0.0;
  for (int64_t i = 0; i < size; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

struct Expected {
  std::vector<double> out, log_sums, q, k, v;
};

// The definition, in double precision.
Expected expect(const Inputs& in) {
  const int64_t d = in.head_dim;
  Expected e{std::vector<double>(in.q.size()), std::vector<double>(static_cast<size_t>(in.tokens * kHeads)),
             std::vector<double>(in.q.size()), std::vector<double>(in.k.size()), std::vector<double>(in.v.size())};
  for (int64_t t = 0; t < in.tokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t row = (h * in.tokens + t) * d, kv = h / (kHeads / kKvHeads);
      const auto key_row = [&](int64_t s) { return (kv * in.tokens + s) * d; };
      std::vector<double> weights;
      double total = 0.0;
      for (int64_t s = in.ranges.first[t]; s <= in.ranges.last[t]; ++s) {
        weights.push_back(std::exp(in.scale * dot(&in.q[row], &in.k[key_row(s)], d)));
        total += weights.back();
      }
      e.log_sums[h * in.tokens + t] = std::log(total);
      double change = 0.0;
      for (int64_t s = in.ranges.first[t]; s <= in.ranges.last[t]; ++s) {
        double& weight = weights[s - in.ranges.first[t]];
        weight /= total;
        change += weight * dot(&in.v[key_row(s)], &in.out_gradient[row], d);
        for (int64_t i = 0; i < d; ++i) e.out[row + i] += weight * in.v[key_row(s) + i];
      }
      for (int64_t s = in.ranges.first[t]; s <= in.ranges.last[t]; ++s) {
        const double weight = weights[s - in.ranges.first[t]];
        const double by_score = weight * (dot(&in.v[key_row(s)], &in.out_gradient[row], d) - change) * in.scale;
        for (int64_t i = 0; i < d; ++i) {
          e.q[row + i] += by_score * in.k[key_row(s) + i];
          e.k[key_row(s) + i] += by_score * in.q[row + i];
          e.v[key_row(s) + i] += weight * in.out_gradient[row + i];
        }
      }
    }
  }
  return e;
}

const std::vector<Case> kCases = {
    {{1}, 1000, true},        {{16}, 1000, true},         {{150}, 1000, true},    {{3, 40, 1, 90, 17}, 1000, true},
    {{3, 130, 20}, 37, true}, {{70, 1, 65}, 1000, false}, {{100, 30}, 20, false},
};

}  // namespace

TEST(sequence_attention, and_its_derivative_equal_the_definition) {
  ThreadPool threads(3);
  for (const Case& c : kCases) {
    for (const int64_t head_dim : {16, 48, 128}) {
      const Inputs in(c, head_dim);
      const Results r = in.run(threads.pool());
      const Expected e = expect(in);
      check_close(r.out, e.out, 1e-5, 1e-5);
      check_close(r.log_sums, e.log_sums, 1e-5, 1e-5);
      check_close(r.q, e.q, 2e-5, 2e-5);
      check_close(r.k, e.k, 2e-5, 2e-5);
      check_close(r.v, e.v, 2e-5, 2e-5);
    }
  }
}

TEST(sequence_attention, has_the_same_results_on_any_number_of_threads) {
  ThreadPool threads(4);
  const Inputs in({{120, 7, 200}, 1000, true}, 32);
  const Results alone = in.run(no_pool()), shared = in.run(threads.pool());
  CHECK(alone.out == shared.out && alone.q == shared.q && alone.k == shared.k && alone.v == shared.v);
}

TEST(sequence_attention, of_large_scores_is_finite) {
  Inputs in({{50}, 1000, true}, 16);
  for (float& value : in.q) value *= 300.0f;
  const Results r = in.run(no_pool());
  for (const std::vector<float>* values : {&r.out, &r.log_sums, &r.q, &r.k, &r.v}) {
    for (const float value : *values) CHECK(std::isfinite(value));
  }
}

TEST(sequence_attention, of_some_queries_has_their_results) {
  const Inputs in({{100, 30, 70}, 1000, false}, 32);
  const Results all = in.run(no_pool());
  constexpr int64_t kFirst = 32, kCount = 90;  // a whole number of tiles before them
  std::vector<float> q, out(kHeads * kCount * 32), log_sums(kHeads * kCount);
  for (int64_t h = 0; h < kHeads; ++h) {
    const float* head = in.q.data() + (h * in.tokens + kFirst) * 32;
    q.insert(q.end(), head, head + kCount * 32);
  }
  const SequenceAttention a{q.data(),
                            in.k.data(),
                            in.v.data(),
                            in.ranges.first.data() + kFirst,
                            in.ranges.last.data() + kFirst,
                            out.data(),
                            log_sums.data(),
                            kCount,
                            in.tokens,
                            kHeads,
                            kKvHeads,
                            32,
                            in.scale};
  kernels().sequence_attention(a, no_pool());
  for (int64_t h = 0; h < kHeads; ++h) {
    const float* expected = all.out.data() + (h * in.tokens + kFirst) * 32;
    CHECK(std::equal(expected, expected + kCount * 32, out.data() + h * kCount * 32));
  }
}
