#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "testing.h"
#include "weights.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

struct Stack {
  WeightFormat format;
  int64_t num, n;
  std::vector<uint8_t> packed;
  std::vector<float> bias;  // of all, or empty

  ExpertMatrices matrices() const { return {packed.data(), bias.empty() ? nullptr : bias.data(), format, n}; }
  const uint8_t* of(int64_t expert) const { return matrices().of(expert); }
};

Stack make_stack(const WeightFormat& format, int64_t num, int64_t n, bool has_bias, uint32_t seed) {
  Stack out{format, num, n, {}, {}};
  for (int64_t e = 0; e < num; ++e, seed += 10) {
    const std::vector<uint8_t> packed = make_weight(format, n, seed).packed;
    out.packed.insert(out.packed.end(), packed.begin(), packed.end());
  }
  if (has_bias) out.bias = normal(num * n, seed + 5);
  return out;
}

struct Block {
  int64_t size, hidden;
  Stack gate, up, down;
  bool quantize = false;
  Activation activation = Activation::kSilu;
};

constexpr float kAlpha = 1.702f, kLimit = 0.5f;

Block make_block(WeightFormat format, int64_t num, int64_t size, int64_t hidden, bool has_bias) {
  Block out{size, hidden, {}, {}, {}};
  format.k = size;
  out.gate = make_stack(format, num, hidden, has_bias, 100);
  out.up = make_stack(format, num, hidden, has_bias, 200);
  format.k = hidden;
  out.down = make_stack(format, num, size, has_bias, 300);
  return out;
}

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(int64_t tokens, int64_t slots, int num_experts, uint32_t seed) {
  Routed out;
  for (const int id : integers(tokens * slots, 0, num_experts - 1, seed)) out.ids.push_back(id);
  out.weights = normal(tokens * slots, seed + 1);
  return out;
}

std::vector<float> run(const Block& b, const std::vector<float>& x, const Routed& routed, const Pool& pool) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / b.size;
  std::vector<float> out(x.size(), std::nanf(""));
  const int64_t slots = tokens == 0 ? 1 : static_cast<int64_t>(routed.ids.size()) / tokens;
  kernels().experts({x.data(), routed.ids.data(), routed.weights.data(), tokens, slots, b.gate.num, b.gate.matrices(),
                     b.up.matrices(), b.down.matrices(), b.quantize, b.activation, kAlpha, kLimit, nullptr, nullptr,
                     out.data(), nullptr},
                    pool);
  return out;
}

std::vector<float> multiply(const float* x, const WeightFormat& format, std::vector<const uint8_t*> weights, int64_t n,
                            bool quantize, Activation activation) {
  std::vector<float> out(n, std::nanf(""));
  Matmul a{x, 1, format, quantize, false, false, activation, static_cast<int>(weights.size()), {}, {}, {}};
  for (size_t i = 0; i < weights.size(); ++i) {
    a.weight[i] = weights[i];
    a.n[i] = n;
  }
  a.out[0] = out.data();
  kernels().matmul(a, no_pool());
  return out;
}

// Slots of a token in the order in which they are summed.
std::vector<int64_t> in_order(const Routed& routed, int64_t first, int64_t slots, int64_t num_experts) {
  std::vector<int64_t> out;
  for (int64_t i = first; i < first + slots; ++i) {
    if (routed.ids[i] >= 0 && routed.ids[i] < num_experts) out.push_back(i);
  }
  std::stable_sort(out.begin(), out.end(), [&](int64_t i, int64_t j) { return routed.ids[i] < routed.ids[j]; });
  return out;
}

// By the kernel for single products, row by row; without biases.
std::vector<float> by_single_products(const Block& b, const std::vector<float>& x, const Routed& routed) {
  const int64_t tokens = static_cast<int64_t>(x.size()) / b.size;
  const int64_t slots = static_cast<int64_t>(routed.ids.size()) / tokens;
  const Activation activation = b.activation;
  std::vector<float> out(x.size(), 0.0f);
  for (int64_t t = 0; t < tokens; ++t) {
    for (const int64_t i : in_order(routed, t * slots, slots, b.gate.num)) {
      const int32_t e = routed.ids[i];
      const std::vector<float> hidden =
          multiply(&x[t * b.size], b.gate.format, {b.gate.of(e), b.up.of(e)}, b.hidden, b.quantize, activation);
      const std::vector<float> y =
          multiply(hidden.data(), b.down.format, {b.down.of(e)}, b.size, b.quantize, Activation::kNone);
      for (int64_t c = 0; c < b.size; ++c) {
        const float weighted = routed.weights[i] * y[c];
        out[t * b.size + c] += weighted;
      }
    }
  }
  return out;
}

