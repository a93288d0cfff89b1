#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

constexpr float kEpsilon = 1e-6f;

std::vector<float> run(const std::vector<float>& x, const std::vector<float>& weight, const Pool& pool) {
  std::vector<float> out(x.size());
  const int64_t size = static_cast<int64_t>(weight.size());
  const int64_t rows = size == 0 ? 0 : static_cast<int64_t>(x.size()) / size;
  kernels().rms_norm({x.data(), weight.data(), out.data(), rows, size, kEpsilon}, pool);
  return out;
}

std::vector<float> run_layer_norm(const std::vector<float>& x, const std::vector<float>& weight,
                                  const std::vector<float>& bias, int64_t size, const Pool& pool) {
  std::vector<float> out(x.size());
  const auto rows = static_cast<int64_t>(x.size()) / size, weight_rows = static_cast<int64_t>(weight.size()) / size;
  kernels().layer_norm({x.data(), weight.data(), bias.data(), out.data(), rows, size, weight_rows, kEpsilon}, pool);
  return out;
}

}  // namespace

TEST(norm, of_layers_equals_the_formula) {
  ThreadPool threads(3);
  constexpr int kWeightRows = 3;
  for (const int size : {1, 15, 16, 33, 64, 1000}) {
    for (const int rows : {0, 3, 60}) {
      const std::vector<float> x = normal(static_cast<size_t>(rows) * size, 1);
      const std::vector<float> weight = normal(kWeightRows * size, 2), bias = normal(kWeightRows * size, 3);
      std::vector<double> expected(x.size());
      for (int row = 0; row < rows; ++row) {
        double mean = 0.0, squares = 0.0;
        for (int i = 0; i < size; ++i) mean += static_cast<double>(x[row * size + i]) / size;
        for (int i = 0; i < size; ++i) squares += (x[row * size + i] - mean) * (x[row * size + i] - mean);
        const double root = std::sqrt(squares / size + kEpsilon);
        for (int i = 0; i < size; ++i) {
          const int at = row % kWeightRows * size + i;
          expected[row * size + i] = (x[row * size + i] - mean) / root * weight[at] + bias[at];
        }
      }
      check_close(run_layer_norm(x, weight, bias, size, threads.pool()), expected, 1e-5, 1e-5);
    }
  }
}

TEST(norm, equals_the_formula) {
  ThreadPool threads(3);
  for (const int size : {1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 1000, 1024, 4099}) {
    for (const int rows : {0, 1, 2, 7, 40}) {
      const std::vector<float> x = normal(static_cast<size_t>(rows) * size, 1), weight = normal(size, 2);
      std::vector<double> expected(x.size());
      for (int row = 0; row < rows; ++row) {
        double squares = 0.0;
        for (int i = 0; i < size; ++i) squares += static_cast<double>(x[row * size + i]) * x[row * size + i];
        const double root = std::sqrt(squares / size + kEpsilon);
        for (int i = 0; i < size; ++i) expected[row * size + i] = x[row * size + i] / root * weight[i];
      }
      check_close(run(x, weight, threads.pool()), expected, 2e-6, 0.0);
    }
  }
}

TEST(norm, of_a_row_does_not_depend_on_rows_or_threads) {
  ThreadPool threads(4);
  constexpr int kSize = 1027;
  const std::vector<float> x = normal(50 * kSize, 3), weight = normal(kSize, 4);
  const std::vector<float> together = run(x, weight, threads.pool());
  for (int row = 0; row < 50; ++row) {
    const std::vector<float> alone(x.begin() + row * kSize, x.begin() + (row + 1) * kSize);
    const std::vector<float> out = run(alone, weight, no_pool());
    CHECK(std::equal(out.begin(), out.end(), together.begin() + row * kSize), row);
  }
}

TEST(norm, moments_equal_the_formula_and_do_not_depend_on_rows_or_threads) {
  ThreadPool threads(3);
  for (const int size : {1, 15, 16, 33, 1000}) {
    constexpr int kRows = 40;
    std::vector<float> x = normal(static_cast<size_t>(kRows) * size, 1);
    for (float& value : x) value += 2.0f;
    std::vector<double> means(kRows), variances(kRows);
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < size; ++i) means[row] += static_cast<double>(x[row * size + i]) / size;
      for (int i = 0; i < size; ++i) variances[row] += std::pow(x[row * size + i] - means[row], 2) / size;
    }
    std::vector<float> mean(kRows), variance(kRows);
    kernels().row_moments({x.data(), mean.data(), variance.data(), kRows, size}, threads.pool());
    check_close(mean, means, 1e-5, 1e-6);
    check_close(variance, variances, 1e-5, 1e-6);
    for (int row = 0; row < kRows; ++row) {
      float alone[2];
      kernels().row_moments({x.data() + row * size, alone, alone + 1, 1, size}, no_pool());
      CHECK(alone[0] == mean[row] && alone[1] == variance[row], row, size);
    }
  }
}
