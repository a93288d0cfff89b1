// Gates. Every element goes through the same vector operations, so that its bits do not depend on where it is.
#include "gates.h"

#include <cstdint>

#include "activations.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// log(1 + y) for y from 0 to 1, as 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = y / (2 + y), which is at most 1 / 3.
JAXIS_INLINE F32x16 log1p_of_fraction(F32x16 y) {
  const F32x16 s = y / (broadcast(2.0f) + y);
  const F32x16 square = s * s;
  F32x16 series = broadcast(1.0f / 17.0f);
  for (int odd = 15; odd >= 1; odd -= 2) series = fma(series, square, broadcast(1.0f / static_cast<float>(odd)));
  return broadcast(2.0f) * s * series;
}

JAXIS_INLINE F32x16 softplus_lanes(F32x16 x) {
  const F32x16 magnitude = max(x, zero() - x);
  return max(x, zero()) + log1p_of_fraction(exp(zero() - magnitude));
}

// The standard normal distribution's function. Its tail beyond u is e ** (-u * u / 2) times a function of
// 1 / (1 + 0.21 u) that a polynomial of degree 9 approximates to 1.5e-8 of its value for u up to 14; so the result is
// right to 3e-7, and the tail below -3 to some 1e-6 of itself.
JAXIS_INLINE F32x16 normal_cdf_lanes(F32x16 x) {
  constexpr float kCoefficients[] = {-0.0739305168f, 0.295749992f,  -0.358483970f, 0.386690736f,  -0.124776639f,
                                     0.141434982f,   0.0634277463f, 0.0863224044f, 0.0835570619f, 8.22590482e-6f};
  const F32x16 u = max(x, zero() - x);
  const F32x16 t = broadcast(1.0f) / fma(u, broadcast(0.21f), broadcast(1.0f));
  F32x16 series = broadcast(kCoefficients[0]);
  for (int i = 1; i < 10; ++i) series = fma(series, t, broadcast(kCoefficients[i]));
  const F32x16 tail = exp(u * u * broadcast(-0.5f)) * series;
  // The tail where x is negative, else 1 less the tail.
  const F32x16 upper = keep_at_least(x, zero(), broadcast(1.0f));
  return fma(tail, fma(upper, broadcast(-2.0f), broadcast(1.0f)), upper);
}

JAXIS_INLINE F32x16 apply_gate(Gate gate, F32x16 x) {
  if (gate == Gate::kSilu) return apply_activation(Activation::kSilu, x);
  if (gate == Gate::kSoftplus) return softplus_lanes(x);
  if (gate == Gate::kNormalCdf) return normal_cdf_lanes(x);
  return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - x));
}

void softplus_row(const Softplus& a, int64_t row) {
  const float* x = a.x + row * a.size;
  float* out = a.out + row * a.size;
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t count = a.size - i;
    store_part(out + i, softplus_lanes(load_part(x + i, count) + load_part(a.bias + i, count)), count);
  }
}

void gated_row(const Gated& a, int64_t row) {
  const float* logits = a.logits + row * a.size;
  const float* x = a.x + row * a.size * a.shared_by;
  float* out = a.out + row * a.size * a.shared_by;
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t count = a.size - i;
    const F32x16 factors = apply_gate(a.gate, load_part(logits + i, count));
    if (a.shared_by == 1) {
      store_part(out + i, load_part(x + i, count) * factors, count);
      continue;
    }
    float lanes[kLanes];
    store(lanes, factors);
    for (int64_t lane = 0; lane < kLanes && lane < count; ++lane) {
      const F32x16 factor = broadcast(lanes[lane]);
      for (int64_t j = (i + lane) * a.shared_by, end = j + a.shared_by; j < end; j += kLanes) {
        store_part(out + j, load_part(x + j, end - j) * factor, end - j);
      }
    }
  }
}

void softmax_row(const Softmax& a, int64_t row) {
  const float* x = a.x + row * a.size;
  float* out = a.out + row * a.size;
  float largest = x[0];
  for (int64_t i = 1; i < a.size; ++i) largest = x[i] > largest ? x[i] : largest;
  const F32x16 largests = broadcast(largest);
  F32x16 sums = zero();
  float lanes[kLanes];
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t count = a.size - i;
    F32x16 powers = exp(load_part(x + i, count) - largests);
    if (count < kLanes) {
      // The lanes past the row's end count for nothing.
      store(lanes, powers);
      for (int64_t lane = count; lane < kLanes; ++lane) lanes[lane] = 0.0f;
      powers = load(lanes);
    }
    sums = sums + powers;
    store_part(out + i, powers, count);
  }
  const F32x16 total = broadcast(reduce_add(sums));
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t count = a.size - i;
    store_part(out + i, load_part(out + i, count) / total, count);
  }
}

// A thread is worth waking for some thousand elements.
template <typename OfRow>
void for_each_gated_row(int64_t rows, int64_t size, const Pool& pool, OfRow&& of_row) {
  const int64_t rows_per_task = 1 + 4096 / (size + 1);
  parallel_for(pool, (rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t end = (task + 1) * rows_per_task < rows ? (task + 1) * rows_per_task : rows;
    for (int64_t row = task * rows_per_task; row < end; ++row) of_row(row);
  });
}

}  // namespace

void softplus(const Softplus& a, const Pool& pool) {
  for_each_gated_row(a.rows, a.size, pool, [&](int64_t row) { softplus_row(a, row); });
}

void softmax(const Softmax& a, const Pool& pool) {
  for_each_gated_row(a.rows, a.size, pool, [&](int64_t row) { softmax_row(a, row); });
}

void gated(const Gated& a, const Pool& pool) {
  for_each_gated_row(a.rows, a.size * a.shared_by, pool, [&](int64_t row) { gated_row(a, row); });
}

}  // namespace jaxis::JAXIS_ISA
