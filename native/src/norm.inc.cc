// Norms of rows.
#include "norm.h"

#include <cmath>
#include <cstdint>

#include "norm_row.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// The sum of of_vector(i) over a row's whole vectors and of of_element(i) over the rest.
template <typename OfVector, typename OfElement>
JAXIS_INLINE float sum_row(int64_t size, OfVector&& of_vector, OfElement&& of_element) {
  F32x16 sums = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums = sums + of_vector(i);
  float total = reduce_add(sums);
  for (; i < size; ++i) total += of_element(i);
  return total;
}

void layer_norm_row(const LayerNorm& a, int64_t row) {
  const float* x = a.x + row * a.size;
  const float* weight = a.weight + row % a.weight_rows * a.size;
  const float* bias = a.bias + row % a.weight_rows * a.size;
  float* out = a.out + row * a.size;
  const float size = static_cast<float>(a.size);
  const float mean = sum_row(a.size, [&](int64_t i) { return load(x + i); }, [&](int64_t i) { return x[i]; }) / size;
  const F32x16 means = broadcast(mean);
  const float squares = sum_row(
      a.size,
      [&](int64_t i) {
        const F32x16 centred = load(x + i) - means;
        return centred * centred;
      },
      [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  const float scale = 1.0f / std::sqrt(squares / size + a.epsilon);
  const F32x16 scales = broadcast(scale);
  int64_t i = 0;
  for (; i + kLanes <= a.size; i += kLanes) {
    store(out + i, fma((load(x + i) - means) * scales, load(weight + i), load(bias + i)));
  }
  for (; i < a.size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

template <typename Norm, typename OfRow>
void for_each_row(const Norm& a, const Pool& pool, OfRow&& of_row) {
  // A thread is worth waking for some ten thousand elements.
  const int64_t rows_per_task = 1 + 16384 / (a.size + 1);
  parallel_for(pool, (a.rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = (task + 1) * rows_per_task < a.rows ? (task + 1) * rows_per_task : a.rows;
    for (int64_t row = task * rows_per_task; row < end; ++row) of_row(a, row);
  });
}

}  // namespace

void rms_norm(const RmsNorm& a, const Pool& pool) { for_each_row(a, pool, norm_row); }

void layer_norm(const LayerNorm& a, const Pool& pool) { for_each_row(a, pool, layer_norm_row); }

}  // namespace jaxis::JAXIS_ISA