std::vector<WeightFormat> formats() {
  return {plain_format(WeightType::kF32, 0),
          plain_format(WeightType::kBf16, 0),
          plain_format(WeightType::kInt8, 0),
          with_zero_points(code_format(0, 64, 8, 0, ScaleType::kBf16)),
          code_format(0, 32, 4, 8, ScaleType::kF16),
          super_format(code_format(0, 16, 6, 32, ScaleType::kI8), ScaleType::kF16, 64),
          super_format(code_format(0, 32, 5, 0, ScaleType::kU8, ScaleType::kU8), ScaleType::kF16, 64)};
}

template <typename Function>
void for_each_way(const Function& function) {
  testing::for_each_way(formats(), [&](const WeightFormat& format, bool quantize) {
    function(format, quantize, name(format) + text(" quantize", quantize));
  });
}

// By the definition in float64, of the products and biases in float32.
void check_biases_and(Activation activation, double (*combine)(double gate, double up)) {
  ThreadPool threads(2);
  constexpr int64_t kTokens = 9, kSlots = 2, kNum = 4, kSize = 37, kHidden = 45;
  Block block = make_block(plain_format(WeightType::kF32, 0), kNum, kSize, kHidden, true);
  block.activation = activation;
  const std::vector<float> x = normal(kTokens * kSize, 1);
  const Routed routed = route(kTokens, kSlots, kNum, 2);
  std::vector<double> expected(kTokens * kSize, 0.0);
  for (int64_t i = 0; i < kTokens * kSlots; ++i) {
    const int64_t e = routed.ids[i], t = i / kSlots;
    const auto project = [&](const Stack& stack, const float* input, int64_t at) {
      const std::vector<float> y = multiply(input, stack.format, {stack.of(e)}, stack.n, false, Activation::kNone);
      return static_cast<double>(y[at]) + stack.bias[e * stack.n + at];
    };
    std::vector<float> hidden;
    for (int64_t h = 0; h < kHidden; ++h) {
      const double gate = project(block.gate, &x[t * kSize], h), up = project(block.up, &x[t * kSize], h);
      hidden.push_back(static_cast<float>(combine(gate, up)));
    }
    for (int64_t c = 0; c < kSize; ++c) {
      expected[t * kSize + c] += routed.weights[i] * project(block.down, hidden.data(), c);
    }
  }
  check_close(run(block, x, routed, threads.pool()), expected, 1e-5, 1e-5);
}

}  // namespace

TEST(experts, equal_single_products_to_the_bit) {
  ThreadPool threads(4);
  for_each_way([&](const WeightFormat& format, bool quantize, const std::string& name) {
    Block block = make_block(format, 7, 192, 128, false);
    block.quantize = quantize;
    for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
      block.activation = activation;
      for (const int64_t tokens : {1, 2, 40}) {
        const std::vector<float> x = normal(tokens * block.size, 1);
        const Routed routed = route(tokens, 3, 7, static_cast<uint32_t>(tokens));
        CHECK(run(block, x, routed, threads.pool()) == by_single_products(block, x, routed), name, tokens);
      }
    }
  });
}

