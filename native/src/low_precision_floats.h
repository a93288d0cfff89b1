// Floats of sixteen, eight and four bits: sixteen of them at a time to float32.
//
// e4m3 goes by way of float16: with its exponent in the lower four bits of float16's five, a number is 2**-8 of what it
// was, denormal ones included, and no instruction set treats those of float16 as zeros. e2m1 is a table of sixteen.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace jaxis::JAXIS_ISA {

// What load_e4m3_pairs' elements are to be multiplied by.
constexpr float kE4m3Factor = 256.0f;

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2**-8 of a number; of a NaN (which no weight is) another number.
JAXIS_INLINE float e4m3_to_float(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float power = from_bits(static_cast<uint32_t>((exponent == 0 ? 1 : exponent) + 127 - 7 - 3 - 8) << 23);
  const float magnitude = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8) * power;
  return x < 128 ? magnitude : -magnitude;
}

JAXIS_INLINE float f16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, rest = x & 0x7fffu;
  uint32_t bits;
  if (rest >= 0x7c00u) {
    bits = rest << 13 | 0x7f800000u;
  } else if (rest >= 0x400u) {
    bits = (rest << 13) + (112u << 23);
  } else {
    bits = to_bits(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
  }
  return from_bits(bits | sign);
}

// The power of two that a byte stands for; of 0, which stands for a denormal one, a zero.
JAXIS_INLINE float e8m0_to_float(uint8_t x) { return from_bits(static_cast<uint32_t>(x) << 23); }

#if defined(JAXIS_SIMD_AVX512)

// 32 elements: those at even places, and those at odd places; see kE4m3Factor.
JAXIS_INLINE void load_e4m3_pairs(const uint8_t* p, F32x16* even, F32x16* odd) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  even->v = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(raw, 8), 1), mask));
  odd->v = _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(raw, 1), mask));
}
// Sixteen in a row; the same.
JAXIS_INLINE F32x16 load_e4m3(const uint8_t* p) {
  const __m256i raw = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(raw, 1), mask))};
}
JAXIS_INLINE F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Sixteen words of eight elements.
struct E2m1Words {
  __m512i v;
};
JAXIS_INLINE E2m1Words load_e2m1(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Number kPlace of each word.
template <int kPlace>
JAXIS_INLINE F32x16 upcast_e2m1(E2m1Words words) {
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(words.v, 4 * kPlace), _mm512_loadu_ps(kE2m1))};
}
JAXIS_INLINE F32x16 load_e8m0(const uint8_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(raw), 23))};
}

#elif defined(JAXIS_SIMD_AVX2)

JAXIS_INLINE F32x16 upcast_float16(__m256i x) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
JAXIS_INLINE void load_e4m3_pairs(const uint8_t* p, F32x16* even, F32x16* odd) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  *even = upcast_float16(_mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(raw, 8), 1), mask));
  *odd = upcast_float16(_mm256_and_si256(_mm256_srai_epi16(raw, 1), mask));
}
JAXIS_INLINE F32x16 load_e4m3(const uint8_t* p) {
  const __m256i raw = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 8);
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  return upcast_float16(_mm256_and_si256(_mm256_srai_epi16(raw, 1), mask));
}
JAXIS_INLINE F32x16 load_f16(const uint16_t* p) {
  return upcast_float16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
struct E2m1Words {
  __m256i a, b;
};
JAXIS_INLINE E2m1Words load_e2m1(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
// The permutation looks at three bits: the sign, the fourth, is put in after it.
template <int kPlace>
JAXIS_INLINE __m256 upcast_e2m1_half(__m256i words) {
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kE2m1), _mm256_srli_epi32(words, 4 * kPlace));
  const __m256i sign_bit = _mm256_set1_epi32(static_cast<int>(0x80000000u));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(words, 28 - 4 * kPlace), sign_bit);
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}
template <int kPlace>
JAXIS_INLINE F32x16 upcast_e2m1(E2m1Words words) {
  return {upcast_e2m1_half<kPlace>(words.a), upcast_e2m1_half<kPlace>(words.b)};
}
JAXIS_INLINE __m256 load_e8m0_half(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(load_8_bytes(p)), 23));
}
JAXIS_INLINE F32x16 load_e8m0(const uint8_t* p) { return {load_e8m0_half(p), load_e8m0_half(p + 8)}; }

#elif defined(JAXIS_SIMD_NEON)

