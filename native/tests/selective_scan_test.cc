#include <algorithm>

#include "states.h"
#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

struct Sizes {
  int channels, state_size;
};

struct Inputs {
  Sizes sizes;
  std::vector<float> x, dt, a, b, c, d;

  Inputs(const Sizes& of, int64_t rows) : sizes(of) {
    x = normal(rows * of.channels, 1);
    dt = normal(rows * of.channels, 2);
    for (float& value : dt) value = std::log1p(std::exp(value));
    a = normal(state_size(), 3);
    for (float& value : a) value = -std::exp(value);
    b = normal(rows * of.state_size, 4);
    c = normal(rows * of.state_size, 5);
    d = normal(of.channels, 6);
  }

  SelectiveScan arguments(int64_t first_row, int64_t rows, std::vector<float>& state, float* y,
                          const StateStep& step) const {
    SelectiveScan s{};
    s.x = x.data() + first_row * sizes.channels;
    s.dt = dt.data() + first_row * sizes.channels;
    s.a = a.data();
    s.b = b.data() + first_row * sizes.state_size;
    s.c = c.data() + first_row * sizes.state_size;
    s.d = d.data();
    s.state = state.data();
    s.y = y;
    s.slots = step.slots();
    s.num_tokens = rows;
    s.num_channels = sizes.channels;
    s.state_size = sizes.state_size;
    return s;
  }

  int64_t state_size() const { return static_cast<int64_t>(sizes.channels) * sizes.state_size; }
  int64_t out_size() const { return sizes.channels; }

  void spoil(int64_t first_row) { std::fill(dt.begin() + first_row * sizes.channels, dt.end(), std::nanf("")); }

  // The formula, for one token.
  void token(int64_t row, std::vector<double>& state, std::vector<double>& y) const {
    for (int i = 0; i < sizes.channels; ++i) {
      const int64_t at = row * sizes.channels + i;
      double sum = static_cast<double>(d[i]) * x[at];
      for (int n = 0; n < sizes.state_size; ++n) {
        double& s = state[static_cast<int64_t>(n) * sizes.channels + i];
        const double decay = std::exp(static_cast<double>(dt[at]) * a[static_cast<int64_t>(i) * sizes.state_size + n]);
        s = decay * s + static_cast<double>(dt[at]) * x[at] * b[row * sizes.state_size + n];
        sum += s * c[row * sizes.state_size + n];
      }
      y[at] = sum;
    }
  }
};

const Sizes kSizes[] = {{1, 1}, {16, 16}, {70, 5}, {200, 16}};

}  // namespace

TEST(selective_scan, equals_the_formula) {
  for (const Sizes& sizes : kSizes) check_formula<Inputs>(sizes, kernels().selective_scan, 1e-4, 1e-5);
}

TEST(selective_scan, of_a_request_does_not_depend_on_chunks_batch_or_threads) {
  for (const Sizes& sizes : kSizes) check_independence<Inputs>(sizes, kernels().selective_scan);
}
