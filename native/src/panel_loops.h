// What all products with panels share: the weights asked for ahead, and loops over the spans of a panel of codes whose
// kind and layout are known when they are compiled.
#pragma once

#include <cstdint>
#include <type_traits>

#include "matmul_codes.h"
#include "matmul_micro.h"
#include "simd.h"
#include "tiles.h"

namespace jaxis::JAXIS_ISA {

// Weights that come after those that several blocks of rows are multiplied with, asked for from memory meanwhile: while
// the blocks go through columns that are in the first cache, memory would be idle. Only prefetch instructions use the
// address, which may be past the weights' end.
struct WeightsAhead {
  const uint8_t* begin;
  int64_t bytes, num_blocks;

  // A block's share.
  void fetch(int64_t block) const {
    if (num_blocks <= 1) return;
    const int64_t end = bytes * (block + 1) / num_blocks;
    for (int64_t i = bytes * block / num_blocks; i < end; i += 64) __builtin_prefetch(begin + i);
  }
};
// Scales the sums of an int8 panel.
inline void scale_tile(const Int8Panel& w, int64_t num_rows, float* tile) {
  const F32x16 low = load(w.scales), high = load(w.scales + kLanes);
  for (int64_t r = 0; r < num_rows; ++r, tile += kPanelRows) {
    store(tile, load(tile) * low);
    store(tile + kLanes, load(tile + kLanes) * high);
  }
}

// Calls function(kind) with the kind of codes as a constant.
template <typename Function>
void with_code_kind(CodeKind kind, const Function& function) {
  switch (kind) {
#define JAXIS_CASE(K) \
  case K:             \
    return function(std::integral_constant<CodeKind, K>())
    JAXIS_CASE(CodeKind::kTwoBits);
    JAXIS_CASE(CodeKind::kNibbles);
    JAXIS_CASE(CodeKind::kByteLevels);
    JAXIS_CASE(CodeKind::kFloatLevels);
    JAXIS_CASE(CodeKind::kFiveBits);
    JAXIS_CASE(CodeKind::kSixBits);
    JAXIS_CASE(CodeKind::kBytes);
#undef JAXIS_CASE
  }
}

// Calls function(kind, what is known of the layout) with both as constants, where the layout is one of kLayouts.
template <KnownLayout... kLayouts, typename Function>
void with_layout(const CodeReader& r, const Function& function) {
  with_code_kind(r.kind, [&](auto kind) {
    const auto calls = [&](auto layout) {
      if constexpr (is_compiled(kind(), layout())) {
        if (!has_layout(r, layout())) return false;
        function(kind, layout);
        return true;
      }
      return false;
    };
    if (!(calls(std::integral_constant<KnownLayout, kLayouts>()) || ...)) {
      function(kind, std::integral_constant<KnownLayout, KnownLayout::kNone>());
    }
  });
}

// Calls function(span, super-numbers of its super-block, a half of a panel's rows each) for spans [begin, begin +
// count).
template <typename Function>
JAXIS_INLINE void for_spans(const CodeReader& r, const uint8_t* panel, int64_t begin, int64_t count,
                            const Function& function) {
  const CodeLayout& l = r.layout;
  SuperNumbers super[2];
  for (int64_t s = begin; s < begin + count; ++s) {
    const uint8_t* span = r.span(panel, s);
    const int64_t place = s % l.spans_per_super;
    if (s == begin || place == 0) {
      for (int half = 0; half < 2; ++half) {
        super[half] = load_super(r, span - l.super_bytes - place * l.span_bytes, half);
      }
    }
    function(span, super);
  }
}
}  // namespace jaxis::JAXIS_ISA
