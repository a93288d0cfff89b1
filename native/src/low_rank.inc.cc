// Products with pairs of thin matrices, another pair for each row.
#include "low_rank.h"

#include <cstdint>

#include "arithmetic.h"
#include "matmul_rows.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int kDots = 4;                  // side by side, because each addition waits for the one before it
constexpr int64_t kColumns = 4 * kLanes;  // whose sums are in registers
constexpr int64_t kColumnsPerTask = 4 * kColumns;

JAXIS_INLINE F32x16 load_elements(const float* p) { return load(p); }
JAXIS_INLINE F32x16 load_elements(const bf16_t* p) { return load_bf16(p); }

JAXIS_INLINE F32x16 load_some(const float* p, int64_t count) { return load_part(p, count); }
JAXIS_INLINE F32x16 load_some(const bf16_t* p, int64_t count) {
  if (count >= kLanes) return load_bf16(p);
  bf16_t part[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) part[i] = p[i];
  return load_bf16(part);
}

// out[j] = a[j] x for `count` rows of a, at most kDots.
template <typename T>
void multiply_rows(const T* a, const float* x, int64_t k, int64_t count, float* out) {
  F32x16 sums[kDots] = {zero(), zero(), zero(), zero()};
  const T* rows[kDots];
  for (int64_t j = 0; j < kDots; ++j) rows[j] = a + (j < count ? j : 0) * k;
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const F32x16 v = load(x + i);
    for (int j = 0; j < kDots; ++j) sums[j] = fma(v, load_elements(rows[j] + i), sums[j]);
  }
  if (i < k) {
    const F32x16 v = load_part(x + i, k - i);
    for (int j = 0; j < kDots; ++j) sums[j] = fma(v, load_some(rows[j] + i, k - i), sums[j]);
  }
  for (int64_t j = 0; j < count; ++j) out[j] = reduce_add(sums[j]);
}

// out[c] = the sum of u[j] b[j][c] over j, for columns [first, last).
template <typename T>
void combine_columns(const T* b, const float* u, int64_t rank, int64_t n, int64_t first, int64_t last, float* out) {
  int64_t c = first;
  for (; c + kColumns <= last; c += kColumns) {
    F32x16 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t j = 0; j < rank; ++j) {
      const F32x16 factor = broadcast(u[j]);
      for (int i = 0; i < 4; ++i) sums[i] = fma(factor, load_elements(b + j * n + c + i * kLanes), sums[i]);
    }
    for (int i = 0; i < 4; ++i) store(out + c + i * kLanes, sums[i]);
  }
  for (; c < last; c += kLanes) {
    F32x16 sums = zero();
    for (int64_t j = 0; j < rank; ++j) sums = fma(broadcast(u[j]), load_some(b + j * n + c, last - c), sums);
    store_part(out + c, sums, last - c);
  }
}

template <typename T>
void multiply(const LowRank& a, const Pool& pool) {
  const int64_t groups = ceil_div(a.rank, kDots), pairs = a.rows * a.num_matrices;
  float* products = static_cast<float*>(scratch(Scratch::kRows, pairs * a.rank * 4));
  const Pool alone = {1, nullptr, nullptr};
  const auto rank_of = [&](int64_t matrix, int64_t slot) { return static_cast<int64_t>(a.ranks[matrix][slot]); };

  parallel_for(pairs * a.rank * a.k > 8 * kParallelElements ? pool : alone, pairs * groups, [&](int64_t task) {
    const int64_t pair = task / groups, first = task % groups * kDots;
    const int64_t row = pair / a.num_matrices, matrix = pair % a.num_matrices, slot = a.slots[row] - 1;
    if (slot < 0 || first >= rank_of(matrix, slot)) return;
    const int64_t count = min_of(static_cast<int64_t>(kDots), rank_of(matrix, slot) - first);
    multiply_rows(static_cast<const T*>(a.a[matrix]) + (slot * a.rank + first) * a.k, a.x + row * a.k, a.k, count,
                  products + pair * a.rank + first);
  });

  int64_t columns = 0;
  for (int i = 0; i < a.num_matrices; ++i) columns += ceil_div(a.n[i], kColumnsPerTask);
  parallel_for(a.rows * columns * kColumnsPerTask * a.rank > 8 * kParallelElements ? pool : alone, a.rows * columns,
               [&](int64_t task) {
                 const int64_t row = task / columns, slot = a.slots[row] - 1;
                 int64_t part = task % columns;
                 int64_t matrix = 0;
                 while (part >= ceil_div(a.n[matrix], kColumnsPerTask)) {
                   part -= ceil_div(a.n[matrix++], kColumnsPerTask);
                 }
                 const int64_t n = a.n[matrix], first = part * kColumnsPerTask;
                 const int64_t last = min_of(first + kColumnsPerTask, n);
                 float* out = a.out[matrix] + row * n;
                 const int64_t rank = slot < 0 ? 0 : rank_of(matrix, slot);
                 const T* b = static_cast<const T*>(a.b[matrix]) + (slot < 0 ? 0 : slot) * a.rank * n;
                 combine_columns(b, products + (row * a.num_matrices + matrix) * a.rank, rank, n, first, last, out);
               });
}

}  // namespace

void low_rank(const LowRank& a, const Pool& pool) { a.is_bf16 ? multiply<bf16_t>(a, pool) : multiply<float>(a, pool); }

}  // namespace jaxis::JAXIS_ISA
