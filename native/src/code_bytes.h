// Low-bit codes in registers: sixteen rows of four columns as 64 bytes, for products of bytes (dot.h) and, a column at
// a time, as floats.
#pragma once

#include <cstdint>
#include <cstring>

#include "dot.h"
#include "simd.h"

namespace jaxis::JAXIS_ISA {

#if defined(JAXIS_SIMD_AVX512)

JAXIS_INLINE Bytes64 low_nibbles(Bytes64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
JAXIS_INLINE Bytes64 high_nibbles(Bytes64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Adds bit 4 of each byte, from 64 bits in the bytes' order.
JAXIS_INLINE Bytes64 with_bit_4(Bytes64 a, const uint8_t* bits) {
  __mmask64 mask;
  std::memcpy(&mask, bits, 8);
  return {_mm512_mask_add_epi8(a.v, mask, a.v, _mm512_set1_epi8(16))};
}
// Adds bits 4 and 5 of each byte: bits 2 * place and 2 * place + 1 of the other's.
JAXIS_INLINE Bytes64 with_bits_4_5(Bytes64 a, Bytes64 plane, int place) {
  __m512i moved = plane.v;
  if (place == 0) moved = _mm512_slli_epi16(plane.v, 4);
  if (place == 1) moved = _mm512_slli_epi16(plane.v, 2);
  if (place == 3) moved = _mm512_srli_epi16(plane.v, 2);
  return {_mm512_ternarylogic_epi32(a.v, moved, _mm512_set1_epi8(0x30), 0xf8)};  // a | (moved & 0x30)
}
// Bits 2 * place and 2 * place + 1 of each byte.
JAXIS_INLINE Bytes64 bit_pairs(Bytes64 a, int place) {
  __m512i moved = a.v;
  if (place == 1) moved = _mm512_srli_epi16(a.v, 2);
  if (place == 2) moved = _mm512_srli_epi16(a.v, 4);
  if (place == 3) moved = _mm512_srli_epi16(a.v, 6);
  return {_mm512_and_si512(moved, _mm512_set1_epi8(3))};
}
// Sixteen bytes.
struct ByteTable {
  __m512i v;
};
JAXIS_INLINE ByteTable load_byte_table(const uint8_t* p) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// The table's bytes at places 0 to 15.
JAXIS_INLINE Bytes64 look_up(ByteTable table, Bytes64 places) { return {_mm512_shuffle_epi8(table.v, places.v)}; }
// What is taken from each code: 2 ** 23 more than that, whose lowest byte a code takes the place of.
struct CodeZero {
  __m512 v;
};
JAXIS_INLINE CodeZero code_zero(F32x16 zero) { return {_mm512_add_ps(zero.v, _mm512_set1_ps(8388608.0f))}; }
// Column 0 to 3 of sixteen rows, less the zero, which is a whole number up to 255.
JAXIS_INLINE F32x16 code_column(Bytes64 a, int column, CodeZero zero) {
  const __m512i places = _mm512_add_epi8(_mm512_set4_epi32(12, 8, 4, 0), _mm512_set1_epi32(column));
  const __m512i magic = _mm512_castps_si512(_mm512_set1_ps(8388608.0f));
  const __m512i codes = _mm512_mask_shuffle_epi8(magic, 0x1111111111111111ull, a.v, places);
  return {_mm512_sub_ps(_mm512_castsi512_ps(codes), zero.v)};
}
// Sixteen floats.
struct FloatTable {
  __m512 v;
};
JAXIS_INLINE FloatTable load_float_table(const float* p) { return {_mm512_loadu_ps(p)}; }
JAXIS_INLINE F32x16 level_column(Bytes64 a, int column, FloatTable table) {
  __m512i places = a.v;
  if (column == 1) places = _mm512_srli_epi32(a.v, 8);
  if (column == 2) places = _mm512_srli_epi32(a.v, 16);
  if (column == 3) places = _mm512_srli_epi32(a.v, 24);
  return {_mm512_permutexvar_ps(places, table.v)};
}

#elif defined(JAXIS_SIMD_AVX2)

JAXIS_INLINE Bytes64 low_nibbles(Bytes64 x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
JAXIS_INLINE Bytes64 high_nibbles(Bytes64 x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// 32 bits, in the bytes' order: 16 where one is set.
JAXIS_INLINE __m256i bit_4_half(const uint8_t* bits) {
  int32_t word;
  std::memcpy(&word, bits, 4);
  const __m256i which = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), which), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), _mm256_set1_epi8(16));
}
JAXIS_INLINE Bytes64 with_bit_4(Bytes64 x, const uint8_t* bits) {
  return {_mm256_or_si256(x.a, bit_4_half(bits)), _mm256_or_si256(x.b, bit_4_half(bits + 4))};
}
JAXIS_INLINE __m256i bits_4_5_half(__m256i plane, int place) {
  __m256i moved = plane;
  if (place == 0) moved = _mm256_slli_epi16(plane, 4);
  if (place == 1) moved = _mm256_slli_epi16(plane, 2);
  if (place == 3) moved = _mm256_srli_epi16(plane, 2);
  return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
}
JAXIS_INLINE Bytes64 with_bits_4_5(Bytes64 x, Bytes64 plane, int place) {
  return {_mm256_or_si256(x.a, bits_4_5_half(plane.a, place)), _mm256_or_si256(x.b, bits_4_5_half(plane.b, place))};
}
JAXIS_INLINE __m256i bit_pairs_half(__m256i a, int place) {
  __m256i moved = a;
  if (place == 1) moved = _mm256_srli_epi16(a, 2);
  if (place == 2) moved = _mm256_srli_epi16(a, 4);
  if (place == 3) moved = _mm256_srli_epi16(a, 6);
  return _mm256_and_si256(moved, _mm256_set1_epi8(3));
}
JAXIS_INLINE Bytes64 bit_pairs(Bytes64 x, int place) {
  return {bit_pairs_half(x.a, place), bit_pairs_half(x.b, place)};
}
struct ByteTable {
  __m256i v;
};
JAXIS_INLINE ByteTable load_byte_table(const uint8_t* p) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
JAXIS_INLINE Bytes64 look_up(ByteTable table, Bytes64 places) {
  return {_mm256_shuffle_epi8(table.v, places.a), _mm256_shuffle_epi8(table.v, places.b)};
}
struct CodeZero {
  F32x16 v;
};
JAXIS_INLINE CodeZero code_zero(F32x16 zero) { return {zero}; }
JAXIS_INLINE __m256i byte_of_words(__m256i x, int column) {
  if (column == 0) return _mm256_and_si256(x, _mm256_set1_epi32(255));
  if (column == 3) return _mm256_srli_epi32(x, 24);
  // A place whose highest bit is set gives zero: of each four, the last three.
  const __m256i places = _mm256_add_epi32(_mm256_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12), _mm256_set1_epi32(column - 256));
  return _mm256_shuffle_epi8(x, places);
}
JAXIS_INLINE F32x16 code_column(Bytes64 x, int column, CodeZero zero) {
  const F32x16 codes = {_mm256_cvtepi32_ps(byte_of_words(x.a, column)), _mm256_cvtepi32_ps(byte_of_words(x.b, column))};
  return codes - zero.v;
}
struct FloatTable {
  __m256 low, high;
};
JAXIS_INLINE FloatTable load_float_table(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
// The permutation looks at three bits; the fourth, moved to the sign, chooses the half of the table.
JAXIS_INLINE __m256 level_half(__m256i places, FloatTable table) {
  const __m256 low = _mm256_permutevar8x32_ps(table.low, places), high = _mm256_permutevar8x32_ps(table.high, places);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
}
JAXIS_INLINE F32x16 level_column(Bytes64 x, int column, FloatTable table) {
  return {level_half(byte_of_words(x.a, column), table), level_half(byte_of_words(x.b, column), table)};
}

#elif defined(JAXIS_SIMD_NEON)

#define JAXIS_EACH(expression)                       \
  Bytes64 out;                                       \
  for (int i = 0; i < 4; ++i) out.v[i] = expression; \
  return out
JAXIS_INLINE Bytes64 low_nibbles(Bytes64 a) { JAXIS_EACH(vandq_u8(a.v[i], vdupq_n_u8(15))); }
JAXIS_INLINE Bytes64 high_nibbles(Bytes64 a) { JAXIS_EACH(vshrq_n_u8(a.v[i], 4)); }
JAXIS_INLINE Bytes64 with_bit_4(Bytes64 a, const uint8_t* bits) {
  constexpr uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bit = vld1q_u8(kBits), sixteen = vdupq_n_u8(16);
  JAXIS_EACH(vorrq_u8(
      a.v[i], vandq_u8(vtstq_u8(vcombine_u8(vdup_n_u8(bits[2 * i]), vdup_n_u8(bits[2 * i + 1])), bit), sixteen)));
}
JAXIS_INLINE uint8x16_t bits_4_5(uint8x16_t plane, int place) {
  uint8x16_t moved = plane;
  if (place == 0) moved = vshlq_n_u8(plane, 4);
  if (place == 1) moved = vshlq_n_u8(plane, 2);
  if (place == 3) moved = vshrq_n_u8(plane, 2);
  return vandq_u8(moved, vdupq_n_u8(0x30));
}
JAXIS_INLINE Bytes64 with_bits_4_5(Bytes64 a, Bytes64 plane, int place) {
  JAXIS_EACH(vorrq_u8(a.v[i], bits_4_5(plane.v[i], place)));
}
JAXIS_INLINE uint8x16_t bit_pairs_of(uint8x16_t a, int place) {
  uint8x16_t moved = a;
  if (place == 1) moved = vshrq_n_u8(a, 2);
  if (place == 2) moved = vshrq_n_u8(a, 4);
  if (place == 3) moved = vshrq_n_u8(a, 6);
  return vandq_u8(moved, vdupq_n_u8(3));
}
JAXIS_INLINE Bytes64 bit_pairs(Bytes64 a, int place) { JAXIS_EACH(bit_pairs_of(a.v[i], place)); }
struct ByteTable {
  uint8x16_t v;
};
JAXIS_INLINE ByteTable load_byte_table(const uint8_t* p) { return {vld1q_u8(p)}; }
JAXIS_INLINE Bytes64 look_up(ByteTable table, Bytes64 places) { JAXIS_EACH(vqtbl1q_u8(table.v, places.v[i])); }
#undef JAXIS_EACH
struct CodeZero {
  F32x16 v;
};
JAXIS_INLINE CodeZero code_zero(F32x16 zero) { return {zero}; }
JAXIS_INLINE uint32x4_t byte_of_words(uint8x16_t x, int column) {
  const uint32x4_t words = vreinterpretq_u32_u8(x);
  if (column == 3) return vshrq_n_u32(words, 24);
  uint32x4_t moved = words;
  if (column == 1) moved = vshrq_n_u32(words, 8);
  if (column == 2) moved = vshrq_n_u32(words, 16);
  return vandq_u32(moved, vdupq_n_u32(255));
}
JAXIS_INLINE F32x16 code_column(Bytes64 a, int column, CodeZero zero) {
  F32x16 out;
  for (int i = 0; i < 4; ++i) out.v[i] = vsubq_f32(vcvtq_f32_u32(byte_of_words(a.v[i], column)), zero.v.v[i]);
  return out;
}
// The bytes of sixteen floats.
struct FloatTable {
  uint8x16x4_t v;
};
JAXIS_INLINE FloatTable load_float_table(const float* p) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(p);
  return {{{vld1q_u8(bytes), vld1q_u8(bytes + 16), vld1q_u8(bytes + 32), vld1q_u8(bytes + 48)}}};
}
JAXIS_INLINE F32x16 level_column(Bytes64 a, int column, FloatTable table) {
  F32x16 out;
  for (int i = 0; i < 4; ++i) {
    // A float's four bytes are at 4 * code, and so on.
    const uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x03020100u), byte_of_words(a.v[i], column), 0x04040404u);
    out.v[i] = vreinterpretq_f32_u8(vqtbl4q_u8(table.v, vreinterpretq_u8_u32(places)));
  }
  return out;
}

