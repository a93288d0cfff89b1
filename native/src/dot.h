// Dot products of unsigned with signed bytes, and sums of unsigned ones, four at a time in each of sixteen 32-bit
// lanes.
//
// Where an instruction set has no such instruction, bytes are extended to 16 bits first: its pairwise products add up
// exactly, while the instructions on bytes would saturate. Activations are stored as the instruction wants them:
// kActivationBytes for four of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace jaxis::JAXIS_ISA {

#if defined(JAXIS_SIMD_AVX512)

// A vector of sixteen numbers rather than __m512i, which is one of eight: where sums change between the two from one
// dot product to the next, GCC copies them to another register and back.
struct I32x16 {
  __v16si v;
};
JAXIS_INLINE I32x16 broadcast_i32(int32_t x) { return {reinterpret_cast<__v16si>(_mm512_set1_epi32(x))}; }
JAXIS_INLINE F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a.v))}; }
JAXIS_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return {a.v + b.v}; }

#if defined(JAXIS_SIMD_VNNI)

constexpr int kActivationBytes = 4;
struct U8x64 {
  __m512i v;
};
struct ActivationQuad {
  __m512i v;
};
JAXIS_INLINE U8x64 load_u8x64(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return {_mm512_set1_epi32(bits)};
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  return {reinterpret_cast<__v16si>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum.v), w.v, x.v))};
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) { return dot(sum, w, {_mm512_set1_epi8(1)}); }

#else

constexpr int kActivationBytes = 8;
struct U8x64 {
  __m512i even, odd;
};
struct ActivationQuad {
  __m512i even, odd;
};
JAXIS_INLINE U8x64 zero_extend(__m512i raw) {
  return {_mm512_and_si512(raw, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(raw, 8)};
}
JAXIS_INLINE U8x64 load_u8x64(const uint8_t* p) { return zero_extend(_mm512_loadu_si512(p)); }
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  int32_t bits[2];
  std::memcpy(bits, p, 8);
  return {_mm512_set1_epi32(bits[0]), _mm512_set1_epi32(bits[1])};
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), _mm512_madd_epi16(w.odd, x.odd));
  return {sum.v + reinterpret_cast<__v16si>(products)};
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) {
  const __m512i pairs = _mm512_add_epi16(w.even, w.odd);
  return {sum.v + reinterpret_cast<__v16si>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}

#endif

#elif defined(JAXIS_SIMD_AVX2)

constexpr int kActivationBytes = 8;
struct I32x16 {
  __m256i a, b;
};
struct U8x64 {
  __m256i even_a, odd_a, even_b, odd_b;
};
struct ActivationQuad {
  __m256i even, odd;
};
JAXIS_INLINE I32x16 broadcast_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
JAXIS_INLINE F32x16 to_float(I32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
JAXIS_INLINE I32x16 operator+(I32x16 x, I32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
JAXIS_INLINE U8x64 zero_extend(__m256i a, __m256i b) {
  const __m256i mask = _mm256_set1_epi16(0xff);
  return {_mm256_and_si256(a, mask), _mm256_srli_epi16(a, 8), _mm256_and_si256(b, mask), _mm256_srli_epi16(b, 8)};
}
JAXIS_INLINE U8x64 load_u8x64(const uint8_t* p) {
  return zero_extend(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
}
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  int32_t bits[2];
  std::memcpy(bits, p, 8);
  return {_mm256_set1_epi32(bits[0]), _mm256_set1_epi32(bits[1])};
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  const __m256i a = _mm256_add_epi32(_mm256_madd_epi16(w.even_a, x.even), _mm256_madd_epi16(w.odd_a, x.odd));
  const __m256i b = _mm256_add_epi32(_mm256_madd_epi16(w.even_b, x.even), _mm256_madd_epi16(w.odd_b, x.odd));
  return {_mm256_add_epi32(sum.a, a), _mm256_add_epi32(sum.b, b)};
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(_mm256_add_epi16(w.even_a, w.odd_a), ones)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(_mm256_add_epi16(w.even_b, w.odd_b), ones))};
}

#elif defined(JAXIS_SIMD_NEON)

constexpr int kActivationBytes = 8;
struct I32x16 {
  int32x4_t v[4];
};
struct U8x64 {
  uint8x16_t v[4];
};
struct ActivationQuad {
  int16x4_t v;
};
JAXIS_INLINE I32x16 broadcast_i32(int32_t x) {
  return {{vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}};
}
JAXIS_INLINE F32x16 to_float(I32x16 a) {
  return {{vcvtq_f32_s32(a.v[0]), vcvtq_f32_s32(a.v[1]), vcvtq_f32_s32(a.v[2]), vcvtq_f32_s32(a.v[3])}};
}
JAXIS_INLINE I32x16 operator+(I32x16 a, I32x16 b) {
  return {{vaddq_s32(a.v[0], b.v[0]), vaddq_s32(a.v[1], b.v[1]), vaddq_s32(a.v[2], b.v[2]), vaddq_s32(a.v[3], b.v[3])}};
}
JAXIS_INLINE U8x64 load_u8x64(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  int16_t values[4];
  std::memcpy(values, p, 8);
  return {vld1_s16(values)};
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  I32x16 out;
  for (int i = 0; i < 4; ++i) {
    const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(w.v[i])));
    const int16x8_t high = vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(w.v[i])));
    const int32x4_t first = vpaddq_s32(vmull_s16(vget_low_s16(low), x.v), vmull_s16(vget_high_s16(low), x.v));
    const int32x4_t second = vpaddq_s32(vmull_s16(vget_low_s16(high), x.v), vmull_s16(vget_high_s16(high), x.v));
    out.v[i] = vaddq_s32(sum.v[i], vpaddq_s32(first, second));
  }
  return out;
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) {
  I32x16 out;
  for (int i = 0; i < 4; ++i) {
    out.v[i] = vaddq_s32(sum.v[i], vreinterpretq_s32_u32(vpaddlq_u16(vpaddlq_u8(w.v[i]))));
  }
  return out;
}

