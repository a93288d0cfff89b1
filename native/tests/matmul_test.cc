#include <algorithm>

#include "matmul.h"
#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// A matrix [n, k] packed, and the same as elements.
struct Weight {
  WeightFormat format;
  int64_t n;
  std::vector<uint8_t> packed;
  std::vector<double> dense;      // [n, k]
  std::vector<double> quantized;  // [n, k], without scales
  std::vector<double> scales;     // [n, groups]

  int64_t group() const { return format.group != 0 ? format.group : kActivationGroup; }
  double scale(int64_t row, int64_t column) const {
    return format.group != 0 ? scales[row * (format.k / format.group) + column / format.group] : scales[row];
  }
};

// The number that an e4m3 byte stands for: its sign, four bits of exponent with a bias of 7, three of mantissa.
double from_e4m3(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return bits < 128 ? magnitude : -magnitude;
}

double from_e2m1(int bits) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return bits < 8 ? magnitudes[bits] : -magnitudes[bits - 8];
}

Weight make_block_scaled(WeightFormat format, int64_t n, uint32_t seed) {
  Weight w{format, n, {}, std::vector<double>(n * format.k), {}, {}};
  const bool is_fp8 = format.type == WeightType::kFp8;
  const int64_t k = format.k, groups = (k + format.group - 1) / format.group;
  const std::vector<int> codes = integers(n * k, 0, is_fp8 ? 255 : 15, seed);
  const std::vector<int> exponents = integers(n * groups, -12, -3, seed + 1);
  std::vector<uint8_t> data, scales;
  std::vector<float> scales32;
  for (const int exponent : exponents) {
    scales.push_back(static_cast<uint8_t>(127 + exponent));
    scales32.push_back(static_cast<float>(std::ldexp(1.25, exponent)));
  }
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t at = i / k * groups + i % k / format.group;
    const int code = is_fp8 && codes[i] % 128 == 127 ? 0 : codes[i];  // not a NaN
    w.dense[i] = is_fp8 ? from_e4m3(code) * scales32[at] : from_e2m1(code) * std::ldexp(1.0, exponents[at]);
    if (is_fp8 || i % 2 == 0) {
      data.push_back(static_cast<uint8_t>(code));
    } else {
      data.back() = static_cast<uint8_t>(data.back() | code << 4);
    }
  }
  w.packed.resize(num_panels(n) * panel_bytes(format));
  const void* source = is_fp8 ? static_cast<const void*>(scales32.data()) : scales.data();
  pack_panels({format, n, data.data(), source, nullptr, w.packed.data()}, 0, num_panels(n));
  return w;
}

Weight make_weight(WeightFormat format, int64_t n, uint32_t seed) {
  if (is_block_scaled(format.type)) return make_block_scaled(format, n, seed);
  Weight w{format, n, {}, {}, {}, {}};
  const int64_t k = format.k, groups = format.group != 0 ? k / format.group : 1;
  const bool quantized = format.type == WeightType::kInt8 || format.type == WeightType::kInt4;
  const std::vector<float> elements = normal(quantized ? n * groups : n * k, seed);
  std::vector<uint8_t> data, zero_points;
  std::vector<float> scales32;
  std::vector<uint16_t> data16, scales16;
  w.dense.resize(n * k);
  if (quantized) {
    const bool four = format.type == WeightType::kInt4;
    const int neutral = four ? 8 : 128;
    const std::vector<int> q = integers(n * k, 0, 2 * neutral - 1, seed + 1);
    const std::vector<int> zeros = integers(n * groups, 0, 2 * neutral - 1, seed + 2);
    for (int64_t i = 0; i < n * groups; ++i) {
      // Not a choice between the number and what is left of it in bfloat16: GCC 12 takes the number for both.
      const float scale = 0.01f + std::abs(elements[i]);
      scales16.push_back(to_bf16(scale));
      scales32.push_back(from_bf16(scales16.back()));
      if (format.has_wide_scales) scales32.back() = scale;
      w.scales.push_back(scales32.back());
      if (format.has_zero_points) zero_points.push_back(static_cast<uint8_t>(zeros[i]));
    }
    w.quantized.resize(n * k);
    for (int64_t i = 0; i < n * k; ++i) {
      const int64_t row = i / k, column = i % k;
      const int64_t scale_at = format.group != 0 ? row * groups + column / format.group : row;
      w.quantized[i] = q[i] - (format.has_zero_points ? zeros[scale_at] : neutral);
      w.dense[i] = w.quantized[i] * w.scales[scale_at];
      if (four) {
        if (column % 2 == 0) data.push_back(static_cast<uint8_t>(q[i] | q[i + 1] << 4));
      } else {
        data.push_back(static_cast<uint8_t>(format.has_zero_points ? q[i] : q[i] - 128));
      }
    }
  } else {
    for (int64_t i = 0; i < n * k; ++i) {
      data16.push_back(to_bf16(elements[i]));
      w.dense[i] = format.type == WeightType::kF32 ? elements[i] : from_bf16(data16.back());
    }
  }
  const void* source = quantized                          ? static_cast<const void*>(data.data())
                       : format.type == WeightType::kBf16 ? static_cast<const void*>(data16.data())
                                                          : static_cast<const void*>(elements.data());
  const void* scales =
      format.group != 0 && !format.has_wide_scales ? static_cast<const void*>(scales16.data()) : scales32.data();
  w.packed.resize(num_panels(n) * panel_bytes(format));
  pack_panels({format, n, source, quantized ? scales : nullptr, format.has_zero_points ? zero_points.data() : nullptr,
               w.packed.data()},
              0, num_panels(n));
  return w;
}

