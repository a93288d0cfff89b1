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
    a = normal(of_state(), 3);
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

  int64_t of_state() const { return static_cast<int64_t>(sizes.channels) * sizes.state_size; }
  int64_t of_y() const { return sizes.channels; }

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
  ThreadPool threads(3);
  const StateStep step = mixed_step();
  const int64_t rows = step.rows() + kPaddingRows;
  for (const Sizes& sizes : kSizes) {
    Inputs inputs(sizes, rows);
    for (int64_t i = step.rows() * sizes.channels; i < rows * sizes.channels; ++i) inputs.dt[i] = std::nanf("");
    std::vector<float> state = normal(kMixedSlots * inputs.of_state(), 7), y(rows * inputs.of_y(), 1.0f);
    std::vector<double> expected(y.size(), 0.0);
    const std::vector<double> after = run_tokens(step, state, inputs.of_state(), [&](int64_t row, auto& of_request) {
      inputs.token(row, of_request, expected);
    });
    const std::vector<float> before = state;
    kernels().selective_scan(inputs.arguments(0, rows, state, y.data(), step), threads.pool());
    check_close(y, expected, 1e-4, 1e-4);
    check_close(state, after, 1e-4, 1e-5);
    for (const int unused : {2, 7, 9}) {
      const auto at = unused * inputs.of_state();
      CHECK(std::equal(before.begin() + at, before.begin() + at + inputs.of_state(), state.begin() + at), unused);
    }
  }
}

TEST(selective_scan, of_a_request_does_not_depend_on_chunks_company_or_threads) {
  ThreadPool threads(4);
  constexpr int kTokens = 37, kKept = 11;
  for (const Sizes& sizes : kSizes) {
    const Inputs inputs(sizes, kTokens);
    StateStep whole;
    whole.add(kTokens, -1, 0, 1, kKept);
    std::vector<float> expected(kTokens * inputs.of_y()), state(2 * inputs.of_state());
    kernels().selective_scan(inputs.arguments(0, kTokens, state, expected.data(), whole), no_pool());
    for (const int chunk : {1, 2, 7, 36}) {
      for (const int first_row : {0, kKept}) {
        std::vector<float> slots = state, y(expected.size());
        slots.resize(3 * inputs.of_state());
        for (int row = first_row; row < kTokens; row += chunk) {
          const int size = std::min(chunk, kTokens - row);
          StateStep step;
          step.add(size, row == 0 ? -1 : (row == first_row ? 1 : 2), 2);
          float* out = y.data() + row * inputs.of_y();
          kernels().selective_scan(inputs.arguments(row, size, slots, out, step), threads.pool());
        }
        CHECK(std::equal(y.begin() + first_row * inputs.of_y(), y.end(), expected.begin() + first_row * inputs.of_y()),
              chunk, first_row);
        CHECK(std::equal(state.begin(), state.begin() + inputs.of_state(), slots.begin() + 2 * inputs.of_state()),
              chunk, first_row);
      }
    }
    // A request without a slot to write to has the same outputs.
    StateStep unsaved;
    unsaved.add(kTokens, -1, -1);
    std::vector<float> y(expected.size()), none(1);
    kernels().selective_scan(inputs.arguments(0, kTokens, none, y.data(), unsaved), threads.pool());
    CHECK(y == expected);
  }
}
