// Norms of rows, and what they begin with.
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

struct Moments {
  float mean;
  float variance;
};

Moments moments_of(const float* x, int64_t elements) {
  const float size = static_cast<float>(elements);
  const float mean = sum_row(elements, [&](int64_t i) { return load(x + i); }, [&](int64_t i) { return x[i]; }) / size;
  const F32x16 means = broadcast(mean);
  const float squares = sum_row(
      elements,
      [&](int64_t i) {
        const F32x16 centred = load(x + i) - means;
        return centred * centred;
      },
      [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, squares / size};
}

void layer_norm_row(const LayerNorm& a, int64_t row) {
  const float* x = a.x + row * a.size;
  const float* weight = a.weight + row % a.weight_rows * a.size;
  const float* bias = a.bias + row % a.weight_rows * a.size;
  float* out = a.out + row * a.size;
  const Moments moments = moments_of(x, a.size);
  const float mean = moments.mean, scale = 1.0f / std::sqrt(moments.variance + a.epsilon);
  const F32x16 means = broadcast(mean);
  const F32x16 scales = broadcast(scale);
  int64_t i = 0;
  for (; i + kLanes <= a.size; i += kLanes) {
    store(out + i, fma((load(x + i) - means) * scales, load(weight + i), load(bias + i)));
  }
  for (; i < a.size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

template <typename Rows, typename OfRow>
void for_each_row(const Rows& a, const Pool& pool, OfRow&& of_row) {
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

void row_moments(const RowMoments& a, const Pool& pool) {
  for_each_row(a, pool, [](const RowMoments& of, int64_t row) {
    const Moments moments = moments_of(of.x + row * of.size, of.size);
    of.mean[row] = moments.mean;
    of.variance[row] = moments.variance;
  });
}

}  // namespace jaxis::JAXIS_ISA
