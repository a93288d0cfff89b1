#include "matmul.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

// Operands: x [..., k], then one packed matrix for each entry of `n`, then one addend [..., n] for each, or none, then
// one factor [..., n] for each, or none.
// Results: one for each matrix, or one in all with an activation.
ffi::Error run_matmul(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      ffi::Span<const int64_t> format, bool quantize_activations, bool x_is_integer, bool x_is_bfloat16,
                      int32_t activation, ffi::Span<const int64_t> n) {
  return run_kernel("matmul", threads, [&](const Pool& pool) {
    require(n.size() >= 1 && n.size() <= kMaxMatrices, "one to four matrices are multiplied at once");
    const size_t per_matrix = (operands.size() - 1) / n.size();
    require(operands.size() == per_matrix * n.size() + 1 && per_matrix >= 1 && per_matrix <= 3,
            "there is not one operand for x and one for each matrix");
    const auto x = operands.get<F32>(0);
    require(x.has_value(), "x is not float32");
    const int64_t k = last_dimension("x", *x);

    Matmul a{};
    a.x = x->typed_data();
    a.rows = k == 0 ? 0 : static_cast<int64_t>(x->element_count()) / k;
    a.format = make_weight_format(format, k);
    a.quantize_activations = quantize_activations;
    a.x_is_integer = x_is_integer;
    a.x_is_bfloat16 = x_is_bfloat16;
    a.activation = make_activation(activation);
    a.num_matrices = static_cast<int>(n.size());
    if (quantize_activations) require_quantizable_activations(a.format);
    const bool is_gated = a.activation != Activation::kNone;
    require(a.activation != Activation::kClampedSwiglu, "clamped_swiglu is an activation of experts only");
    require(a.activation != Activation::kReluSquared, "relu2 is an activation of experts only");
    require(a.activation != Activation::kCappedSwiglu, "capped_swiglu is an activation of experts only");
    require(a.activation != Activation::kLimitedSwiglu, "limited_swiglu is an activation of experts only");
    require(a.activation != Activation::kSitu, "situ is an activation of experts only");
    require(!is_gated || (n.size() == 2 && n[0] == n[1]), "an activation takes two matrices of one size");
    require(results.size() == (is_gated ? 1 : n.size()), "there is not one result for each product");
    for (size_t i = 0; i < n.size(); ++i) {
      const auto weight = operands.get<U8>(i + 1);
      require(weight.has_value(), "a weight is not packed");
      require_packed("weight", *weight, 1, n[i], a.format);
      a.weight[i] = weight->typed_data();
      a.n[i] = n[i];
      const auto changes = [&](size_t kind) {
        const auto change = operands.get<F32>(kind * n.size() + 1 + i);
        require(change.has_value(), "an addend or factor is not float32");
        require(static_cast<int64_t>(change->element_count()) == a.rows * n[i], "an addend or factor has not x's rows");
        return change->typed_data();
      };
      if (per_matrix > 1) a.addend[i] = changes(1);
      if (per_matrix > 2) a.factor[i] = changes(2);
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto out = results.get<F32>(i);
      require(out.has_value(), "a result is not float32");
      require(static_cast<int64_t>((*out)->element_count()) == a.rows * n[i], "a result has not x's rows");
      a.out[i] = (*out)->typed_data();
    }
    kernels().matmul(a, pool);
  });
}

ffi::Error run_packed_rows(ffi::ThreadPool threads, I32 ids, U8 weight, ffi::Span<const int64_t> format, int64_t n,
                           F32Result out) {
  return run_kernel("packed_rows", threads, [&](const Pool& pool) {
    const int64_t k = last_dimension("out", *out);
    PackedRows a{};
    a.ids = ids.typed_data();
    a.count = static_cast<int64_t>(ids.element_count());
    a.format = make_weight_format(format, k);
    a.weight = weight.typed_data();
    a.n = n;
    a.out = out->typed_data();
    require(n > 0, "the matrix has no rows");
    require_packed("weight", weight, 1, n, a.format);
    require(static_cast<int64_t>(out->element_count()) == a.count * k, "the result has not a row for each id");
    kernels().packed_rows(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_matmul, run_matmul,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<ffi::Span<const int64_t>>("format")
                  .Attr<bool>("quantize_activations")
                  .Attr<bool>("x_is_integer")
                  .Attr<bool>("x_is_bfloat16")
                  .Attr<int32_t>("activation")
                  .Attr<ffi::Span<const int64_t>>("n"));

JAXIS_HANDLER(jaxis_packed_rows, run_packed_rows,
              ffi::Ffi::Bind()
                  .Ctx<ffi::ThreadPool>()
                  .Arg<I32>()
                  .Arg<U8>()
                  .Attr<ffi::Span<const int64_t>>("format")
                  .Attr<int64_t>("n")
                  .Ret<F32>());
