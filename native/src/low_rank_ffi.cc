#include "low_rank.h"

#include <cstdint>

#include "ffi_common.h"

namespace jaxis {
namespace {

// Operands: x [rows, k], slots [rows], then a [slots, rank, k], b [slots, rank, n] and ranks [slots] of each matrix,
// all of one type, float32 or bfloat16. Results: one for each matrix, [rows, n].
ffi::Error run_low_rank(ffi::ThreadPool threads, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return run_kernel("low_rank", threads, [&](const Pool& pool) {
    require(results.size() >= 1 && results.size() <= kMaxMatrices, "one to four pairs are multiplied at once");
    require(operands.size() == 2 + 3 * results.size(), "there are not three operands for each result");
    const auto x = operands.get<F32>(0);
    const auto slots = operands.get<I32>(1);
    require(x.has_value() && slots.has_value(), "x is not float32, or the slots are not int32");
    require_shape("x", *x, {kAnySize, kAnySize});
    LowRank a{};
    a.x = x->typed_data();
    a.rows = x->dimensions()[0];
    a.k = x->dimensions()[1];
    require_shape("slots", *slots, {a.rows});
    a.slots = slots->typed_data();
    a.num_matrices = static_cast<int>(results.size());
    const auto matrices = operands.get<ffi::AnyBuffer>(2);
    a.is_bf16 = matrices.has_value() && matrices->element_type() == ffi::BF16;
    for (size_t i = 0; i < results.size(); ++i) {
      const auto first = operands.get<ffi::AnyBuffer>(2 + 3 * i), second = operands.get<ffi::AnyBuffer>(3 + 3 * i);
      const auto ranks = operands.get<I32>(4 + 3 * i);
      const auto type = a.is_bf16 ? ffi::BF16 : ffi::F32;
      require(first.has_value() && second.has_value() && ranks.has_value() && first->element_type() == type &&
                  second->element_type() == type,
              "a matrix is neither float32 nor bfloat16, or not of the first one's type");
      require_shape("a", *first, {kAnySize, kAnySize, a.k});
      if (i == 0) a.num_slots = first->dimensions()[0], a.rank = first->dimensions()[1];
      require_shape("a", *first, {a.num_slots, a.rank, a.k});
      require_shape("b", *second, {a.num_slots, a.rank, kAnySize});
      require_shape("ranks", *ranks, {a.num_slots});
      a.a[i] = first->untyped_data();
      a.b[i] = second->untyped_data();
      a.ranks[i] = ranks->typed_data();
      a.n[i] = second->dimensions()[2];
      for (int64_t slot = 0; slot < a.num_slots; ++slot) {
        require(a.ranks[i][slot] >= 0 && a.ranks[i][slot] <= a.rank, "a rank is larger than its matrix");
      }
      auto out = results.get<F32>(i);
      require(out.has_value(), "a result is not float32");
      require_shape("the output", **out, {a.rows, a.n[i]});
      a.out[i] = (*out)->typed_data();
    }
    for (int64_t row = 0; row < a.rows; ++row) {
      require(a.slots[row] >= 0 && a.slots[row] <= a.num_slots, "a row has a slot that is not there");
    }
    kernels().low_rank(a, pool);
  });
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_low_rank, run_low_rank, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets());
