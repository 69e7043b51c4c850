// Sixteen floats as one value, on every instruction set the same sixteen: sums are kept in 16 lanes and added up in one
// order, so that results have equal bits everywhere. Loads and stores of fewer than 16 read or write no more than these.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(FORERUN_ISA_portable)
#include <immintrin.h>
#endif

#if !defined(FORERUN_INLINE)
#define FORERUN_INLINE inline __attribute__((always_inline))
#endif

namespace forerun::FORERUN_ISA {

namespace {

using Bf16 = std::uint16_t;

inline constexpr int lanes = 16;

#if defined(FORERUN_ISA_portable)

struct Vector {
  float lane[lanes];
};

template <class Lane>
FORERUN_INLINE Vector vector_of(const Lane& lane) {
  Vector result;
  for (int i = 0; i < lanes; ++i) result.lane[i] = lane(i);
  return result;
}

FORERUN_INLINE float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

FORERUN_INLINE Vector all(float value) {
  return vector_of([&](int) { return value; });
}
FORERUN_INLINE Vector load(const float* p) {
  Vector result;
  std::memcpy(result.lane, p, sizeof(result.lane));
  return result;
}
FORERUN_INLINE Vector load(const Bf16* p) {
  return vector_of([&](int i) { return float_of_bits(static_cast<std::uint32_t>(p[i]) << 16); });
}
FORERUN_INLINE Vector load(const float* p, int count) {
  return vector_of([&](int i) { return i < count ? p[i] : 0.0f; });
}
FORERUN_INLINE Vector load(const Bf16* p, int count) {
  return vector_of([&](int i) { return i < count ? float_of_bits(static_cast<std::uint32_t>(p[i]) << 16) : 0.0f; });
}
FORERUN_INLINE void store(float* p, const Vector& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
FORERUN_INLINE void store(float* p, const Vector& a, int count) {
  for (int i = 0; i < count; ++i) p[i] = a.lane[i];
}
FORERUN_INLINE Vector add(const Vector& a, const Vector& b) {
  return vector_of([&](int i) { return a.lane[i] + b.lane[i]; });
}
FORERUN_INLINE Vector subtract(const Vector& a, const Vector& b) {
  return vector_of([&](int i) { return a.lane[i] - b.lane[i]; });
}
FORERUN_INLINE Vector multiply(const Vector& a, const Vector& b) {
  return vector_of([&](int i) { return a.lane[i] * b.lane[i]; });
}
FORERUN_INLINE Vector divide(const Vector& a, const Vector& b) {
  return vector_of([&](int i) { return a.lane[i] / b.lane[i]; });
}
FORERUN_INLINE Vector fused(const Vector& a, const Vector& b, const Vector& c) {  // a * b + c
  return vector_of([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
FORERUN_INLINE Vector larger(const Vector& a, const Vector& b) {  // b where one is NaN, as x86 has it
  return vector_of([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
FORERUN_INLINE Vector smaller(const Vector& a, const Vector& b) {
  return vector_of([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
FORERUN_INLINE Vector first(const Vector& a, int count, float rest) {  // the other lanes are `rest`
  return vector_of([&](int i) { return i < count ? a.lane[i] : rest; });
}
FORERUN_INLINE Vector last(const Vector& a, int count, float rest) {
  return vector_of([&](int i) { return i < lanes - count ? rest : a.lane[i]; });
}
FORERUN_INLINE Vector shifted_exponent(const Vector& a, std::int32_t bias) {  // (bits + bias) << 23
  return vector_of([&](int i) {
    std::uint32_t bits;
    std::memcpy(&bits, &a.lane[i], sizeof(bits));
    return float_of_bits((bits + static_cast<std::uint32_t>(bias)) << 23);
  });
}
FORERUN_INLINE float sum(const Vector& a) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = a.lane[i] + a.lane[i + 8];
  for (int i = 0; i < 4; ++i) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}
FORERUN_INLINE float largest(const Vector& a) {
  float m[8];
  for (int i = 0; i < 8; ++i) m[i] = a.lane[i] > a.lane[i + 8] ? a.lane[i] : a.lane[i + 8];
  for (int i = 0; i < 4; ++i) m[i] = m[i] > m[i + 4] ? m[i] : m[i + 4];
  for (int i = 0; i < 2; ++i) m[i] = m[i] > m[i + 2] ? m[i] : m[i + 2];
  return m[0] > m[1] ? m[0] : m[1];
}

#else

FORERUN_INLINE float sum(__m256 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
FORERUN_INLINE float largest(__m256 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

#if defined(FORERUN_ISA_avx2) || defined(FORERUN_ISA_avxvnni)

struct Vector {
  __m256 low, high;
};

alignas(64) inline constexpr std::int32_t mask_table[2 * lanes] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                                                   -1, -1, -1, -1, -1, 0,  0,  0,  0,  0,  0,
                                                                   0,  0,  0,  0,  0,  0,  0,  0,  0,  0};

struct Mask {
  __m256i low, high;
};
FORERUN_INLINE Mask mask_of(int count) {
  const auto* start = reinterpret_cast<const char*>(mask_table + lanes - count);
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(start)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(start + 32))};
}
FORERUN_INLINE __m256 widen(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

FORERUN_INLINE Vector all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
FORERUN_INLINE Vector load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FORERUN_INLINE Vector load(const Bf16* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
FORERUN_INLINE Vector load(const float* p, int count) {
  Mask mask = mask_of(count);
  return {_mm256_maskload_ps(p, mask.low), _mm256_maskload_ps(p + 8, mask.high)};
}
FORERUN_INLINE Vector load(const Bf16* p, int count) {
  Bf16 padded[lanes] = {};
  std::memcpy(padded, p, static_cast<std::size_t>(count) * sizeof(Bf16));
  return load(padded);
}
FORERUN_INLINE void store(float* p, const Vector& a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
FORERUN_INLINE void store(float* p, const Vector& a, int count) {
  Mask mask = mask_of(count);
  _mm256_maskstore_ps(p, mask.low, a.low);
  _mm256_maskstore_ps(p + 8, mask.high, a.high);
}
FORERUN_INLINE Vector add(const Vector& a, const Vector& b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
FORERUN_INLINE Vector subtract(const Vector& a, const Vector& b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
FORERUN_INLINE Vector multiply(const Vector& a, const Vector& b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
FORERUN_INLINE Vector divide(const Vector& a, const Vector& b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
FORERUN_INLINE Vector fused(const Vector& a, const Vector& b, const Vector& c) {  // a * b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
FORERUN_INLINE Vector larger(const Vector& a, const Vector& b) {  // b where one is NaN
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
FORERUN_INLINE Vector smaller(const Vector& a, const Vector& b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
FORERUN_INLINE Vector first(const Vector& a, int count, float rest) {  // the other lanes are `rest`
  Mask mask = mask_of(count);
  __m256 other = _mm256_set1_ps(rest);
  return {_mm256_blendv_ps(other, a.low, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(other, a.high, _mm256_castsi256_ps(mask.high))};
}
FORERUN_INLINE Vector last(const Vector& a, int count, float rest) {
  Mask mask = mask_of(lanes - count);
  __m256 other = _mm256_set1_ps(rest);
  return {_mm256_blendv_ps(a.low, other, _mm256_castsi256_ps(mask.low)),
          _mm256_blendv_ps(a.high, other, _mm256_castsi256_ps(mask.high))};
}
FORERUN_INLINE __m256 shifted_exponent(__m256 a, std::int32_t bias) {
  __m256i bits = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(bias));
  return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
FORERUN_INLINE Vector shifted_exponent(const Vector& a, std::int32_t bias) {  // (bits + bias) << 23
  return {shifted_exponent(a.low, bias), shifted_exponent(a.high, bias)};
}
FORERUN_INLINE float sum(const Vector& a) { return sum(_mm256_add_ps(a.low, a.high)); }
FORERUN_INLINE float largest(const Vector& a) { return largest(_mm256_max_ps(a.low, a.high)); }

#else  // avx512, avx512vnni

using Vector = __m512;

FORERUN_INLINE __mmask16 mask_of(int count) { return static_cast<__mmask16>((1u << count) - 1); }
FORERUN_INLINE Vector widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

FORERUN_INLINE Vector all(float value) { return _mm512_set1_ps(value); }
FORERUN_INLINE Vector load(const float* p) { return _mm512_loadu_ps(p); }
FORERUN_INLINE Vector load(const Bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
FORERUN_INLINE Vector load(const float* p, int count) { return _mm512_maskz_loadu_ps(mask_of(count), p); }
FORERUN_INLINE Vector load(const Bf16* p, int count) { return widen(_mm256_maskz_loadu_epi16(mask_of(count), p)); }
FORERUN_INLINE void store(float* p, Vector a) { _mm512_storeu_ps(p, a); }
FORERUN_INLINE void store(float* p, Vector a, int count) { _mm512_mask_storeu_ps(p, mask_of(count), a); }
FORERUN_INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
FORERUN_INLINE Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
FORERUN_INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
FORERUN_INLINE Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
FORERUN_INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
FORERUN_INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }               // b where one is NaN
FORERUN_INLINE Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
FORERUN_INLINE Vector first(Vector a, int count, float rest) {  // the other lanes are `rest`
  return _mm512_mask_mov_ps(_mm512_set1_ps(rest), mask_of(count), a);
}
FORERUN_INLINE Vector last(const Vector& a, int count, float rest) {
  return _mm512_mask_mov_ps(a, mask_of(lanes - count), _mm512_set1_ps(rest));
}
FORERUN_INLINE Vector shifted_exponent(Vector a, std::int32_t bias) {  // (bits + bias) << 23
  __m512i bits = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(bias));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
FORERUN_INLINE float sum(Vector a) {
  return sum(_mm256_add_ps(_mm512_extractf32x8_ps(a, 0), _mm512_extractf32x8_ps(a, 1)));
}
FORERUN_INLINE float largest(Vector a) {
  return largest(_mm256_max_ps(_mm512_extractf32x8_ps(a, 0), _mm512_extractf32x8_ps(a, 1)));
}

#endif
#endif

// e^x to 1 ulp; 0 below -87, infinity above 88.8, NaN of NaN. x = n ln 2 + r, e^r by a polynomial of degree 6 (largest
// relative error 3.1e-9 before rounding). Adding `round` leaves n in the low bits of the sum.
FORERUN_INLINE Vector exponential(const Vector& value) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23
  Vector x = smaller(all(89.0f), larger(all(-87.34f), value));
  Vector shifted = fused(x, all(1.44269504f), all(round));
  Vector n = subtract(shifted, all(round));
  Vector r = fused(n, all(-0.693359375f), x);  // ln 2 in two parts
  r = fused(n, all(2.12194440e-4f), r);
  Vector p = fused(r, all(1.381459878757596e-3f), all(8.368716575205326e-3f));
  p = fused(p, r, all(4.166838899254799e-2f));
  p = fused(p, r, all(1.666652113199234e-1f));
  p = fused(p, r, all(4.999999403953552e-1f));
  p = fused(p, r, all(1.0f));
  p = fused(p, r, all(1.0f));
  return multiply(add(p, p), shifted_exponent(shifted, 126));  // 2^(n - 1), which may be 0
}

// To 2e-7, absolute.
FORERUN_INLINE Vector hyperbolic_tangent(const Vector& x) {
  return subtract(all(1.0f), divide(all(2.0f), add(all(1.0f), exponential(add(x, x)))));
}

}  // namespace

}  // namespace forerun::FORERUN_ISA
