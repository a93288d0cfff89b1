// Sixteen float32 lanes on every instruction set: one zmm, two ymm, four NEON registers, or an array.
//
// Kernels are written once in terms of F32x16 and compiled once per instruction set, in a namespace of its own (see
// CMakeLists.txt). The lanes are always sixteen, so the order of every sum, and with it every result, is the same on
// all of them as far as multiply-adds are fused (everywhere but in the portable build).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(JAXIS_SIMD_AVX512) || defined(JAXIS_SIMD_AVX2)
#include <immintrin.h>
#elif defined(JAXIS_SIMD_NEON)
#include <arm_neon.h>
#endif

#if defined(JAXIS_SIMD_AVX512) || defined(JAXIS_SIMD_AVX2) || defined(JAXIS_SIMD_NEON)
#define JAXIS_INLINE inline __attribute__((always_inline))
#else
// What is an instruction or two elsewhere is a loop here, and unrolled in all places takes GCC minutes to compile.
#define JAXIS_INLINE inline
#endif

namespace jaxis::JAXIS_ISA {

constexpr int kLanes = 16;

using bf16_t = uint16_t;  // the upper half of a float32

JAXIS_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

JAXIS_INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

JAXIS_INLINE float bf16_to_float(bf16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

// Rounds to nearest even; a NaN stays one.
JAXIS_INLINE bf16_t float_to_bf16(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16_t>((bits >> 16) | 0x40u);
  return static_cast<bf16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(JAXIS_SIMD_AVX512)

struct F32x16 {
  __m512 v;
};
JAXIS_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
JAXIS_INLINE void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
JAXIS_INLINE F32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
JAXIS_INLINE F32x16 zero() { return {_mm512_setzero_ps()}; }
JAXIS_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
JAXIS_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
JAXIS_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
JAXIS_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
JAXIS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
JAXIS_INLINE F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
JAXIS_INLINE F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
JAXIS_INLINE F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
// a where x >= bound, else 0.
JAXIS_INLINE F32x16 keep_at_least(F32x16 x, F32x16 bound, F32x16 a) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), a.v)};
}
// Whether x >= bound in some lane.
JAXIS_INLINE bool any_at_least(F32x16 x, F32x16 bound) { return _mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ) != 0; }
JAXIS_INLINE F32x16 round_even(F32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2 ** n for integral n in [-126, 127].
JAXIS_INLINE F32x16 exp2_integral(F32x16 n) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
JAXIS_INLINE F32x16 load_bf16(const bf16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
// 32 values: those at even places, and those at odd places.
JAXIS_INLINE void load_bf16_pairs(const bf16_t* p, F32x16* even, F32x16* odd) {
  const __m512i raw = _mm512_loadu_si512(p);
  even->v = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
  odd->v = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
JAXIS_INLINE F32x16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
JAXIS_INLINE F32x16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Integral values in [-128, 127].
JAXIS_INLINE void store_i8(int8_t* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

#elif defined(JAXIS_SIMD_AVX2)

struct F32x16 {
  __m256 a, b;
};
JAXIS_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
JAXIS_INLINE void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
JAXIS_INLINE F32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
JAXIS_INLINE F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
JAXIS_INLINE F32x16 operator+(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
JAXIS_INLINE F32x16 operator-(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
JAXIS_INLINE F32x16 operator*(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
JAXIS_INLINE F32x16 operator/(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
JAXIS_INLINE F32x16 fma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
JAXIS_INLINE F32x16 max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
JAXIS_INLINE F32x16 min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
JAXIS_INLINE F32x16 abs(F32x16 x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
JAXIS_INLINE F32x16 keep_at_least(F32x16 x, F32x16 bound, F32x16 y) {
  return {_mm256_and_ps(y.a, _mm256_cmp_ps(x.a, bound.a, _CMP_GE_OQ)),
          _mm256_and_ps(y.b, _mm256_cmp_ps(x.b, bound.b, _CMP_GE_OQ))};
}
JAXIS_INLINE bool any_at_least(F32x16 x, F32x16 bound) {
  return _mm256_movemask_ps(
             _mm256_or_ps(_mm256_cmp_ps(x.a, bound.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, bound.b, _CMP_GE_OQ))) != 0;
}
JAXIS_INLINE F32x16 round_even(F32x16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
JAXIS_INLINE __m256 exp2_integral_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
JAXIS_INLINE F32x16 exp2_integral(F32x16 n) { return {exp2_integral_half(n.a), exp2_integral_half(n.b)}; }
JAXIS_INLINE __m256 load_bf16_half(const bf16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
JAXIS_INLINE F32x16 load_bf16(const bf16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }
JAXIS_INLINE void load_bf16_pairs(const bf16_t* p, F32x16* even, F32x16* odd) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  *even = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
  *odd = {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))};
}
JAXIS_INLINE __m128i load_8_bytes(const void* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
JAXIS_INLINE F32x16 load_i8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p + 8)))};
}
JAXIS_INLINE F32x16 load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8_bytes(p))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8_bytes(p + 8)))};
}
JAXIS_INLINE void store_i8(int8_t* p, F32x16 x) {
  const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  const __m128i first = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  const __m128i second = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(first, second));
}

