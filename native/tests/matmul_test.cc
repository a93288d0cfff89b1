#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "matmul.h"
#include "testing.h"
#include "weights.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

// What the activations become, by the definition: of each 32 columns of a row scale * q + midpoint.
std::vector<double> quantized_activations(const std::vector<float>& x, int64_t k) {
  std::vector<double> out(x.size());
  for (size_t begin = 0; begin < x.size();) {
    const size_t row_end = begin / k * k + k, end = std::min<size_t>(begin + 32, row_end);
    const auto [low, high] = std::minmax_element(x.begin() + begin, x.begin() + end);
    const float scale = (*high - *low) / 254.0f, midpoint = (*high + *low) / 2.0f;
    for (size_t i = begin; i < end; ++i) {
      const float q = scale == 0.0f ? 0.0f : std::nearbyint((x[i] - midpoint) / scale);
      out[i] = static_cast<double>(scale) * std::clamp(q, -127.0f, 127.0f) + midpoint;
    }
    begin = end;
  }
  return out;
}

// Numbers around 0 and around 5, with groups of columns that are all equal, or nearly.
std::vector<float> rows_of_all_kinds(int64_t rows, int64_t k) {
  std::vector<float> x = normal(rows * k, 1);
  for (int64_t i = 0; i < rows * k; ++i) {
    const int64_t row = i / k, column = i % k;
    if (row % 4 == 1) x[i] += 5.0f;
    if (row % 4 == 2 && column < 40) x[i] = 0.3f;
    if (row % 4 == 3 && column < 40) x[i] = std::nextafter(1.7f, static_cast<float>(column % 3));
  }
  return x;
}

std::vector<std::vector<float>> multiply(const std::vector<float>& x, const std::vector<Weight>& weights, bool quantize,
                                         Activation activation, const Pool& pool, bool bfloat16s = false) {
  Matmul a{};
  a.x = x.data();
  a.format = weights[0].format;
  a.rows = static_cast<int64_t>(x.size()) / a.format.k;
  a.quantize_activations = quantize;
  a.x_is_bfloat16 = bfloat16s;
  a.activation = activation;
  a.num_matrices = static_cast<int>(weights.size());
  std::vector<std::vector<float>> out(activation == Activation::kNone ? weights.size() : 1);
  for (size_t i = 0; i < weights.size(); ++i) {
    a.weight[i] = weights[i].packed.data();
    a.n[i] = weights[i].n;
    if (i < out.size()) {
      out[i].assign(a.rows * weights[i].n, std::nanf(""));
      a.out[i] = out[i].data();
    }
  }
  kernels().matmul(a, pool);
  return out;
}

struct Expected {
  std::vector<double> value;
  std::vector<double> tolerance;  // of float32 sums
};

Expected product(const std::vector<float>& x, const Weight& w, bool quantize) {
  const int64_t k = w.format.k, rows = static_cast<int64_t>(x.size()) / k;
  const std::vector<double> used = quantize ? quantized_activations(x, k) : std::vector<double>(x.begin(), x.end());
  Expected out{std::vector<double>(rows * w.n), std::vector<double>(rows * w.n)};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t o = 0; o < w.n; ++o) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t i = 0; i < k; ++i) {
        const double weight = w.dense[o * k + i];
        sum += used[row * k + i] * weight;
        magnitude += std::abs(used[row * k + i]) * (w.magnitudes.empty() ? std::abs(weight) : w.magnitudes[o * k + i]);
      }
      out.value[row * w.n + o] = sum;
      out.tolerance[row * w.n + o] = 1e-6 * magnitude + 1e-30;
    }
  }
  return out;
}

// `actual` has the first rows of what is expected.
void check(const std::vector<float>& actual, const Expected& expected) {
  for (size_t i = 0; i < actual.size(); ++i) {
    CHECK(std::abs(actual[i] - expected.value[i]) <= expected.tolerance[i], i, actual[i], expected.value[i]);
  }
}

std::vector<WeightFormat> formats(int64_t k) {
  std::vector<WeightFormat> out = {plain_format(WeightType::kF32, k), plain_format(WeightType::kBf16, k),
                                   plain_format(WeightType::kInt8, k), plain_format(WeightType::kFp8, k, 128),
                                   plain_format(WeightType::kFp8, k, 32)};
  if (k % 32 == 0) out.push_back(plain_format(WeightType::kMxfp4, k, 32));
  const std::vector<WeightFormat> codes = code_formats(k);
  out.insert(out.end(), codes.begin(), codes.end());
  return out;
}

}  // namespace

