// Dot products of unsigned with signed bytes, and sums of unsigned ones, four at a time in each of sixteen 32-bit
// lanes. Activations are stored as the instructions want them: kActivationBytes for four of them.
//
// Where an instruction set has no such instruction, bytes are extended to 16 bits first: pairwise products of words add
// up exactly, while those of bytes would saturate. Extending takes as long as multiplying, so on x86 what many rows are
// multiplied with is extended once (I16x32), and codes of a few bits, whose products do fit 16 bits, are multiplied as
// bytes and summed as words (kHasBytePairs).
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace jaxis::JAXIS_ISA {

// Dot products take this from each unsigned byte, where an instruction set multiplies only bytes that are both signed:
// sums begin with as much more, see QuantizedRows::offsets.
#if defined(JAXIS_SIMD_DOTPROD) && !defined(JAXIS_SIMD_I8MM)
constexpr int kDotBias = 128;
#else
constexpr int kDotBias = 0;
#endif

#if defined(JAXIS_SIMD_AVX512)

// A vector of sixteen numbers rather than __m512i, which is one of eight: where sums change between the two from one
// dot product to the next, GCC copies them to another register and back.
struct I32x16 {
  __v16si v;
};
JAXIS_INLINE I32x16 broadcast_i32(int32_t x) { return {reinterpret_cast<__v16si>(_mm512_set1_epi32(x))}; }
JAXIS_INLINE F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a.v))}; }
JAXIS_INLINE I32x16 operator+(I32x16 a, I32x16 b) { return {a.v + b.v}; }
struct Bytes64 {
  __m512i v;
};
JAXIS_INLINE Bytes64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
JAXIS_INLINE void store_bytes(uint8_t* p, Bytes64 a) { _mm512_storeu_si512(p, a.v); }

#if defined(JAXIS_SIMD_VNNI)

constexpr int kActivationBytes = 4;
struct U8x64 {
  __m512i v;
};
JAXIS_INLINE U8x64 for_dot(Bytes64 a) { return {a.v}; }
struct ActivationQuad {
  __m512i v;
};
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

#define JAXIS_BYTE_PAIRS
struct I16x32 {
  __m512i v;
};
struct ActivationWords {
  __m512i v;
};
JAXIS_INLINE I16x32 load_words(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
JAXIS_INLINE void store_words(int16_t* p, I16x32 a) { _mm512_storeu_si512(p, a.v); }
JAXIS_INLINE I16x32 broadcast_words(int16_t x) { return {_mm512_set1_epi16(x)}; }
JAXIS_INLINE I16x32 operator+(I16x32 a, I16x32 b) { return {_mm512_add_epi16(a.v, b.v)}; }
JAXIS_INLINE I16x32 operator-(I16x32 a, I16x32 b) { return {_mm512_sub_epi16(a.v, b.v)}; }
JAXIS_INLINE I16x32 even_words(Bytes64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi16(0xff))}; }
JAXIS_INLINE I16x32 odd_words(Bytes64 a) { return {_mm512_srli_epi16(a.v, 8)}; }
JAXIS_INLINE ActivationWords load_activation_words(const uint8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return {_mm512_set1_epi32(bits)};
}
JAXIS_INLINE I32x16 multiply_words(I16x32 w, ActivationWords x) {
  return {reinterpret_cast<__v16si>(_mm512_madd_epi16(w.v, x.v))};
}
JAXIS_INLINE I16x32 multiply_byte_pairs(Bytes64 w, ActivationWords x) { return {_mm512_maddubs_epi16(w.v, x.v)}; }
JAXIS_INLINE void keep_sum(I32x16* sum) { asm("" : "+v"(sum->v)); }
JAXIS_INLINE void keep_sum(I16x32* sum) { asm("" : "+v"(sum->v)); }
// Neighbouring words' sums.
JAXIS_INLINE I32x16 add_pairs(I16x32 a) { return multiply_words(a, {_mm512_set1_epi16(1)}); }
// Neighbouring bytes' sums.
JAXIS_INLINE I16x32 add_byte_pairs(Bytes64 a) { return multiply_byte_pairs(a, {_mm512_set1_epi8(1)}); }
JAXIS_INLINE Bytes64 operator+(Bytes64 a, Bytes64 b) { return {_mm512_add_epi8(a.v, b.v)}; }

#endif

#elif defined(JAXIS_SIMD_AVX2)