// What the activations become, by the definition: round(x / (max |x| / 127)), by row and group.
std::vector<double> quantized_activations(const std::vector<float>& x, int64_t k, int64_t group) {
  std::vector<double> out(x.size());
  for (size_t begin = 0; begin < x.size();) {
    const size_t row_end = begin / k * k + k, end = std::min(begin + group, row_end);
    float largest = 0.0f;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(x[i]));
    const float scale = largest / 127.0f;
    for (size_t i = begin; i < end; ++i) {
      out[i] = scale == 0.0f ? 0.0 : static_cast<double>(scale) * std::nearbyint(x[i] / scale);
    }
    begin = end;
  }
  return out;
}

std::vector<std::vector<float>> multiply(const std::vector<float>& x, const std::vector<Weight>& weights, bool quantize,
                                         Activation activation, const Pool& pool) {
  Matmul a{};
  a.x = x.data();
  a.format = weights[0].format;
  a.rows = static_cast<int64_t>(x.size()) / a.format.k;
  a.quantize_activations = quantize;
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
  const std::vector<double> used =
      quantize ? quantized_activations(x, k, w.group()) : std::vector<double>(x.begin(), x.end());
  // Zero points may be taken off after the sum, so errors are relative to sums with them.
  const double range = w.format.type == WeightType::kInt8 ? 256 : w.format.type == WeightType::kInt4 ? 16 : 0;
  Expected out{std::vector<double>(rows * w.n), std::vector<double>(rows * w.n)};
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t o = 0; o < w.n; ++o) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t i = 0; i < k; ++i) {
        const double weight = w.dense[o * k + i];
        sum += used[row * k + i] * weight;
        magnitude += std::abs(used[row * k + i]) * (range == 0 ? std::abs(weight) : range * w.scale(o, i));
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
  std::vector<WeightFormat> out = {{WeightType::kF32, k, 0, false, false},
                                   {WeightType::kBf16, k, 0, false, false},
                                   {WeightType::kInt8, k, 0, false, false},
                                   {WeightType::kFp8, k, 128, false, false},
                                   {WeightType::kFp8, k, 32, false, false}};
  if (k % 32 == 0) out.push_back({WeightType::kMxfp4, k, 32, false, false});
  for (const int64_t group : {32, 64, 128}) {
    if (k % group != 0) continue;
    for (const WeightType type : {WeightType::kInt8, WeightType::kInt4}) {
      for (const bool zero_points : {false, true}) {
        // Wide scales are told apart in one place: one size of group will do.
        for (const bool wide : {false, true}) {
          if (!wide || group == 64) out.push_back({type, k, group, zero_points, wide});
        }
      }
    }
  }
  return out;
}

// Calls function(format, quantize) for each way to multiply.
template <typename Function>
void for_each_way(int64_t k, const Function& function) {
  for (const WeightFormat& format : formats(k)) {
    function(format, false);
    if (format.type == WeightType::kInt8 || format.type == WeightType::kInt4) function(format, true);
  }
}

std::string name(const WeightFormat& f) {
  return text("type", static_cast<int>(f.type), "k", f.k, "group", f.group, "zero points", f.has_zero_points,
              "wide scales", f.has_wide_scales);
}

}  // namespace

TEST(matmul, equals_the_sum_of_products) {
  ThreadPool threads(4);
  for (const int64_t k : {1, 5, 61, 64, 130, 384}) {
    for_each_way(k, [&](const WeightFormat& format, bool quantize) {
      for (const int64_t n : {1, 31, 32, 70}) {
        const Weight weight = make_weight(format, n, static_cast<uint32_t>(k + n));
        const std::vector<float> all = normal(40 * k, 1);
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
  for_each_way(kColumns, [&](const WeightFormat& format, bool quantize) {
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

TEST(matmul, several_matrices_are_as_one_after_the_other) {
  ThreadPool threads(4);
  constexpr int64_t kColumns = 128;
  for_each_way(kColumns, [&](const WeightFormat& format, bool quantize) {
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
  for_each_way(kColumns, [&](const WeightFormat& format, bool quantize) {
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