TEST(matmul, equals_the_sum_of_products) {
  ThreadPool threads(4);
  for (const int64_t k : {1, 5, 61, 64, 130, 384}) {
    for_each_way(formats(k), [&](const WeightFormat& format, bool quantize) {
      for (const int64_t n : {1, 31, 32, 70}) {
        const Weight weight = make_weight(format, n, static_cast<uint32_t>(k + n));
        const std::vector<float> all = rows_of_all_kinds(40, k);
        const Expected expected = product(all, weight, quantize);
        for (const int64_t rows : {0, 1, 2, 3, 5, 8, 13, 40}) {
          const std::vector<float> x(all.begin(), all.begin() + rows * k);
          try {
            check(multiply(x, {weight}, quantize, Activation::kNone, threads.pool())[0], expected);
          } catch (const std::runtime_error& error) {
            throw std::runtime_error(error.what() + name(format) + text(" n", n, "rows", rows, "quantize", quantize));
          }
        }
      }
    });
  }
}

TEST(matmul, of_a_row_does_not_depend_on_rows_or_threads) {
  ThreadPool threads(4);
  constexpr int64_t kColumns = 384, kRows = 57;
  for_each_way(formats(kColumns), [&](const WeightFormat& format, bool quantize) {
    const Weight weight = make_weight(format, 100, 1);
    const std::vector<float> x = normal(kRows * kColumns, 2);
    const std::vector<float> together = multiply(x, {weight}, quantize, Activation::kNone, threads.pool())[0];
    for (const int64_t size : {1, 2, 7, 20}) {
      for (int64_t row = 0; row + size <= kRows; row += size) {
        const std::vector<float> some(x.begin() + row * kColumns, x.begin() + (row + size) * kColumns);
        const std::vector<float> out = multiply(some, {weight}, quantize, Activation::kNone, no_pool())[0];
        CHECK(std::memcmp(out.data(), &together[row * weight.n], out.size() * 4) == 0, name(format), row, size);
      }
    }
  });
}

// So many rows that they are cut into groups, which stay in a cache while panel after panel takes them.
TEST(matmul, of_a_row_is_the_same_bits_in_rows_larger_than_a_cache) {
  ThreadPool threads(2);
  constexpr int64_t kColumns = 384, kRows = 1501, kFew = 6;
  for_each_way(formats(kColumns), [&](const WeightFormat& format, bool quantize) {
    const std::vector<Weight> weights = {make_weight(format, 70, 1), make_weight(format, 70, 2)};
    const std::vector<float> x = normal(kRows * kColumns, 3);
    for (const Activation activation : {Activation::kNone, Activation::kSilu}) {
      const auto together = multiply(x, weights, quantize, activation, threads.pool());
      for (const int64_t row : {0, 511, 512, 1000, 1495}) {
        const std::vector<float> some(x.begin() + row * kColumns, x.begin() + (row + kFew) * kColumns);
        const auto out = multiply(some, weights, quantize, activation, no_pool());
        for (size_t i = 0; i < out.size(); ++i) {
          CHECK(std::memcmp(out[i].data(), &together[i][row * 70], out[i].size() * 4) == 0, name(format), row, i);
        }
      }
    }
  });
}

// However few or many rows are multiplied at once, in blocks of whatever size, and by which instructions.
TEST(matmul, of_a_row_is_the_same_bits_for_any_number_of_rows) {
  ThreadPool threads(4);
  for (const int64_t k : {5, 61, 130, 224, 384}) {
    std::vector<WeightFormat> all = code_formats(k);
    all.push_back(plain_format(WeightType::kInt8, k));
    for (const WeightFormat& format : all) {
      if (!has_integer_products(format)) continue;
      const Weight weight = make_weight(format, 33, static_cast<uint32_t>(k));
      const std::vector<float> x = rows_of_all_kinds(64, k);
      std::vector<float> one_by_one;
      for (int64_t row = 0; row < 64; ++row) {
        const std::vector<float> one(x.begin() + row * k, x.begin() + (row + 1) * k);
        const std::vector<float> out = multiply(one, {weight}, true, Activation::kNone, no_pool())[0];
        one_by_one.insert(one_by_one.end(), out.begin(), out.end());
      }
      for (const int64_t rows : {2, 6, 7, 8, 9, 12, 15, 16, 17, 31, 33, 47, 64}) {
        const std::vector<float> some(x.begin(), x.begin() + rows * k);
        const std::vector<float> out = multiply(some, {weight}, true, Activation::kNone, threads.pool())[0];
        CHECK(std::memcmp(out.data(), one_by_one.data(), out.size() * 4) == 0, name(format), rows);
      }
    }
  }
}

