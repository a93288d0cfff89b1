// Matrix tiles (Intel's AMX): registers of up to 16 rows of 64 bytes, and products of whole tiles of bytes. They are
// exact, so they are those of dot.h.
//
// For some 300 cycles after any instruction on tiles, one of the two units for vectors of floats does not multiply; it
// still adds. Products and what is made of them are therefore phases of their own, and the integers become floats by
// additions, because converting is a multiplier's work.
//
// Compilers do not know what memory these instructions read and write; hence the barrier.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "matmul.h"
#include "simd.h"
#include "team.h"

#if defined(JAXIS_SIMD_AMX)
#include <immintrin.h>
#endif

namespace jaxis::JAXIS_ISA {

constexpr int kMaxTileRows = 16;
// kTileOrigin as bits, and as a float32, whose lowest bit is worth 1: an integer of at most 2 ** 22, added to the bits,
// is added to the number.
constexpr int32_t kTileOriginBits = 0x4b400000;
constexpr float kTileOrigin = 12582912.0f;

#if defined(JAXIS_SIMD_AMX)

constexpr bool kHasTiles = true;

namespace {

// The rows that this thread's tiles are configured for; 0: they are not.
thread_local int tile_rows = 0;

void release_tiles() {
  _tile_release();
  tile_rows = 0;
}

// Configures this thread's tiles for multiply_tiles. They stay so until the thread's share of a kernel is done, because
// configuring takes as long as multiplying a few groups; nothing is left behind for other libraries.
void configure_tiles(int rows) {
  if (tile_rows == rows) return;
  if (tile_rows == 0) at_end_of_share(release_tiles);
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  const auto set = [&](int tile, int num_rows, int64_t row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(num_rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  };
  config.palette = 1;
  for (const int sums : {0, 1, 2, 3}) set(sums, rows, 4 * kLanes);
  for (const int x : {4, 5}) set(x, rows, kActivationGroup);
  for (const int weights : {6, 7}) set(weights, kActivationGroup / 4, 4 * kLanes);  // of half a panel
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
  tile_rows = rows;
}

#define JAXIS_MULTIPLY(low, high, x_tile, group)                       \
  _tile_loadd(x_tile, x + (group) * x_stride, kActivationGroup);       \
  _tile_loadd(6, w + (group) * w_stride, 4 * kPanelRows);              \
  _tile_loadd(7, w + (group) * w_stride + 4 * kLanes, 4 * kPanelRows); \
  _tile_zero(low);                                                     \
  _tile_zero(high);                                                    \
  _tile_dpbsud(low, x_tile, 6);                                        \
  _tile_dpbsud(high, x_tile, 7)
#define JAXIS_STORE(low, high, group)                     \
  _tile_stored(low, sums + 2 * (group) * kHalf, kStride); \
  _tile_stored(high, sums + (2 * (group) + 1) * kHalf, kStride)

// Groups x [kMaxTileRows][32] of signed bytes, `x_stride` bytes apart, times w [8][32][4] of unsigned bytes, `w_stride`
// apart -> sums [groups][half of the panel][kMaxTileRows][16]; of so many rows as the tiles are configured for.
void multiply_tiles(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t w_stride, int64_t groups,
                    int32_t* sums) {
  constexpr int64_t kHalf = kMaxTileRows * kLanes, kStride = 4 * kLanes;
  asm volatile("" ::: "memory");
  // A group's sums are stored while the next are computed.
  JAXIS_MULTIPLY(0, 1, 4, 0);
  int64_t g = 1;
  for (; g + 2 <= groups; g += 2) {
    JAXIS_MULTIPLY(2, 3, 5, g);
    JAXIS_STORE(0, 1, g - 1);
    JAXIS_MULTIPLY(0, 1, 4, g + 1);
    JAXIS_STORE(2, 3, g);
  }
  if (g < groups) {
    JAXIS_MULTIPLY(2, 3, 5, g);
    JAXIS_STORE(2, 3, g);
  }
  JAXIS_STORE(0, 1, g - 1);
  asm volatile("" ::: "memory");
}

#undef JAXIS_MULTIPLY
#undef JAXIS_STORE

// Sixteen sums plus an offset, of which kTileOriginBits are a part, as floats.
JAXIS_INLINE F32x16 load_tile_sums(const int32_t* sums, int32_t offset) {
  const __m512i bits = _mm512_add_epi32(_mm512_load_si512(sums), _mm512_set1_epi32(offset));
  return {_mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(kTileOrigin))};
}

}  // namespace

#else

constexpr bool kHasTiles = false;

// Never called.
inline void configure_tiles(int) {}

#endif

}  // namespace jaxis::JAXIS_ISA
