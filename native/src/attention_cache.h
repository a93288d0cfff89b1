// The cache's layout (see attention.h), and what writes to it.
#pragma once

#include <cstdint>

#include "attention.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int64_t kKeyTile = kAttentionTile;  // tokens that a vector of keys holds
static_assert(kKeyTile == kLanes);

JAXIS_INLINE F32x16 load_entry(const float* p) { return load(p); }
JAXIS_INLINE F32x16 load_entry(const bf16_t* p) { return load_bf16(p); }
JAXIS_INLINE F32x16 load_entry(const int8_t* p) { return load_i8(p); }

template <typename T>
struct IsQuantized {
  static constexpr bool value = false;
};
template <>
struct IsQuantized<int8_t> {
  static constexpr bool value = true;
};

// One head's part of 16 consecutive tokens.
template <typename T>
struct CacheTile {
  T* keys;              // [D][16]
  T* values;            // [16][D]
  float* key_scales;    // [16], int8 only
  float* value_scales;  // [16], int8 only
};

// Where the tile that begins at token 16 * `tile` of a request lies.
template <typename T>
JAXIS_INLINE CacheTile<T> find_tile(const PagedAttention& a, const int32_t* block_table, int64_t kv_head,
                                    int64_t tile) {
  const int64_t tiles = a.block_size / kKeyTile, size = a.block_size * a.head_dim;
  const int64_t head_bytes = 2 * size * static_cast<int64_t>(sizeof(T)) +
                             (IsQuantized<T>::value ? 2 * a.block_size * static_cast<int64_t>(sizeof(float)) : 0);
  const int64_t block = block_table[tile / tiles], within = tile % tiles;
  char* head = static_cast<char*>(a.cache) + (block * a.num_kv_heads + kv_head) * head_bytes;
  T* keys = reinterpret_cast<T*>(head);
  float* scales = reinterpret_cast<float*>(keys + 2 * size);
  return {keys + within * kKeyTile * a.head_dim, keys + size + within * kKeyTile * a.head_dim,
          scales + within * kKeyTile, scales + a.block_size + within * kKeyTile};
}

// Writes x [size] as cache entries and returns their scale.
JAXIS_INLINE float encode(const float* x, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(x + i));
  return 1.0f;
}
JAXIS_INLINE float encode(const float* x, int64_t size, bf16_t* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = float_to_bf16(x[i]);
  return 1.0f;
}
JAXIS_INLINE float encode(const float* x, int64_t size, int8_t* out) {
  F32x16 peaks = zero();
  for (int64_t i = 0; i < size; i += kLanes) peaks = max(peaks, abs(load(x + i)));
  const float scale = reduce_max(peaks) / 127.0f;
  const F32x16 divisor = broadcast(scale == 0.0f ? 1.0f : scale);
  for (int64_t i = 0; i < size; i += kLanes) store_i8(out + i, round_even(load(x + i) / divisor));
  return scale;
}

// Writes one head of the flat batch's row `row`, which is token `position` of its request.
template <typename T>
void write_token(const PagedAttention& a, const int32_t* block_table, int64_t kv_head, int64_t row, int64_t position) {
  const CacheTile<T> tile = find_tile<T>(a, block_table, kv_head, position / kKeyTile);
  const int64_t lane = position % kKeyTile, offset = (row * a.num_kv_heads + kv_head) * a.head_dim;
  T key[kMaxHeadDim];
  const float key_scale = encode(a.k + offset, a.head_dim, key);
  for (int64_t d = 0; d < a.head_dim; ++d) tile.keys[d * kKeyTile + lane] = key[d];
  const float value_scale = encode(a.v + offset, a.head_dim, tile.values + lane * a.head_dim);
  if (IsQuantized<T>::value) {
    tile.key_scales[lane] = key_scale;
    tile.value_scales[lane] = value_scale;
  }
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
