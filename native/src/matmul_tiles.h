// Products of quantized rows with columns of bytes by tiles: of so many rows that filling tiles is worth it.
//
// The tiles compute the sums of integers, which are exact; what is made of these is the arithmetic of micro_int8, in
// its order. So results are the same bits as those of the micro-kernels for fewer rows.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "matmul.h"
#include "matmul_micro.h"
#include "simd.h"
#include "tiles.h"

namespace jaxis::JAXIS_ISA {

// Fewer rows are faster without tiles.
constexpr int64_t kMinTiledRows = 8;
// Groups of columns whose sums are in the first cache together.
constexpr int64_t kTiledGroups = 6;
constexpr int64_t kTiledColumnsAtOnce = kTiledGroups * kActivationGroup;

#if defined(JAXIS_SIMD_AMX)

// What micro_int8 makes of the sums of R rows' products with `groups` groups of w, from group `begin` of w and of x on,
// as multiply_tiles leaves them; set in or (not `first`) added to c [R][32].
template <int R>
void add_tile_sums(const int32_t* sums, const QuantizedRows& x, const IntegerColumns& w, int64_t begin, int64_t groups,
                   float* c, bool first) {
  for (int half = 0; half < 2; ++half) {
    F32x16 total[R];
    for (int r = 0; r < R; ++r) total[r] = first ? zero() : load(c + r * kPanelRows + half * kLanes);
    for (int64_t g = begin; g < begin + groups; ++g) {
      const int32_t *from = sums + (2 * (g - begin) + half) * kMaxTileRows * kLanes, *offsets = x.offsets + g * R;
      const float *x_scales = x.scales + g * R, *midpoints = x.midpoints + g * R, *x_sums = x.sums + g * R;
      const int64_t at = g * kPanelRows + half * kLanes;
      const auto product = [&](int r)
                               __attribute__((always_inline)) { return load_tile_sums(from + r * kLanes, offsets[r]); };
      if (w.scales == nullptr) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) total[r] = fma(product(r), broadcast(x_scales[r]), total[r]);
      } else if (w.zero_points == nullptr) {
        const F32x16 scales = load(w.scales + at);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) total[r] = fma(product(r), scales * broadcast(x_scales[r]), total[r]);
      } else {
        const F32x16 scales = load(w.scales + at), zeros = zero() - load(w.zero_points + at);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const F32x16 less_zeros = fma(zeros, broadcast(x_sums[r]), product(r));  // exact
          total[r] = fma(less_zeros, scales * broadcast(x_scales[r]), total[r]);
        }
      }
      const F32x16 scaled_sums = load(w.scaled_sums + at);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r] = fma(scaled_sums, broadcast(midpoints[r]), total[r]);
      if (w.minima == nullptr) continue;
      const F32x16 minima = load(w.minima + at);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r] = fma(minima, broadcast(x_sums[r]), total[r]);
    }
    for (int r = 0; r < R; ++r) store(c + r * kPanelRows + half * kLanes, total[r]);
  }
}

// As micro_int8 of `num` rows whose parts are whole groups. A group's values are [num][kActivationGroup], and offsets
// are kTileOriginBits more; the tiles are configured for at least as many rows.
inline void multiply_by_tiles(const QuantizedRows& x, int num, const IntegerColumns& w, float* c, bool first) {
  alignas(64) int32_t sums[kTiledGroups * 2 * kMaxTileRows * kLanes];
  const int64_t all = w.spans * w.span_parts, group_bytes = kActivationGroup * kPanelRows;
  const bool has_one_stride = w.span_parts == 1 || w.span_stride == w.span_parts * group_bytes;
  const int64_t stride = w.span_parts == 1 ? w.span_stride : group_bytes;
  for (int64_t begin = 0, groups = 0; begin < all; begin += groups) {
    const int64_t span = begin / w.span_parts, place = begin % w.span_parts;
    groups = min_of(kTiledGroups, has_one_stride ? all - begin : w.span_parts - place);
    multiply_tiles(x.values + begin * num * kActivationGroup, num * kActivationGroup,
                   w.bytes + span * w.span_stride + place * group_bytes, stride, groups, sums);
    with_count<kMaxTileRows>(num,
                             [&](auto r) { add_tile_sums<r()>(sums, x, w, begin, groups, c, first && begin == 0); });
  }
}

#else

// Never called.
inline void multiply_by_tiles(const QuantizedRows&, int, const IntegerColumns&, float*, bool) {}

#endif

}  // namespace jaxis::JAXIS_ISA
