#include <algorithm>

#include "states.h"
#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

struct Sizes {
  int heads, groups, head_dim, state_size;
  bool has_d;
};

struct Inputs {
  Sizes sizes;
  std::vector<float> x, dt, a, b, c, d;

  Inputs(const Sizes& of, int64_t rows) : sizes(of) {
    x = normal(rows * of.heads * of.head_dim, 1);
    dt = normal(rows * of.heads, 2);
    for (float& value : dt) value = std::log1p(std::exp(value));
    a = normal(of.heads, 3);
    for (float& value : a) value = -std::exp(value);
    b = normal(rows * of.groups * of.state_size, 4);
    c = normal(rows * of.groups * of.state_size, 5);
    d = normal(of.heads, 6);
  }

  Ssd arguments(int64_t first_row, int64_t rows, std::vector<float>& state, float* y, const StateStep& step) const {
    Ssd s{};
    s.x = x.data() + first_row * sizes.heads * sizes.head_dim;
    s.dt = dt.data() + first_row * sizes.heads;
    s.a = a.data();
    s.b = b.data() + first_row * sizes.groups * sizes.state_size;
    s.c = c.data() + first_row * sizes.groups * sizes.state_size;
    s.d = sizes.has_d ? d.data() : nullptr;
    s.state = state.data();
    s.y = y;
    s.slots = step.slots();
    s.num_tokens = rows;
    s.num_heads = sizes.heads;
    s.num_groups = sizes.groups;
    s.head_dim = sizes.head_dim;
    s.state_size = sizes.state_size;
    return s;
  }

  int64_t state_size() const { return static_cast<int64_t>(sizes.heads) * sizes.head_dim * sizes.state_size; }
  int64_t out_size() const { return static_cast<int64_t>(sizes.heads) * sizes.head_dim; }

  void spoil(int64_t first_row) { std::fill(dt.begin() + first_row * sizes.heads, dt.end(), std::nanf("")); }

  // The formula, for one token.
  void token(int64_t row, std::vector<double>& state, std::vector<double>& y) const {
    for (int h = 0; h < sizes.heads; ++h) {
      const int64_t group = row * sizes.groups + h / (sizes.heads / sizes.groups);
      const double step = dt[row * sizes.heads + h], decay = std::exp(step * a[h]);
      for (int p = 0; p < sizes.head_dim; ++p) {
        const int64_t at = (row * sizes.heads + h) * sizes.head_dim + p;
        double* s = state.data() + (static_cast<int64_t>(h) * sizes.head_dim + p) * sizes.state_size;
        double sum = sizes.has_d ? static_cast<double>(d[h]) * x[at] : 0.0;
        for (int n = 0; n < sizes.state_size; ++n) {
          s[n] = decay * s[n] + step * x[at] * b[group * sizes.state_size + n];
          sum += s[n] * c[group * sizes.state_size + n];
        }
        y[at] = sum;
      }
    }
  }
};

const Sizes kSizes[] = {{1, 1, 1, 1, true}, {4, 2, 16, 32, true}, {3, 1, 21, 24, true}, {2, 2, 64, 128, false}};

}  // namespace

TEST(ssd, equals_the_formula) {
  for (const Sizes& sizes : kSizes) check_formula<Inputs>(sizes, kernels().ssd, 1e-4, 1e-5);
}

TEST(ssd, of_a_request_does_not_depend_on_chunks_batch_or_threads) {
  for (const Sizes& sizes : kSizes) check_independence<Inputs>(sizes, kernels().ssd);
}