JAXIS_INLINE void load_e4m3_pairs(const uint8_t* p, F32x16* even, F32x16* odd) {
  const int16x8_t mask = vdupq_n_s16(static_cast<int16_t>(0xbf80));
  for (int i = 0; i < 2; ++i) {
    const int16x8_t raw = vreinterpretq_s16_u8(vld1q_u8(p + 16 * i));
    const int16x8_t first = vandq_s16(vshrq_n_s16(vshlq_n_s16(raw, 8), 1), mask);
    const int16x8_t second = vandq_s16(vshrq_n_s16(raw, 1), mask);
    even->v[2 * i] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(first)));
    even->v[2 * i + 1] = vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(first)));
    odd->v[2 * i] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(second)));
    odd->v[2 * i + 1] = vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(second)));
  }
}
JAXIS_INLINE F32x16 load_e4m3(const uint8_t* p) {
  const int16x8_t mask = vdupq_n_s16(static_cast<int16_t>(0xbf80));
  const uint8x16_t raw = vld1q_u8(p);
  const uint8x8_t halves[2] = {vget_low_u8(raw), vget_high_u8(raw)};
  F32x16 out;
  for (int i = 0; i < 2; ++i) {
    const int16x8_t moved = vreinterpretq_s16_u16(vshll_n_u8(halves[i], 8));
    const int16x8_t half = vandq_s16(vshrq_n_s16(moved, 1), mask);
    out.v[2 * i] = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(half)));
    out.v[2 * i + 1] = vcvt_f32_f16(vreinterpret_f16_s16(vget_high_s16(half)));
  }
  return out;
}
JAXIS_INLINE F32x16 load_f16(const uint16_t* p) {
  F32x16 out;
  for (int i = 0; i < 4; ++i) out.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  return out;
}
struct E2m1Words {
  uint32x4_t v[4];
};
JAXIS_INLINE E2m1Words load_e2m1(const uint8_t* p) {
  E2m1Words out;
  for (int i = 0; i < 4; ++i) out.v[i] = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
  return out;
}
// A number's upper two bytes come from a table each: first those that are third, then those that are fourth. What is
// past the tables becomes 0.
template <int kPlace>
JAXIS_INLINE F32x16 upcast_e2m1(E2m1Words words) {
  constexpr uint8_t kThird[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  constexpr uint8_t kFourth[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                   0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  const uint8x16x2_t table = {{vld1q_u8(kThird), vld1q_u8(kFourth)}};
  F32x16 out;
  for (int i = 0; i < 4; ++i) {
    uint32x4_t code = words.v[i];
    if constexpr (kPlace > 0) code = vshrq_n_u32(code, kPlace > 0 ? 4 * kPlace : 1);
    code = vandq_u32(code, vdupq_n_u32(15));
    const uint32x4_t places = vmlaq_n_u32(vdupq_n_u32(0x1000ffffu), code, 0x01010000u);
    out.v[i] = vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(places)));
  }
  return out;
}
JAXIS_INLINE F32x16 load_e8m0(const uint8_t* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = e8m0_to_float(p[i]);
  return load(lanes);
}

#else

JAXIS_INLINE void load_e4m3_pairs(const uint8_t* p, F32x16* even, F32x16* odd) {
  for (int i = 0; i < kLanes; ++i) {
    even->v[i] = e4m3_to_float(p[2 * i]);
    odd->v[i] = e4m3_to_float(p[2 * i + 1]);
  }
}
JAXIS_INLINE F32x16 load_e4m3(const uint8_t* p) {
  F32x16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = e4m3_to_float(p[i]);
  return out;
}
JAXIS_INLINE F32x16 load_f16(const uint16_t* p) {
  F32x16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = f16_to_float(p[i]);
  return out;
}
struct E2m1Words {
  uint32_t v[16];
};
JAXIS_INLINE E2m1Words load_e2m1(const uint8_t* p) {
  E2m1Words out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
template <int kPlace>
JAXIS_INLINE F32x16 upcast_e2m1(E2m1Words words) {
  F32x16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = kE2m1[words.v[i] >> (4 * kPlace) & 15];
  return out;
}
JAXIS_INLINE F32x16 load_e8m0(const uint8_t* p) {
  F32x16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = e8m0_to_float(p[i]);
  return out;
}

#endif

}  // namespace jaxis::JAXIS_ISA
