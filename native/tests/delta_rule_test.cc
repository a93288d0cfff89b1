#include <algorithm>

#include "states.h"
#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr float kEpsilon = 1e-6f;

struct Sizes {
  int key_heads, heads, key_dim, value_dim;
  bool decays_by_channel, has_norm;
};

struct Inputs {
  Sizes sizes;
  std::vector<float> q, k, v, log_decay, beta;

  Inputs(const Sizes& of, int64_t rows) : sizes(of) {
    const int decays = of.decays_by_channel ? of.key_dim : 1;
    q = normal(rows * of.key_heads * of.key_dim, 1);
    k = normal(rows * of.key_heads * of.key_dim, 2);
    // Without the norm, keys are to be shorter than one, or the states grow without bound.
    for (float& x : k) x *= of.has_norm ? 3.0f : 0.5f / std::sqrt(static_cast<float>(of.key_dim));
    v = normal(rows * of.heads * of.value_dim, 3);
    log_decay = normal(rows * of.heads * decays, 4);
    for (float& x : log_decay) x = -std::abs(x);
    beta = normal(rows * of.heads, 5);
    for (float& x : beta) x = 1.0f / (1.0f + std::exp(-x));
  }

  GatedDeltaRule arguments(int64_t first_row, int64_t rows, std::vector<float>& state, float* out,
                           const StateStep& step) const {
    const int decays = sizes.decays_by_channel ? sizes.key_dim : 1;
    GatedDeltaRule a{};
    a.q = q.data() + first_row * sizes.key_heads * sizes.key_dim;
    a.k = k.data() + first_row * sizes.key_heads * sizes.key_dim;
    a.v = v.data() + first_row * sizes.heads * sizes.value_dim;
    a.log_decay = log_decay.data() + first_row * sizes.heads * decays;
    a.beta = beta.data() + first_row * sizes.heads;
    a.state = state.data();
    a.out = out;
    a.slots = step.slots();
    a.num_tokens = rows;
    a.num_key_heads = sizes.key_heads;
    a.num_heads = sizes.heads;
    a.key_dim = sizes.key_dim;
    a.value_dim = sizes.value_dim;
    a.num_decays = decays;
    a.has_norm = sizes.has_norm;
    a.epsilon = kEpsilon;
    a.scale = 0.3f;
    return a;
  }

  int64_t state_size() const { return static_cast<int64_t>(sizes.heads) * sizes.key_dim * sizes.value_dim; }
  int64_t out_size() const { return static_cast<int64_t>(sizes.heads) * sizes.value_dim; }

  void spoil(int64_t first_row) { std::fill(beta.begin() + first_row * sizes.heads, beta.end(), std::nanf("")); }

  // The formula, for one token.
  void token(int64_t row, std::vector<double>& state, std::vector<double>& out) const {
    const int keys = sizes.key_dim, values = sizes.value_dim;
    for (int h = 0; h < sizes.heads; ++h) {
      const int64_t of_head = row * sizes.heads + h;
      const int64_t of_key = row * sizes.key_heads + h / (sizes.heads / sizes.key_heads);
      std::vector<double> query(q.begin() + of_key * keys, q.begin() + (of_key + 1) * keys);
      std::vector<double> key(k.begin() + of_key * keys, k.begin() + (of_key + 1) * keys);
      if (sizes.has_norm) {
        for (std::vector<double>* vector : {&query, &key}) {
          double squares = kEpsilon;
          for (const double x : *vector) squares += x * x;
          for (double& x : *vector) x /= std::sqrt(squares);
        }
      }
      double* s = state.data() + static_cast<int64_t>(h) * keys * values;
      for (int i = 0; i < keys; ++i) {
        const double log = log_decay[sizes.decays_by_channel ? of_head * keys + i : of_head];
        for (int j = 0; j < values; ++j) s[i * values + j] *= std::exp(log);
      }
      for (int j = 0; j < values; ++j) {
        double read = 0.0, result = 0.0;
        for (int i = 0; i < keys; ++i) read += key[i] * s[i * values + j];
        const double update = beta[of_head] * (v[of_head * values + j] - read);
        for (int i = 0; i < keys; ++i) {
          s[i * values + j] += key[i] * update;
          result += static_cast<double>(0.3f) * query[i] * s[i * values + j];
        }
        out[of_head * values + j] = result;
      }
    }
  }
};

const Sizes kSizes[] = {
    {1, 1, 1, 1, false, true},  {2, 4, 16, 32, false, true},  {1, 3, 24, 40, false, true},
    {2, 2, 33, 17, true, true}, {1, 2, 128, 128, true, true}, {2, 6, 10, 70, false, false},
};

}  // namespace

TEST(delta_rule, equals_the_formula) {
  for (const Sizes& sizes : kSizes) check_formula<Inputs>(sizes, kernels().gated_delta_rule, 2e-5, 2e-5);
}

TEST(delta_rule, of_a_request_does_not_depend_on_chunks_batch_or_threads) {
  for (const Sizes& sizes : kSizes) check_independence<Inputs>(sizes, kernels().gated_delta_rule);
}
