#include <algorithm>

#include "states.h"
#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

std::vector<float> convolve(const std::vector<float>& x, const std::vector<float>& weight,
                            const std::vector<float>& bias, std::vector<float>& state, int64_t channels,
                            Activation activation, const StateStep& step, const Pool& pool) {
  std::vector<float> y(x.size(), 1.0f);
  CausalConv a{};
  a.x = x.data();
  a.weight = weight.data();
  a.bias = bias.empty() ? nullptr : bias.data();
  a.state = state.data();
  a.y = y.data();
  a.type = FloatType::kF32;
  a.slots = step.slots();
  a.num_tokens = static_cast<int64_t>(x.size()) / channels;
  a.num_channels = channels;
  a.width = static_cast<int64_t>(weight.size()) / channels;
  a.activation = activation;
  kernels().causal_conv(a, pool);
  return y;
}

}  // namespace

TEST(causal_conv, equals_the_formula) {
  ThreadPool threads(3);
  const StateStep step = mixed_step();
  const int64_t rows = step.rows() + kPaddingRows;
  for (const int channels : {1, 16, 39, 700}) {
    for (const int width : {2, 3, 4, 7, 8}) {
      const bool has_bias = width != 3;
      const Activation activation = width == 3 ? Activation::kNone : Activation::kSilu;
      std::vector<float> x = normal(rows * channels, 1), weight = normal(channels * width, 2);
      std::fill(x.begin() + step.rows() * channels, x.end(), std::nanf(""));
      const std::vector<float> bias = normal(has_bias ? channels : 0, 3);
      const int64_t state_size = static_cast<int64_t>(width - 1) * channels;
      std::vector<float> state = normal(kMixedSlots * state_size, 4);
      std::vector<double> expected(x.size(), 0.0);
      const std::vector<double> after = run_tokens(step, state, state_size, [&](int64_t row, auto& inputs) {
        for (int c = 0; c < channels; ++c) inputs.push_back(x[row * channels + c]);
        for (int c = 0; c < channels; ++c) {
          double sum = has_bias ? bias[c] : 0.0;
          for (int tap = 0; tap < width; ++tap) {
            sum += static_cast<double>(weight[c * width + tap]) * inputs[tap * channels + c];
          }
          expected[row * channels + c] = activation == Activation::kSilu ? sum / (1.0 + std::exp(-sum)) : sum;
        }
        inputs.erase(inputs.begin(), inputs.begin() + channels);
      });
      const std::vector<float> y = convolve(x, weight, bias, state, channels, activation, step, threads.pool());
      check_close(y, expected, 1e-5, 2e-6);
      check_close(state, after, 0.0, 0.0);
    }
  }
}

TEST(causal_conv, of_a_request_does_not_depend_on_chunks) {
  ThreadPool threads(4);
  constexpr int kTokens = 37, kChannels = 71, kWidth = 4;
  const std::vector<float> x = normal(kTokens * kChannels, 1), weight = normal(kChannels * kWidth, 2);
  StateStep whole;
  whole.add(kTokens, -1, 0);
  std::vector<float> expected_state((kWidth - 1) * kChannels);
  const std::vector<float> expected =
      convolve(x, weight, {}, expected_state, kChannels, Activation::kSilu, whole, no_pool());
  for (const int chunk : {1, 2, 3, 7, 36}) {
    std::vector<float> state = normal(expected_state.size(), 3);
    for (int row = 0; row < kTokens; row += chunk) {
      const int size = std::min(chunk, kTokens - row);
      StateStep step;
      step.add(size, row == 0 ? -1 : 0, 0);
      const std::vector<float> part(x.begin() + row * kChannels, x.begin() + (row + size) * kChannels);
      const std::vector<float> y =
          convolve(part, weight, {}, state, kChannels, Activation::kSilu, step, threads.pool());
      CHECK(std::equal(y.begin(), y.end(), expected.begin() + row * kChannels), chunk, row);
    }
    CHECK(state == expected_state, chunk);
  }
}