#else

#define JAXIS_EACH(expression)                                              \
  Bytes64 out;                                                              \
  for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(expression); \
  return out
JAXIS_INLINE Bytes64 low_nibbles(Bytes64 a) { JAXIS_EACH(a.v[i] & 15); }
JAXIS_INLINE Bytes64 high_nibbles(Bytes64 a) { JAXIS_EACH(a.v[i] >> 4); }
JAXIS_INLINE Bytes64 with_bit_4(Bytes64 a, const uint8_t* bits) {
  JAXIS_EACH(a.v[i] | (bits[i / 8] >> (i % 8) & 1) << 4);
}
JAXIS_INLINE Bytes64 with_bits_4_5(Bytes64 a, Bytes64 plane, int place) {
  JAXIS_EACH(a.v[i] | (plane.v[i] >> (2 * place) & 3) << 4);
}
JAXIS_INLINE Bytes64 bit_pairs(Bytes64 a, int place) { JAXIS_EACH(a.v[i] >> (2 * place) & 3); }
struct ByteTable {
  uint8_t v[16];
};
JAXIS_INLINE ByteTable load_byte_table(const uint8_t* p) {
  ByteTable out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
JAXIS_INLINE Bytes64 look_up(ByteTable table, Bytes64 places) { JAXIS_EACH(table.v[places.v[i]]); }
#undef JAXIS_EACH
struct CodeZero {
  F32x16 v;
};
JAXIS_INLINE CodeZero code_zero(F32x16 zero) { return {zero}; }
JAXIS_INLINE F32x16 code_column(Bytes64 a, int column, CodeZero zero) {
  F32x16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = static_cast<float>(a.v[4 * i + column]) - zero.v.v[i];
  return out;
}
struct FloatTable {
  float v[16];
};
JAXIS_INLINE FloatTable load_float_table(const float* p) {
  FloatTable out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
JAXIS_INLINE F32x16 level_column(Bytes64 a, int column, FloatTable table) {
  F32x16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = table.v[a.v[4 * i + column]];
  return out;
}

#endif

}  // namespace jaxis::JAXIS_ISA