// Blocks of rows are of other sizes for other formats, and the kernel cuts the rows of an expert for both at once.
TEST(experts, have_gates_and_ups_of_different_formats) {
  ThreadPool threads(4);
  constexpr int64_t kSize = 192, kHidden = 128;
  const std::vector<WeightFormat> all = formats();
  for (const WeightFormat& of_gate : all) {
    for (const WeightFormat& of_up : all) {
      Block block = make_block(of_gate, 3, kSize, kHidden, false);
      block.up = make_block(of_up, 3, kSize, kHidden, false).up;
      const int64_t tokens = 40;
      const std::vector<float> x = normal(tokens * kSize, 1);
      const Routed routed = route(tokens, 1, 3, 2);
      std::vector<float> expected(x.size(), 0.0f);
      for (int64_t t = 0; t < tokens; ++t) {
        const int32_t e = routed.ids[t];
        const float* row = &x[t * kSize];
        std::vector<float> hidden =
            multiply(row, block.gate.format, {block.gate.of(e)}, kHidden, false, Activation::kNone);
        const std::vector<float> up =
            multiply(row, block.up.format, {block.up.of(e)}, kHidden, false, Activation::kNone);
        for (int64_t h = 0; h < kHidden; ++h) hidden[h] = hidden[h] / (1.0f + std::exp(-hidden[h])) * up[h];
        const std::vector<float> y =
            multiply(hidden.data(), block.down.format, {block.down.of(e)}, kSize, false, Activation::kNone);
        for (int64_t c = 0; c < kSize; ++c) expected[t * kSize + c] = routed.weights[t] * y[c];
      }
      float largest = 0.0f;
      for (const float value : expected) largest = std::max(largest, std::abs(value));
      const std::vector<double> wide(expected.begin(), expected.end());
      const std::vector<float> together = run(block, x, routed, threads.pool());
      check_close(together, wide, 1e-4, 1e-4 * largest);
      CHECK(run(block, x, routed, no_pool()) == together, name(of_gate), name(of_up));
      for (int64_t t = 0; t < tokens; ++t) {
        const std::vector<float> row(&x[t * kSize], &x[t * kSize] + kSize);
        const std::vector<float> alone = run(block, row, {{routed.ids[t]}, {routed.weights[t]}}, no_pool());
        CHECK(std::equal(alone.begin(), alone.end(), together.begin() + t * kSize), name(of_gate), name(of_up), t);
      }
    }
  }
}

TEST(experts, of_a_token_do_not_depend_on_other_tokens_or_threads) {
  ThreadPool threads(4);
  constexpr int64_t kTokens = 60, kSlots = 4;
  for_each_way([&](const WeightFormat& format, bool quantize, const std::string& name) {
    Block block = make_block(format, 5, 64, 128, true);
    block.quantize = quantize;
    const std::vector<float> x = normal(kTokens * block.size, 2);
    const Routed routed = route(kTokens, kSlots, 5, 3);
    for (const Activation activation :
         {Activation::kClampedSwiglu, Activation::kCappedSwiglu, Activation::kLimitedSwiglu, Activation::kSitu}) {
      block.activation = activation;
      const std::vector<float> together = run(block, x, routed, threads.pool());
      for (const int64_t some : {1, 7, 30}) {
        for (int64_t t = 0; t + some <= kTokens; t += some) {
          const Routed of_some = {{&routed.ids[t * kSlots], &routed.ids[t * kSlots] + some * kSlots},
                                  {&routed.weights[t * kSlots], &routed.weights[t * kSlots] + some * kSlots}};
          const std::vector<float> out =
              run(block, {&x[t * block.size], &x[t * block.size] + some * block.size}, of_some, no_pool());
          CHECK(std::memcmp(out.data(), &together[t * block.size], out.size() * 4) == 0, name, some, t);
        }
      }
    }
  });
}

TEST(experts, of_more_rows_than_go_through_together) {
  ThreadPool threads(4);
  constexpr int64_t kTokens = 1500;
  const Block block = make_block(plain_format(WeightType::kBf16, 0), 3, 33, 17, false);
  const std::vector<float> x = normal(kTokens * block.size, 1);
  for (const int num_used : {1, 3}) {  // all tokens to one expert, or to all
    const Routed routed = route(kTokens, 2, num_used, 5);
    CHECK(run(block, x, routed, threads.pool()) == by_single_products(block, x, routed), num_used);
  }
}

TEST(experts, have_biases_and_a_clamped_activation) {
  check_biases_and(Activation::kClampedSwiglu, [](double gate, double up) {
    const double g = std::min<double>(gate, kLimit);
    return g / (1.0 + std::exp(-kAlpha * g)) * (std::clamp<double>(up, -kLimit, kLimit) + 1.0);
  });
}

TEST(experts, have_biases_and_a_capped_activation) {
  check_biases_and(Activation::kCappedSwiglu, [](double gate, double up) {
    return std::min<double>(gate / (1.0 + std::exp(-gate)), kLimit) * std::clamp<double>(up, -kLimit, kLimit);
  });
}

TEST(experts, have_biases_and_a_limited_activation) {
  check_biases_and(Activation::kLimitedSwiglu, [](double gate, double up) {
    const double g = std::min<double>(gate, kLimit);
    return g / (1.0 + std::exp(-g)) * std::clamp<double>(up, -kLimit, kLimit);
  });
}

TEST(experts, have_biases_and_a_situ_activation) {
  check_biases_and(Activation::kSitu, [](double gate, double up) {
    return kAlpha * std::tanh(gate / kAlpha) / (1.0 + std::exp(-gate)) * kLimit * std::tanh(up / kLimit);
  });
}

