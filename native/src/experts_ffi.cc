#include "experts.h"

#include <cstddef>
#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

ExpertMatrices make_matrices(const char* name, const U8& data, ffi::Span<const int64_t> format, int64_t num_experts,
                             int64_t n, int64_t k) {
  ExpertMatrices m{};
  m.data = data.typed_data();
  m.format = make_weight_format(format, k);
  m.n = n;
  require_packed(name, data, num_experts, n, m.format);
  return m;
}

const float* bias_of(const ffi::RemainingArgs& biases, size_t index, int64_t num_experts, int64_t n) {
  const auto bias = biases.get<F32>(index);
  require(bias.has_value(), "biases are not float32");
  require_shape("a bias", *bias, {num_experts, n});
  return bias->typed_data();
}

// `others` are gate's and up's biases [num_experts, hidden_size] and down's [num_experts, columns of x], or none; then,
// if there are two results, addends of gate and up [tokens, slots, hidden_size]. The second result is `hidden`.
ffi::Error run_experts(ffi::ThreadPool threads, F32 x, I32 ids, F32 weights, U8 gate, U8 up, U8 down,
                       ffi::RemainingArgs others, ffi::RemainingRets results, ffi::Span<const int64_t> gate_format,
                       ffi::Span<const int64_t> up_format, ffi::Span<const int64_t> down_format, int64_t num_experts,
                       int64_t hidden_size, bool quantize_activations, int32_t activation, float alpha, float limit) {
  return run_kernel("experts", threads, [&](const Pool& pool) {
    require_shape("x", x, {kAnySize, kAnySize});
    const int64_t tokens = x.dimensions()[0], columns = x.dimensions()[1];
    require_shape("ids", ids, {tokens, kAnySize});
    const int64_t slots = ids.dimensions()[1];
    require_shape("weights", weights, {tokens, slots});
    const bool has_addends = results.size() == 2;
    const size_t num_biases = others.size() - (has_addends ? 2 : 0);
    require(results.size() == 1 || has_addends, "there are not one or two results");
    require(num_biases == 0 || num_biases == 3, "there are not three biases, or none");
    auto out = results.get<F32>(0);
    require(out.has_value(), "the result is not float32");
    require_shape("out", **out, {tokens, columns});
    require(num_experts > 0, "there are no experts");

    Experts a{};
    a.x = x.typed_data();
    a.ids = ids.typed_data();
    a.weights = weights.typed_data();
    a.tokens = tokens;
    a.slots = slots;
    a.num_experts = num_experts;
    a.gate = make_matrices("gate", gate, gate_format, num_experts, hidden_size, columns);
    a.up = make_matrices("up", up, up_format, num_experts, hidden_size, columns);
    a.down = make_matrices("down", down, down_format, num_experts, columns, hidden_size);
    if (num_biases != 0) {
      a.gate.bias = bias_of(others, 0, num_experts, hidden_size);
      a.up.bias = bias_of(others, 1, num_experts, hidden_size);
      a.down.bias = bias_of(others, 2, num_experts, columns);
    }
    a.quantize_activations = quantize_activations;
    if (quantize_activations) {
      require_quantizable_activations(a.gate.format);
      require_quantizable_activations(a.up.format);
      require_quantizable_activations(a.down.format);
    }
    a.activation = make_activation(activation);
    require(a.activation != Activation::kNone, "experts have an activation");
    a.alpha = alpha;
    a.limit = limit;
    a.out = (*out)->typed_data();
    if (has_addends) {
      const auto of_slots = [&](size_t index) {
        const auto addend = others.get<F32>(num_biases + index);
        require(addend.has_value(), "an addend is not float32");
        require_shape("an addend", *addend, {tokens, slots, hidden_size});
        return addend->typed_data();
      };
      a.gate_addend = of_slots(0);
      a.up_addend = of_slots(1);
      auto hidden = results.get<F32>(1);
      require(hidden.has_value(), "hidden is not float32");
      require_shape("hidden", **hidden, {tokens, slots, hidden_size});
      a.hidden = (*hidden)->typed_data();
    }
    kernels().experts(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_experts, run_experts,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<F32>()
                  .Arg<I32>()
                  .Arg<F32>()
                  .Arg<U8>()
                  .Arg<U8>()
                  .Arg<U8>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<ffi::Span<const int64_t>>("gate_format")
                  .Attr<ffi::Span<const int64_t>>("up_format")
                  .Attr<ffi::Span<const int64_t>>("down_format")
                  .Attr<int64_t>("num_experts")
                  .Attr<int64_t>("hidden_size")
                  .Attr<bool>("quantize_activations")
                  .Attr<int32_t>("activation")
                  .Attr<float>("alpha")
                  .Attr<float>("limit"));