#elif defined(JAXIS_SIMD_NEON)

struct F32x16 {
  float32x4_t v[4];
};
#define JAXIS_EACH(expression)                       \
  F32x16 out;                                        \
  for (int i = 0; i < 4; ++i) out.v[i] = expression; \
  return out
JAXIS_INLINE F32x16 load(const float* p) { JAXIS_EACH(vld1q_f32(p + 4 * i)); }
JAXIS_INLINE void store(float* p, F32x16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
JAXIS_INLINE F32x16 broadcast(float x) { JAXIS_EACH(vdupq_n_f32(x)); }
JAXIS_INLINE F32x16 zero() { return broadcast(0.0f); }
JAXIS_INLINE F32x16 operator+(F32x16 a, F32x16 b) { JAXIS_EACH(vaddq_f32(a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 operator-(F32x16 a, F32x16 b) { JAXIS_EACH(vsubq_f32(a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 operator*(F32x16 a, F32x16 b) { JAXIS_EACH(vmulq_f32(a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 operator/(F32x16 a, F32x16 b) { JAXIS_EACH(vdivq_f32(a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { JAXIS_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 max(F32x16 a, F32x16 b) { JAXIS_EACH(vmaxq_f32(a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 min(F32x16 a, F32x16 b) { JAXIS_EACH(vminq_f32(a.v[i], b.v[i])); }
JAXIS_INLINE F32x16 abs(F32x16 a) { JAXIS_EACH(vabsq_f32(a.v[i])); }
JAXIS_INLINE F32x16 keep_at_least(F32x16 x, F32x16 bound, F32x16 a) {
  JAXIS_EACH(vbslq_f32(vcgeq_f32(x.v[i], bound.v[i]), a.v[i], vdupq_n_f32(0.0f)));
}
JAXIS_INLINE bool any_at_least(F32x16 x, F32x16 bound) {
  uint32x4_t any = vcgeq_f32(x.v[0], bound.v[0]);
  for (int i = 1; i < 4; ++i) any = vorrq_u32(any, vcgeq_f32(x.v[i], bound.v[i]));
  return vmaxvq_u32(any) != 0;
}
JAXIS_INLINE F32x16 round_even(F32x16 a) { JAXIS_EACH(vrndnq_f32(a.v[i])); }
JAXIS_INLINE F32x16 exp2_integral(F32x16 n) {
  JAXIS_EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
}
JAXIS_INLINE F32x16 load_bf16(const bf16_t* p) {
  JAXIS_EACH(vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)));
}
JAXIS_INLINE void load_bf16_pairs(const bf16_t* p, F32x16* even, F32x16* odd) {
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t raw = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    even->v[i] = vreinterpretq_f32_u32(vshlq_n_u32(raw, 16));
    odd->v[i] = vreinterpretq_f32_u32(vandq_u32(raw, vdupq_n_u32(0xffff0000u)));
  }
}
JAXIS_INLINE F32x16 load_i8(const int8_t* p) {
  const int8x16_t raw = vld1q_s8(p);
  const int16x8_t lo = vmovl_s8(vget_low_s8(raw)), hi = vmovl_s8(vget_high_s8(raw));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
}
JAXIS_INLINE F32x16 load_u8(const uint8_t* p) {
  const uint8x16_t raw = vld1q_u8(p);
  const uint16x8_t lo = vmovl_u8(vget_low_u8(raw)), hi = vmovl_u8(vget_high_u8(raw));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
JAXIS_INLINE void store_i8(int8_t* p, F32x16 a) {
  const int16x8_t lo = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.v[0])), vmovn_s32(vcvtnq_s32_f32(a.v[1])));
  const int16x8_t hi = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.v[2])), vmovn_s32(vcvtnq_s32_f32(a.v[3])));
  vst1q_s8(p, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
}
#undef JAXIS_EACH

#else

// The compiler makes of it what vector instructions there are.
struct F32x16 {
  float v __attribute__((vector_size(64)));
};
#define JAXIS_EACH(expression)                        \
  F32x16 out;                                         \
  for (int i = 0; i < 16; ++i) out.v[i] = expression; \
  return out
JAXIS_INLINE F32x16 load(const float* p) {
  F32x16 out;
  std::memcpy(&out.v, p, sizeof out.v);
  return out;
}
JAXIS_INLINE void store(float* p, F32x16 a) { std::memcpy(p, &a.v, sizeof a.v); }
JAXIS_INLINE F32x16 zero() { return F32x16(); }
JAXIS_INLINE F32x16 broadcast(float x) { return {x - zero().v}; }  // the sum would lose the sign of -0
JAXIS_INLINE F32x16 operator+(F32x16 a, F32x16 b) { return {a.v + b.v}; }
JAXIS_INLINE F32x16 operator-(F32x16 a, F32x16 b) { return {a.v - b.v}; }
JAXIS_INLINE F32x16 operator*(F32x16 a, F32x16 b) { return {a.v * b.v}; }
JAXIS_INLINE F32x16 operator/(F32x16 a, F32x16 b) { return {a.v / b.v}; }
JAXIS_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {a.v * b.v + c.v}; }
JAXIS_INLINE F32x16 max(F32x16 a, F32x16 b) { return {a.v > b.v ? a.v : b.v}; }
JAXIS_INLINE F32x16 min(F32x16 a, F32x16 b) { return {a.v < b.v ? a.v : b.v}; }
JAXIS_INLINE F32x16 abs(F32x16 a) { return {a.v < 0.0f ? -a.v : a.v}; }
JAXIS_INLINE F32x16 keep_at_least(F32x16 x, F32x16 bound, F32x16 a) { return {x.v >= bound.v ? a.v : zero().v}; }
JAXIS_INLINE bool any_at_least(F32x16 x, F32x16 bound) {
  bool any = false;
  for (int i = 0; i < 16; ++i) any |= x.v[i] >= bound.v[i];
  return any;
}
JAXIS_INLINE float round_even_scalar(float x) {
  // Adding and taking away 1.5 * 2**23 rounds in the current mode, which is to nearest even.
  const float magic = 12582912.0f;
  volatile float rounded = x + magic;
  return (x > 4194304.0f || x < -4194304.0f) ? x : rounded - magic;
}
JAXIS_INLINE F32x16 round_even(F32x16 a) { JAXIS_EACH(round_even_scalar(a.v[i])); }
JAXIS_INLINE F32x16 exp2_integral(F32x16 n) {
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = from_bits(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
  }
  return out;
}
JAXIS_INLINE F32x16 load_bf16(const bf16_t* p) { JAXIS_EACH(bf16_to_float(p[i])); }
JAXIS_INLINE void load_bf16_pairs(const bf16_t* p, F32x16* even, F32x16* odd) {
  for (int i = 0; i < 16; ++i) {
    even->v[i] = bf16_to_float(p[2 * i]);
    odd->v[i] = bf16_to_float(p[2 * i + 1]);
  }
}
JAXIS_INLINE F32x16 load_i8(const int8_t* p) { JAXIS_EACH(static_cast<float>(p[i])); }
JAXIS_INLINE F32x16 load_u8(const uint8_t* p) { JAXIS_EACH(static_cast<float>(p[i])); }
JAXIS_INLINE void store_i8(int8_t* p, F32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
#undef JAXIS_EACH

#endif

// Sums and maxima over the lanes, always in the same order: halves onto each other.
#if defined(JAXIS_SIMD_AVX512) || defined(JAXIS_SIMD_AVX2)

JAXIS_INLINE __m256 lower_half(F32x16 a) {
#if defined(JAXIS_SIMD_AVX512)
  return _mm512_castps512_ps256(a.v);
#else
  return a.a;
#endif
}
JAXIS_INLINE __m256 upper_half(F32x16 a) {
#if defined(JAXIS_SIMD_AVX512)
  return _mm512_extractf32x8_ps(a.v, 1);
#else
  return a.b;
#endif
}
JAXIS_INLINE float reduce_add(F32x16 a) {
  const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
JAXIS_INLINE float reduce_max(F32x16 a) {
  const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#else

JAXIS_INLINE float reduce_add(F32x16 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
JAXIS_INLINE float reduce_max(F32x16 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

#endif

// e ** x to about 2 units in the last place; 0 below about -87, finite (e ** 88) above 88. -inf gives 0.
JAXIS_INLINE F32x16 exp(F32x16 x) {
  const F32x16 clamped = max(min(x, broadcast(88.0f)), broadcast(-87.3f));
  const F32x16 n = round_even(clamped * broadcast(1.44269504088896341f));
  F32x16 r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  const F32x16 result = p * exp2_integral(n);
#if defined(JAXIS_SIMD_AVX512)
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), result.v)};
#elif defined(JAXIS_SIMD_AVX2)
  const __m256 lowest = _mm256_set1_ps(-87.3f);
  return {_mm256_and_ps(result.a, _mm256_cmp_ps(x.a, lowest, _CMP_NLT_UQ)),
          _mm256_and_ps(result.b, _mm256_cmp_ps(x.b, lowest, _CMP_NLT_UQ))};
#else
  float in[kLanes], out[kLanes];
  store(in, x);
  store(out, result);
  for (int i = 0; i < kLanes; ++i) {
    if (in[i] < -87.3f) out[i] = 0.0f;
  }
  return load(out);
#endif
}

// The first `count` lanes, up to sixteen; the others are zeros.
JAXIS_INLINE F32x16 load_part(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
  return load(lanes);
}

JAXIS_INLINE void store_part(float* p, F32x16 x, int64_t count) {
  if (count >= kLanes) return store(p, x);
  float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(float));
}

}  // namespace jaxis::JAXIS_ISA