struct I32x16 {
  __m256i a, b;
};
JAXIS_INLINE I32x16 broadcast_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
JAXIS_INLINE F32x16 to_float(I32x16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
JAXIS_INLINE I32x16 operator+(I32x16 x, I32x16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
struct Bytes64 {
  __m256i a, b;
};
JAXIS_INLINE Bytes64 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
JAXIS_INLINE void store_bytes(uint8_t* p, Bytes64 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}

#if defined(JAXIS_SIMD_VNNI)

constexpr int kActivationBytes = 4;
struct U8x64 {
  __m256i a, b;
};
JAXIS_INLINE U8x64 for_dot(Bytes64 x) { return {x.a, x.b}; }
struct ActivationQuad {
  __m256i v;
};
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return {_mm256_set1_epi32(bits)};
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  return {_mm256_dpbusd_avx_epi32(sum.a, w.a, x.v), _mm256_dpbusd_avx_epi32(sum.b, w.b, x.v)};
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) { return dot(sum, w, {_mm256_set1_epi8(1)}); }

#else

#define JAXIS_BYTE_PAIRS
struct I16x32 {
  __m256i a, b;
};
struct ActivationWords {
  __m256i v;
};
JAXIS_INLINE I16x32 load_words(const int16_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
JAXIS_INLINE void store_words(int16_t* p, I16x32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), x.b);
}
JAXIS_INLINE I16x32 broadcast_words(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
JAXIS_INLINE I16x32 operator+(I16x32 x, I16x32 y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
JAXIS_INLINE I16x32 operator-(I16x32 x, I16x32 y) { return {_mm256_sub_epi16(x.a, y.a), _mm256_sub_epi16(x.b, y.b)}; }
JAXIS_INLINE I16x32 even_words(Bytes64 x) {
  const __m256i mask = _mm256_set1_epi16(0xff);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
JAXIS_INLINE I16x32 odd_words(Bytes64 x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }
JAXIS_INLINE ActivationWords load_activation_words(const uint8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return {_mm256_set1_epi32(bits)};
}
JAXIS_INLINE I32x16 multiply_words(I16x32 w, ActivationWords x) {
  return {_mm256_madd_epi16(w.a, x.v), _mm256_madd_epi16(w.b, x.v)};
}
JAXIS_INLINE I16x32 multiply_byte_pairs(Bytes64 w, ActivationWords x) {
  return {_mm256_maddubs_epi16(w.a, x.v), _mm256_maddubs_epi16(w.b, x.v)};
}
// The sum is computed now and stays in its registers: GCC would compute all the products that it is of first, which do
// not fit into registers, and add them up in another order.
JAXIS_INLINE void keep_sum(I32x16* sum) { asm("" : "+x"(sum->a), "+x"(sum->b)); }
JAXIS_INLINE void keep_sum(I16x32* sum) { asm("" : "+x"(sum->a), "+x"(sum->b)); }
// Neighbouring words' sums.
JAXIS_INLINE I32x16 add_pairs(I16x32 x) { return multiply_words(x, {_mm256_set1_epi16(1)}); }
// Neighbouring bytes' sums.
JAXIS_INLINE I16x32 add_byte_pairs(Bytes64 x) { return multiply_byte_pairs(x, {_mm256_set1_epi8(1)}); }
JAXIS_INLINE Bytes64 operator+(Bytes64 x, Bytes64 y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }

#endif

#elif defined(JAXIS_SIMD_NEON)

struct I32x16 {
  int32x4_t v[4];
};
struct Bytes64 {
  uint8x16_t v[4];
};
JAXIS_INLINE Bytes64 load_bytes(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
JAXIS_INLINE void store_bytes(uint8_t* p, Bytes64 a) {
  for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, a.v[i]);
}
struct U8x64 {
  uint8x16_t v[4];
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
JAXIS_INLINE U8x64 for_dot(Bytes64 a) { return {{a.v[0], a.v[1], a.v[2], a.v[3]}}; }

#if defined(JAXIS_SIMD_DOTPROD)

constexpr int kActivationBytes = 4;
struct ActivationQuad {
  int8x16_t v;
};
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return {vreinterpretq_s8_s32(vdupq_n_s32(bits))};
}
JAXIS_INLINE int32x4_t dot_quarter(int32x4_t sum, uint8x16_t w, int8x16_t x) {
#if defined(JAXIS_SIMD_I8MM)
  return vusdotq_s32(sum, w, x);
#else
  return vdotq_s32(sum, vreinterpretq_s8_u8(veorq_u8(w, vdupq_n_u8(kDotBias))), x);
#endif
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  return {{dot_quarter(sum.v[0], w.v[0], x.v), dot_quarter(sum.v[1], w.v[1], x.v), dot_quarter(sum.v[2], w.v[2], x.v),
           dot_quarter(sum.v[3], w.v[3], x.v)}};
}
JAXIS_INLINE I32x16 add_quads(I32x16 sum, U8x64 w) {
  I32x16 out;
  for (int i = 0; i < 4; ++i) {
    out.v[i] = vreinterpretq_s32_u32(vdotq_u32(vreinterpretq_u32_s32(sum.v[i]), w.v[i], vdupq_n_u8(1)));
  }
  return out;
}

#else

constexpr int kActivationBytes = 8;
struct ActivationQuad {
  int16x4_t v;
};
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

#endif

#else

constexpr int kActivationBytes = 8;
struct I32x16 {
  int32_t v[16];
};
struct Bytes64 {
  uint8_t v[64];
};
JAXIS_INLINE Bytes64 load_bytes(const uint8_t* p) {
  Bytes64 out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
JAXIS_INLINE void store_bytes(uint8_t* p, Bytes64 a) { std::memcpy(p, a.v, sizeof a.v); }
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
JAXIS_INLINE U8x64 for_dot(Bytes64 a) {
  U8x64 out;
  std::memcpy(out.v, a.v, sizeof out.v);
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

#if defined(JAXIS_BYTE_PAIRS)

constexpr bool kHasBytePairs = true;
constexpr int kActivationBytes = 8;  // words; of products of byte pairs four bytes, as everywhere else

struct U8x64 {
  I16x32 even, odd;
};
struct ActivationQuad {
  ActivationWords even, odd;
};
JAXIS_INLINE U8x64 for_dot(Bytes64 x) { return {even_words(x), odd_words(x)}; }
JAXIS_INLINE ActivationQuad load_activation_quad(const uint8_t* p) {
  return {load_activation_words(p), load_activation_words(p + 4)};
}
JAXIS_INLINE I32x16 dot(I32x16 sum, U8x64 w, ActivationQuad x) {
  sum = sum + multiply_words(w.even, x.even) + multiply_words(w.odd, x.odd);
  keep_sum(&sum);
  return sum;
}

// Sums of bytes, four in each lane and at most 64 times, besides those of `before`.
struct QuadSums {
  I16x32 v;
};
JAXIS_INLINE QuadSums begin_quad_sums(I32x16) { return {broadcast_words(0)}; }
JAXIS_INLINE QuadSums add_quads(QuadSums sums, U8x64 w) {
  sums.v = sums.v + w.even + w.odd;
  keep_sum(&sums.v);
  return sums;
}
JAXIS_INLINE I32x16 end_quad_sums(QuadSums sums, I32x16 before) { return before + add_pairs(sums.v); }

#else

constexpr bool kHasBytePairs = false;

// Sums of bytes, four in each lane, besides those of `before`.
struct QuadSums {
  I32x16 v;
};
JAXIS_INLINE QuadSums begin_quad_sums(I32x16 before) { return {before}; }
JAXIS_INLINE QuadSums add_quads(QuadSums sums, U8x64 w) { return {add_quads(sums.v, w)}; }
JAXIS_INLINE I32x16 end_quad_sums(QuadSums sums, I32x16) { return sums.v; }

#endif

JAXIS_INLINE U8x64 load_u8x64(const uint8_t* p) { return for_dot(load_bytes(p)); }

// What comes after the sum is not loaded before it: for Arm, GCC would load more than fits into registers.
JAXIS_INLINE void keep_order(I32x16* sum) {
#if defined(JAXIS_SIMD_DOTPROD)
  asm volatile("" : "+w"(sum->v[0]), "+w"(sum->v[1]), "+w"(sum->v[2]), "+w"(sum->v[3])::"memory");
#else
  (void)sum;
#endif
}

// Stores four quantized activations for load_activation_quad.
JAXIS_INLINE void store_activation_quad(uint8_t* p, const int8_t* q) {
#if defined(JAXIS_SIMD_VNNI) || defined(JAXIS_SIMD_DOTPROD)
  std::memcpy(p, q, 4);
#elif defined(JAXIS_BYTE_PAIRS)
  const int16_t extended[4] = {q[0], q[2], q[1], q[3]};
  std::memcpy(p, extended, 8);
#else
  const int16_t extended[4] = {q[0], q[1], q[2], q[3]};
  std::memcpy(p, extended, 8);
#endif
}

}  // namespace jaxis::JAXIS_ISA
