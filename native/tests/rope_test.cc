#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr int64_t kQHeads = 3, kKHeads = 1;
constexpr float kEpsilon = 1e-6f;

struct Case {
  int64_t tokens, head_dim, pairs;
  bool interleaved, with_norms;
  std::vector<float> q, k, cos, sin, q_norm, k_norm;
};

Case make_case(int64_t tokens, int64_t head_dim, int64_t pairs, bool interleaved, bool with_norms) {
  Case c{tokens,
         head_dim,
         pairs,
         interleaved,
         with_norms,
         normal(tokens * kQHeads * head_dim, 1),
         normal(tokens * kKHeads * head_dim, 2),
         {},
         {},
         normal(head_dim, 3),
         normal(head_dim, 4)};
  for (const float angle : normal(tokens * pairs, 5)) {
    c.cos.push_back(std::cos(angle));
    c.sin.push_back(std::sin(angle));
  }
  return c;
}

struct Rotated {
  std::vector<float> q, k;
};

// Of tokens from `first` on.
Rotated run(const Case& c, int64_t first, int64_t tokens, const Pool& pool) {
  const int64_t q_row = kQHeads * c.head_dim, k_row = kKHeads * c.head_dim;
  Rotated out{std::vector<float>(tokens * q_row, std::nanf("")), std::vector<float>(tokens * k_row, std::nanf(""))};
  kernels().rotary_embedding({c.q.data() + first * q_row, c.k.data() + first * k_row, c.cos.data() + first * c.pairs,
                              c.sin.data() + first * c.pairs, c.with_norms ? c.q_norm.data() : nullptr,
                              c.with_norms ? c.k_norm.data() : nullptr, out.q.data(), out.k.data(), tokens, kQHeads,
                              kKHeads, c.head_dim, c.pairs, c.interleaved, kEpsilon},
                             pool);
  return out;
}

std::vector<double> expected(const Case& c, const std::vector<float>& x, const std::vector<float>& norm,
                             int64_t heads) {
  std::vector<double> out(x.begin(), x.end());
  for (int64_t row = 0; row < c.tokens * heads; ++row) {
    double* head = out.data() + row * c.head_dim;
    if (c.with_norms) {
      double squares = 0.0;
      for (int64_t i = 0; i < c.head_dim; ++i) squares += head[i] * head[i];
      for (int64_t i = 0; i < c.head_dim; ++i) head[i] *= norm[i] / std::sqrt(squares / c.head_dim + kEpsilon);
    }
    for (int64_t pair = 0; pair < c.pairs; ++pair) {
      double& first = head[c.interleaved ? 2 * pair : pair];
      double& second = head[c.interleaved ? 2 * pair + 1 : pair + c.pairs];
      const double cos = c.cos[row / heads * c.pairs + pair], sin = c.sin[row / heads * c.pairs + pair];
      const double x0 = first, x1 = second;
      first = x0 * cos - x1 * sin;
      second = x0 * sin + x1 * cos;
    }
  }
  return out;
}

// Calls function(case) for heads rotated whole and in part, with both kinds of pairs, with and without norms.
template <typename Function>
void for_each_case(int64_t tokens, const Function& function) {
  for (const int64_t head_dim : {8, 66, 128}) {
    for (const int64_t pairs : {head_dim / 2, head_dim / 4}) {
      for (const bool interleaved : {false, true}) {
        for (const bool with_norms : {false, true}) {
          function(make_case(tokens, head_dim, pairs, interleaved, with_norms));
        }
      }
    }
  }
}

}  // namespace

TEST(rope, turns_each_pair_by_its_angle) {
  ThreadPool threads(4);
  for (const int64_t tokens : {0, 1, 150}) {
    for_each_case(tokens, [&](const Case& c) {
      const Rotated rotated = run(c, 0, tokens, threads.pool());
      check_close(rotated.q, expected(c, c.q, c.q_norm, kQHeads), 1e-5, 1e-5);
      check_close(rotated.k, expected(c, c.k, c.k_norm, kKHeads), 1e-5, 1e-5);
    });
  }
}

TEST(rope, of_a_token_does_not_depend_on_tokens_or_threads) {
  ThreadPool threads(4);
  constexpr int64_t kTokens = 150;
  for_each_case(kTokens, [&](const Case& c) {
    const Rotated together = run(c, 0, kTokens, threads.pool());
    for (const int64_t token : {0, 1, 77, 149}) {
      const Rotated alone = run(c, token, 1, no_pool());
      const int64_t q_row = kQHeads * c.head_dim, k_row = kKHeads * c.head_dim;
      CHECK(std::equal(alone.q.begin(), alone.q.end(), together.q.begin() + token * q_row), token);
      CHECK(std::equal(alone.k.begin(), alone.k.end(), together.k.begin() + token * k_row), token);
    }
  });
}