TEST(experts, take_addends_and_hand_out_what_down_gets) {
  ThreadPool threads(4);
  constexpr int64_t kTokens = 50, kSlots = 3, kNum = 5;
  for_each_way([&](const WeightFormat& format, bool quantize, const std::string& name) {
    Block block = make_block(format, kNum, 64, 128, true);
    block.quantize = quantize;
    const std::vector<float> x = normal(kTokens * block.size, 1);
    Routed routed = route(kTokens, kSlots, kNum, 2);
    routed.ids[4] = -1;
    const std::vector<float> with_biases = run(block, x, routed, threads.pool());

    const auto addends = [&](Stack& stack) {
      std::vector<float> out(kTokens * kSlots * block.hidden, std::nanf(""));
      for (int64_t i = 0; i < kTokens * kSlots; ++i) {
        if (routed.ids[i] < 0) continue;
        std::copy_n(&stack.bias[routed.ids[i] * block.hidden], block.hidden, &out[i * block.hidden]);
      }
      stack.bias.clear();
      return out;
    };
    const std::vector<float> of_gate = addends(block.gate), of_up = addends(block.up);
    std::vector<float> out(x.size(), std::nanf("")), hidden(of_up.size(), std::nanf(""));
    kernels().experts({x.data(), routed.ids.data(), routed.weights.data(), kTokens, kSlots, kNum, block.gate.matrices(),
                       block.up.matrices(), block.down.matrices(), quantize, block.activation, kAlpha, kLimit,
                       of_gate.data(), of_up.data(), out.data(), hidden.data()},
                      threads.pool());
    CHECK(out == with_biases, name);

    std::vector<float> again(x.size(), 0.0f);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (const int64_t i : in_order(routed, t * kSlots, kSlots, kNum)) {
        const int32_t e = routed.ids[i];
        const std::vector<float> y = multiply(&hidden[i * block.hidden], block.down.format, {block.down.of(e)},
                                              block.size, quantize, Activation::kNone);
        for (int64_t c = 0; c < block.size; ++c) {
          const float weighted = routed.weights[i] * (y[c] + block.down.bias[e * block.size + c]);
          again[t * block.size + c] += weighted;
        }
      }
    }
    CHECK(again == out, name);
    for (int64_t h = 0; h < block.hidden; ++h) CHECK(hidden[4 * block.hidden + h] == 0.0f, name, h);
  });
}

TEST(experts, let_nan_through_limits) {
  constexpr int64_t kTokens = 9, kSlots = 2, kNum = 4, kNan = 2;
  const Routed routed = route(kTokens, kSlots, kNum, 2);
  for (const Activation activation : {Activation::kClampedSwiglu, Activation::kCappedSwiglu, Activation::kLimitedSwiglu,
                                      Activation::kSitu, Activation::kReluSquared}) {
    for (const bool in_gate : {true, false}) {
      if (in_gate && activation == Activation::kReluSquared) continue;  // which has no gate
      Block block = make_block(plain_format(WeightType::kF32, 0), kNum, 37, 45, true);
      block.activation = activation;
      (in_gate ? block.gate : block.up).bias[kNan * block.hidden + 7] = std::nanf("");
      const std::vector<float> out = run(block, normal(kTokens * block.size, 1), routed, no_pool());
      for (int64_t t = 0; t < kTokens; ++t) {
        const int32_t* ids = &routed.ids[t * kSlots];
        const bool expected = std::count(ids, ids + kSlots, kNan) > 0;
        for (int64_t c = 0; c < block.size; ++c) CHECK(std::isnan(out[t * block.size + c]) == expected, t, c);
      }
    }
  }
}

TEST(experts, that_are_not_there_add_nothing) {
  const Block block = make_block(plain_format(WeightType::kF32, 0), 3, 16, 32, false);
  const std::vector<float> x = normal(4 * block.size, 1);
  Routed routed = route(4, 2, 3, 1);
  routed.ids = {0, 2, -1, 1, 3, 1 << 30, 2, -5};
  const std::vector<float> out = run(block, x, routed, no_pool());
  CHECK(out == by_single_products(block, x, routed));
  for (int64_t c = 0; c < block.size; ++c) CHECK(out[2 * block.size + c] == 0.0f);
  routed.ids.assign(8, -1);
  CHECK(run(block, x, routed, no_pool()) == std::vector<float>(x.size(), 0.0f));
  CHECK(run(block, {}, {}, no_pool()).empty());
}