// Sums of 16 bits, which some instruction sets have on the way, would overflow or saturate.
TEST(matmul, of_the_largest_codes_and_activations_is_exact) {
  constexpr int64_t kColumns = 384, kRows = 13, kOut = 33;
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<float> x(kRows * kColumns, sign);
    for (int64_t i = 0; i < kRows * kColumns; i += 32) x[i + i / 32 % 32] = -sign;  // the others become 127, or -127
    for (const WeightFormat& format : code_formats(kColumns)) {
      if (!has_integer_products(format)) continue;
      const Weight weight = make_codes(format, kOut, 1, 0, (1 << format.bits) - 1);
      const Expected expected = product(x, weight, true);
      for (const int64_t rows : {1, 3, 13}) {
        const std::vector<float> some(x.begin(), x.begin() + rows * kColumns);
        check(multiply(some, {weight}, true, Activation::kNone, no_pool())[0], expected);
      }
    }
  }
}

TEST(matmul, of_a_last_row_by_itself_is_that_of_the_row) {
  ThreadPool threads(4);
  constexpr int64_t kColumns = 96, kRows = 241;  // the last of blocks of 16, each a task
  for (const WeightFormat& format :
       {plain_format(WeightType::kInt8, kColumns),
        super_format(code_format(kColumns, 32, 8, 0, ScaleType::kU8, ScaleType::kI8), ScaleType::kF32, kColumns)}) {
    const Weight weight = make_weight(format, 32, 1);
    const std::vector<float> x = normal(kRows * kColumns, 2), last(x.end() - kColumns, x.end());
    const std::vector<float> all = multiply(x, {weight}, true, Activation::kNone, threads.pool())[0];
    const std::vector<float> alone = multiply(last, {weight}, true, Activation::kNone, no_pool())[0];
    CHECK(std::memcmp(alone.data(), &all[(kRows - 1) * 32], alone.size() * 4) == 0, name(format));
  }
}

TEST(matmul, of_a_row_that_is_not_finite_is_not) {
  constexpr int64_t kColumns = 128, kRows = 20;
  for (const WeightFormat& format : formats(kColumns)) {
    if (!has_integer_products(format)) continue;
    const Weight weight = make_weight(format, 40, 1);
    for (const float number : {std::nanf(""), INFINITY, -INFINITY}) {
      for (const int64_t column : {0, 20, 127}) {
        std::vector<float> x = normal(kRows * kColumns, 2);
        x[kColumns + column] = number;
        for (const int64_t rows : {1, 3, 20}) {
          const std::vector<float> some(x.begin() + (rows == 1 ? kColumns : 0),
                                        x.begin() + (rows == 1 ? 2 : rows) * kColumns);
          const std::vector<float> out = multiply(some, {weight}, true, Activation::kNone, no_pool())[0];
          for (size_t i = 0; i < out.size(); ++i) {
            const bool is_it = rows == 1 || static_cast<int64_t>(i) / weight.n == 1;
            CHECK(std::isfinite(out[i]) != is_it, name(format), number, column, rows, i);
          }
        }
      }
    }
  }
}

TEST(matmul, several_matrices_are_as_one_after_the_other) {
  ThreadPool threads(4);
  constexpr int64_t kColumns = 128;
  for_each_way(formats(kColumns), [&](const WeightFormat& format, bool quantize) {
    std::vector<Weight> weights;
    for (const int64_t n : {64, 7, 33}) weights.push_back(make_weight(format, n, static_cast<uint32_t>(n)));
    for (const int64_t rows : {1, 9}) {
      const std::vector<float> x = normal(rows * kColumns, 3);
      const auto together = multiply(x, weights, quantize, Activation::kNone, threads.pool());
      for (size_t i = 0; i < weights.size(); ++i) {
        CHECK(together[i] == multiply(x, {weights[i]}, quantize, Activation::kNone, no_pool())[0], name(format), i);
      }
    }
  });
}

TEST(matmul, gated_is_the_activation_times_the_other_product) {
  ThreadPool threads(4);
  constexpr int64_t kColumns = 64, kOut = 45;
  for_each_way(formats(kColumns), [&](const WeightFormat& format, bool quantize) {
    const std::vector<Weight> weights = {make_weight(format, kOut, 1), make_weight(format, kOut, 2)};
    for (const int64_t rows : {1, 9}) {
      std::vector<float> x = normal(rows * kColumns, 3);
      for (float& number : x) number *= 0.01f;  // so that the activation is not in its flat parts
      const auto products = multiply(x, weights, quantize, Activation::kNone, threads.pool());
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
        std::vector<double> expected;
        for (size_t i = 0; i < products[0].size(); ++i) {
          const double gate = products[0][i];
          const double active =
              activation == Activation::kSilu
                  ? gate / (1.0 + std::exp(-gate))
                  : 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
          expected.push_back(active * products[1][i]);
        }
        check_close(multiply(x, weights, quantize, activation, threads.pool())[0], expected, 2e-5, 1e-6);
      }
    }
  });
}