#else

constexpr int kActivationBytes = 8;
struct I32x16 {
  int32_t v[16];
};
struct U8x64 {
  uint8_t v[64];
};
struct ActivationQuad {
  int16_t v[4];
};
JAXIS_INLINE I32x16 broadcast_i32(int32_t x) {
  I32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = x;
  return out;
}
JAXIS_INLINE F32x16 to_float(I32x16 a) {
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = static_cast<float>(a.v[i]);
  return out;
}
JAXIS_INLINE I32x16 operator+(I32x16 a, I32x16 b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
JAXIS_INLINE U8x64 load_u8x64(const uint8_t* p) {
  U8x64 out;
  std::memcpy(out.v, p, 64);
  return out;
}
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  ActivationQuad out;
  std::memcpy(out.v, p, 8);
  return out;
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 4; ++j) sum.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * x.v[j];
  }
  return sum;
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 4; ++j) sum.v[i] += static_cast<int32_t>(w.v[4 * i + j]);
  }
  return sum;
}

#endif

// Stores four quantized activations for load_activation_quad.
JAXIS_INLINE void store_activation_quad(uint8_t* p, const int8_t* q) {
#if defined(JAXIS_SIMD_VNNI)
  std::memcpy(p, q, 4);
#elif defined(JAXIS_SIMD_AVX512) || defined(JAXIS_SIMD_AVX2)
  const int16_t extended[4] = {q[0], q[2], q[1], q[3]};
  std::memcpy(p, extended, 8);
#else
  const int16_t extended[4] = {q[0], q[1], q[2], q[3]};
  std::memcpy(p, extended, 8);
#endif
}

}  // namespace jaxis::JAXIS_ISA
