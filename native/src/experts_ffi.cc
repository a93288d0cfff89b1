#include "ffi_common.h"

namespace jaxis {
namespace {

using Bytes = ffi::Buffer<ffi::U8>;
using Floats = ffi::Buffer<ffi::F32>;

constexpr size_t kFormatFields = 4;  // type, group, has_zero_points, has_wide_scales

WeightFormat format_from(const int64_t* fields, int64_t k) {
  return {static_cast<WeightType>(fields[0]), k, fields[1], fields[2] != 0, fields[3] != 0};
}

bool has_size(const Bytes& data, const ExpertMatrices& m, int64_t num_experts) {
  return static_cast<int64_t>(data.element_count()) == num_experts * num_panels(m.n) * panel_bytes(m.format);
}

// `biases` is empty, or gate's and up's [num_experts, hidden_size] and down's [num_experts, columns of x]. `formats`
// has the four fields of a format, of gate and up first, then of down.
ffi::Error run_experts(ffi::ThreadPool threads, Floats x, ffi::Buffer<ffi::S32> ids, Floats weights, Bytes gate,
                       Bytes up, Bytes down, ffi::RemainingArgs biases, ffi::Span<const int64_t> formats,
                       int64_t num_experts, int64_t hidden_size, bool quantize_activations, int32_t activation,
                       float alpha, float limit, ffi::ResultBuffer<ffi::F32> out) {
  if (x.dimensions().size() != 2 || ids.dimensions().size() != 2 || ids.dimensions()[0] != x.dimensions()[0] ||
      weights.element_count() != ids.element_count() || formats.size() != 2 * kFormatFields) {
    return ffi::Error::InvalidArgument("experts: operands do not fit each other");
  }
  const int64_t columns = x.dimensions()[1];
  Experts a{};
  a.x = x.typed_data();
  a.ids = ids.typed_data();
  a.weights = weights.typed_data();
  a.tokens = ids.dimensions()[0];
  a.slots = ids.dimensions()[1];
  a.num_experts = num_experts;
  a.gate = {gate.typed_data(), nullptr, format_from(formats.begin(), columns), hidden_size};
  a.up = {up.typed_data(), nullptr, a.gate.format, hidden_size};
  a.down = {down.typed_data(), nullptr, format_from(formats.begin() + kFormatFields, hidden_size), columns};
  if (!has_size(gate, a.gate, num_experts) || !has_size(up, a.up, num_experts) ||
      !has_size(down, a.down, num_experts)) {
    return ffi::Error::InvalidArgument("experts: a packed weight has not the size that its shape needs");
  }
  if (biases.size() != 0) {
    const auto of_gate = biases.get<Floats>(0), of_up = biases.get<Floats>(1), of_down = biases.get<Floats>(2);
    const size_t hidden = static_cast<size_t>(num_experts * hidden_size);
    if (!of_gate.has_value() || !of_up.has_value() || !of_down.has_value() || of_gate->element_count() != hidden ||
        of_up->element_count() != hidden || of_down->element_count() != static_cast<size_t>(num_experts * columns)) {
      return ffi::Error::InvalidArgument("experts: biases do not fit the weights");
    }
    a.gate.bias = of_gate->typed_data();
    a.up.bias = of_up->typed_data();
    a.down.bias = of_down->typed_data();
  }
  a.quantize_activations = quantize_activations;
  a.activation = static_cast<ExpertActivation>(activation);
  a.alpha = alpha;
  a.limit = limit;
  a.out = out->typed_data();
  return run_kernel(threads, [&](const Pool& pool) { kernels().experts(a, pool); });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_experts, run_experts,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<Floats>()
                  .Arg<ffi::Buffer<ffi::S32>>()
                  .Arg<Floats>()
                  .Arg<Bytes>()
                  .Arg<Bytes>()
                  .Arg<Bytes>()
                  .RemainingArgs()
                  .Attr<ffi::Span<const int64_t>>("formats")
                  .Attr<int64_t>("num_experts")
                  .Attr<int64_t>("hidden_size")
                  .Attr<bool>("quantize_activations")
                  .Attr<int32_t>("activation")
                  .Attr<float>("alpha")
                  .Attr<float>("limit")
                  .Ret<Floats>());