TEST(matmul, rows_of_the_matrix_are_what_was_packed) {
  ThreadPool threads(4);
  constexpr int64_t kRows = 70;
  for (const int64_t k : {61, 128}) {
    for (const WeightFormat& format : formats(k)) {
      const Weight weight = make_weight(format, kRows, 5);
      const std::vector<int32_t> ids = {0, 69, 31, 32, 33, 31, -4, 1000};  // the last two are clamped
      std::vector<float> out(ids.size() * k, std::nanf(""));
      kernels().packed_rows(
          {ids.data(), static_cast<int64_t>(ids.size()), format, weight.packed.data(), kRows, out.data()},
          threads.pool());
      std::vector<double> expected;
      for (const int64_t id : ids) {
        const auto row = weight.dense.begin() + std::clamp<int64_t>(id, 0, kRows - 1) * k;
        expected.insert(expected.end(), row, row + k);
      }
      check_close(out, expected, 1e-6, 0.0);
    }
  }
}

TEST(matmul, codes_of_fewer_bits_are_packed_as_four) {
  for (const int64_t bits : {2, 3}) {
    const WeightFormat format = code_format(64, 16, 4, bits == 3 ? 4 : 0, ScaleType::kF16);
    const Weight weight = make_codes(format, 33, 1, bits);
    std::vector<int32_t> ids(33);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    std::vector<float> out(weight.dense.size());
    kernels().packed_rows({ids.data(), 33, format, weight.packed.data(), 33, out.data()}, no_pool());
    check_close(out, weight.dense, 1e-6, 0.0);
  }
}

// Activations that are quantized already, as of ternary weights: every sum is exact, in whatever company.
TEST(matmul, of_whole_numbers_is_exact) {
  ThreadPool threads(4);
  constexpr int64_t kColumns = 384, kRows = 40;
  Weight weight =
      make_codes(super_format(code_format(kColumns, 128, 2, 1, ScaleType::kU8), ScaleType::kF32, kColumns), 45, 1);
  weight.magnitudes.clear();  // no offset adds to the error
  std::vector<float> x;
  for (const int number : integers(kRows * kColumns, -127, 127, 2)) x.push_back(static_cast<float>(number));
  for (const int64_t rows : {1, 3, 40}) {
    Matmul a{};
    std::vector<float> out(rows * weight.n, std::nanf(""));
    a.x = x.data();
    a.rows = rows;
    a.format = weight.format;
    a.quantize_activations = a.x_is_integer = true;
    a.num_matrices = 1;
    a.weight[0] = weight.packed.data();
    a.n[0] = weight.n;
    a.out[0] = out.data();
    kernels().matmul(a, threads.pool());
    check(out, product(x, weight, false));
  }
}

// Activations of bfloat16, with instructions for them or without.
TEST(matmul, of_bfloat16_is_the_same_bits_as_of_float32) {
  ThreadPool threads(4);
  for (const int64_t k : {1, 61, 130, 384, 1027}) {
    const WeightFormat format = plain_format(WeightType::kBf16, k);
    const std::vector<Weight> weights = {make_weight(format, 70, 1), make_weight(format, 70, 2)};
    std::vector<float> all = rows_of_all_kinds(100, k);
    for (float& number : all) number = from_bf16(to_bf16(number));
    for (const int64_t rows : {1, 2, 12, 13, 25, 100}) {
      const std::vector<float> x(all.begin(), all.begin() + rows * k);
      for (const Activation activation : {Activation::kNone, Activation::kSilu}) {
        const auto pairs = multiply(x, weights, false, activation, threads.pool(), true);
        CHECK(pairs == multiply(x, weights, false, activation, threads.pool()), k, rows);
      }
    }
  }
}

TEST(matmul, a_panel_of_codes_takes_the_bits_of_its_format) {
  const auto bits = [](const WeightFormat& f) { return static_cast<double>(panel_bytes(f)) * 8 / (f.k * kPanelRows); };
  CHECK(bits(code_format(256, 32, 8, 128, ScaleType::kF16)) == 8.5);
  CHECK(bits(code_format(256, 32, 5, 16, ScaleType::kF16)) == 5.5);
  CHECK(bits(super_format(code_format(256, 128, 2, 1, ScaleType::kU8), ScaleType::kF32, 256)) == 2.1875);
  const WeightFormat q4_k = code_format(256, 32, 4, 0, ScaleType::kU8, ScaleType::kU8);
  CHECK(bits(super_format(q4_k, ScaleType::kF16, 256)) == 4.625);
  const WeightFormat q6_k = code_format(256, 16, 6, 32, ScaleType::kI8);
  CHECK(bits(super_format(q6_k, ScaleType::kF16, 256)) == 6.5625);
}
