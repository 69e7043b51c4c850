// Panel-wide vectors: a value for each of the 16 outputs of a panel, in as many registers as the instruction set needs.
// All operations are exact or rounded once, in the same way everywhere, so that all instruction sets give equal bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "weights.h"

#if !defined(FORERUN_ISA_portable)
#include <immintrin.h>
#endif

#define FORERUN_INLINE inline __attribute__((always_inline))

#if defined(FORERUN_ISA_avx2) || defined(FORERUN_ISA_avxvnni)
#define FORERUN_256_BITS
#endif
#if defined(FORERUN_ISA_avx512vnni) || (defined(FORERUN_ISA_avxvnni) && defined(FORERUN_AVXVNNI))
#define FORERUN_VNNI
#endif

namespace forerun::FORERUN_ISA {

namespace {

// Compilers reorder sums of integers so that all products are there before the first is added: more than registers
// hold. A sum that has gone through this is made in its place.
#if defined(FORERUN_256_BITS)
#define FORERUN_PINNED "+x"
#else
#define FORERUN_PINNED "+v"
#endif
template <class Vector>
FORERUN_INLINE Vector pinned(Vector a) {
  asm("" : FORERUN_PINNED(a));
  return a;
}

#if defined(FORERUN_ISA_portable)

inline constexpr int parts = 1;  // registers of a panel-wide vector
inline constexpr int rows_at_once = 1;

struct Ints {
  std::int32_t lane[panel_outputs];
};
struct Floats {
  float lane[panel_outputs];
};

FORERUN_INLINE float half_to_float(Half half) {
  std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31;
  std::uint32_t mantissa = half & 0x3ff, bits;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
    float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  }
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

template <class Lane>
FORERUN_INLINE Floats floats_of(const Lane& lane) {
  Floats result;
  for (int i = 0; i < panel_outputs; ++i) result.lane[i] = lane(i);
  return result;
}

FORERUN_INLINE Floats zero_floats() { return Floats{}; }
FORERUN_INLINE Floats broadcast(const float* value) {
  return floats_of([&](int) { return *value; });
}
FORERUN_INLINE Floats load_halves(const Half* p, int) {
  return floats_of([&](int i) { return half_to_float(p[i]); });
}
FORERUN_INLINE Floats load_u8(const std::uint8_t* p, int) {
  return floats_of([&](int i) { return static_cast<float>(p[i]); });
}
FORERUN_INLINE Floats load_s8(const std::int8_t* p, int) {
  return floats_of([&](int i) { return static_cast<float>(p[i]); });
}
FORERUN_INLINE Floats multiply(const Floats& a, const Floats& b) {
  return floats_of([&](int i) { return a.lane[i] * b.lane[i]; });
}
FORERUN_INLINE Floats negative(const Floats& a) {
  return floats_of([&](int i) { return -a.lane[i]; });
}
FORERUN_INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
  return floats_of([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
}
FORERUN_INLINE Floats to_floats(const Ints& a) {
  return floats_of([&](int i) { return static_cast<float>(a.lane[i]); });
}
FORERUN_INLINE Floats bf16_even(const Bf16Record& record, int) {
  return floats_of([&](int i) {
    std::uint32_t bits = static_cast<std::uint32_t>(record.values[i][0]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  });
}
FORERUN_INLINE Floats bf16_odd(const Bf16Record& record, int) {
  return floats_of([&](int i) {
    std::uint32_t bits = static_cast<std::uint32_t>(record.values[i][1]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  });
}
FORERUN_INLINE void store(float* p, int, const Floats& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }

template <int bits, int first_quad, int quads>
__attribute__((noinline)) void dot_row(const std::uint8_t* quants, const std::int8_t* x, std::int32_t start,
                                       Ints& sums) {
  for (int lane = 0; lane < panel_outputs; ++lane) sums.lane[lane] = start;
  for (int quad = first_quad; quad < first_quad + quads; ++quad) {
    const std::uint8_t* low = quants + (bits == 8 ? quad : quad % 4) * quad_bytes;
    const std::uint8_t* high = quants + (bits == 6 ? 4 + quad % 4 / 2 : 4) * quad_bytes;
    int shift = bits == 5 ? quad : quad < 4 ? 4 + quad % 2 * 2 : quad % 2 * 2;
    for (int lane = 0; lane < panel_outputs; ++lane) {
      for (int i = 0; i < 4; ++i) {
        std::int32_t value = low[lane * 4 + i];
        if constexpr (bits == 8) value = static_cast<std::int8_t>(value);
        if constexpr (bits < 8) value = value >> quad / 4 * 4 & 15;
        if constexpr (bits > 4 && bits < 8) value |= (high[lane * 4 + i] >> shift & ((1 << (bits - 4)) - 1)) << 4;
        sums.lane[lane] += value * x[quad * 4 + i];
      }
    }
  }
}

// As below, for VNNI; 8 bits have no offset here.
template <int bits, int offset_shift, int first_quad, int quads, int rows, class Values, class MinusSum>
FORERUN_INLINE void dot(const std::uint8_t* quants, const Values& x, const MinusSum& minus_sum,
                        Ints (&sums)[rows][parts]) {
  for (int r = 0; r < rows; ++r) {
    std::int32_t start = offset_shift > 0 ? *minus_sum(r) * (1 << offset_shift) : 0;
    dot_row<bits, first_quad, quads>(quants, x(r), start, sums[r][0]);
  }
}

#elif defined(FORERUN_256_BITS)  // avx2, avxvnni

inline constexpr int parts = 2;
inline constexpr int rows_at_once = 4;  // 16 registers: 8 sums, 2 of weights, x, constants

using Ints = __m256i;
using Floats = __m256;

FORERUN_INLINE Floats zero_floats() { return _mm256_setzero_ps(); }
FORERUN_INLINE Floats broadcast(const float* value) { return _mm256_broadcast_ss(value); }
FORERUN_INLINE Floats load_halves(const Half* p, int part) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p + 8 * part)));
}
FORERUN_INLINE Floats load_u8(const std::uint8_t* p, int part) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * part))));
}
FORERUN_INLINE Floats load_s8(const std::int8_t* p, int part) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * part))));
}
FORERUN_INLINE Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
FORERUN_INLINE Floats negative(Floats a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
FORERUN_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
FORERUN_INLINE Floats to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
FORERUN_INLINE Ints load_ints(const void* p, int part) {
  return _mm256_load_si256(static_cast<const __m256i*>(p) + part);
}
FORERUN_INLINE Floats bf16_even(const Bf16Record& record, int part) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(load_ints(&record, part), 16));
}
FORERUN_INLINE Floats bf16_odd(const Bf16Record& record, int part) {
  return _mm256_castsi256_ps(_mm256_and_si256(load_ints(&record, part), _mm256_set1_epi32(0xffff0000)));
}
FORERUN_INLINE void store(float* p, int part, Floats a) { _mm256_store_ps(p + 8 * part, a); }
FORERUN_INLINE Ints broadcast_quad(const std::int8_t* x) {
  std::int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
FORERUN_INLINE Ints masked(Ints a, int byte) {
  return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(byte)));
}
FORERUN_INLINE Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
FORERUN_INLINE Ints shift_right_16(Ints a, int count) { return _mm256_srli_epi16(a, count); }
FORERUN_INLINE Ints shift_left_16(Ints a, int count) { return _mm256_slli_epi16(a, count); }
FORERUN_INLINE Ints add16(Ints a, Ints b) { return pinned(_mm256_add_epi16(a, b)); }
FORERUN_INLINE Ints add32(Ints a, Ints b) { return pinned(_mm256_add_epi32(a, b)); }
FORERUN_INLINE Ints shift_left(Ints a, int count) { return _mm256_slli_epi32(a, count); }
template <class Int>  // 16 or 32 bits
FORERUN_INLINE Ints broadcast32(const Int* value) {
  return _mm256_set1_epi32(*value);
}
FORERUN_INLINE Ints pair_sums(Ints unsigned_bytes, Ints signed_bytes) {
  return _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
}
FORERUN_INLINE Ints widen(Ints words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

FORERUN_INLINE Ints zero_ints() { return _mm256_setzero_si256(); }
FORERUN_INLINE Ints plus_128(Ints bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
#if defined(FORERUN_VNNI)
FORERUN_INLINE Ints add_products(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return _mm256_dpbusd_avx_epi32(sum, unsigned_bytes, signed_bytes);
}
#endif

// |w| and x * sign(w): the product of signed bytes as one of unsigned and signed ones.
struct Signed {
  Ints weights, absolute;
};
FORERUN_INLINE Signed split_sign(Ints weights) { return {weights, _mm256_abs_epi8(weights)}; }
FORERUN_INLINE Ints signed_pair_sums(const Signed& w, Ints x) {
  return _mm256_maddubs_epi16(w.absolute, _mm256_sign_epi8(x, w.weights));
}

#else  // avx512, avx512vnni

inline constexpr int parts = 1;
inline constexpr int rows_at_once = 8;

using Ints = __m512i;
using Floats = __m512;

FORERUN_INLINE Floats zero_floats() { return _mm512_setzero_ps(); }
FORERUN_INLINE Floats broadcast(const float* value) { return _mm512_set1_ps(*value); }
FORERUN_INLINE Floats load_halves(const Half* p, int) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
FORERUN_INLINE Floats load_u8(const std::uint8_t* p, int) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
FORERUN_INLINE Floats load_s8(const std::int8_t* p, int) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
FORERUN_INLINE Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
FORERUN_INLINE Floats negative(Floats a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
FORERUN_INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
FORERUN_INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
FORERUN_INLINE Ints load_ints(const void* p, int) { return _mm512_load_si512(p); }
FORERUN_INLINE Floats bf16_even(const Bf16Record& record, int) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(load_ints(&record, 0), 16));
}
FORERUN_INLINE Floats bf16_odd(const Bf16Record& record, int) {
  return _mm512_castsi512_ps(_mm512_and_si512(load_ints(&record, 0), _mm512_set1_epi32(0xffff0000)));
}
FORERUN_INLINE void store(float* p, int, Floats a) { _mm512_store_ps(p, a); }
FORERUN_INLINE Ints broadcast_quad(const std::int8_t* x) {
  std::int32_t quad;
  std::memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}
FORERUN_INLINE Ints masked(Ints a, int byte) {
  return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(byte)));
}
FORERUN_INLINE Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
FORERUN_INLINE Ints shift_right_16(Ints a, int count) { return _mm512_srli_epi16(a, count); }
FORERUN_INLINE Ints shift_left_16(Ints a, int count) { return _mm512_slli_epi16(a, count); }
FORERUN_INLINE Ints add16(Ints a, Ints b) { return pinned(_mm512_add_epi16(a, b)); }
FORERUN_INLINE Ints add32(Ints a, Ints b) { return pinned(_mm512_add_epi32(a, b)); }
FORERUN_INLINE Ints shift_left(Ints a, int count) { return _mm512_slli_epi32(a, count); }
template <class Int>  // 16 or 32 bits
FORERUN_INLINE Ints broadcast32(const Int* value) {
  return _mm512_set1_epi32(*value);
}
FORERUN_INLINE Ints pair_sums(Ints unsigned_bytes, Ints signed_bytes) {
  return _mm512_maddubs_epi16(unsigned_bytes, signed_bytes);
}
FORERUN_INLINE Ints widen(Ints words) { return _mm512_madd_epi16(words, _mm512_set1_epi16(1)); }

FORERUN_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
FORERUN_INLINE Ints plus_128(Ints bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
#if defined(FORERUN_VNNI)
FORERUN_INLINE Ints add_products(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
}
#endif

struct Signed {
  Ints absolute;
  __mmask64 negative;
};
FORERUN_INLINE Signed split_sign(Ints weights) { return {_mm512_abs_epi8(weights), _mm512_movepi8_mask(weights)}; }
FORERUN_INLINE Ints signed_pair_sums(const Signed& w, Ints x) {
  return _mm512_maddubs_epi16(w.absolute, _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x));
}

#endif

#if !defined(FORERUN_ISA_portable)

// Bits `from` .. of each byte moved to bit 4, the others cleared.
FORERUN_INLINE Ints to_bit_4(Ints bytes, int from, int mask) {
  if (from < 4) return masked(shift_left_16(bytes, 4 - from), mask);
  return masked(from == 4 ? bytes : shift_right_16(bytes, from - 4), mask);
}

// Quad `quad` of a group, as unsigned bytes; of 8 bits as they are.
template <int bits>
FORERUN_INLINE Ints load_quad(const std::uint8_t* quants, int quad, int part) {
  if constexpr (bits == 8) return load_ints(quants + quad * quad_bytes, part);
  Ints both = load_ints(quants + quad % 4 * quad_bytes, part);
  Ints low = masked(quad < 4 ? both : shift_right_16(both, 4), 15);
  if constexpr (bits == 4) return low;
  if constexpr (bits == 5) return either(low, to_bit_4(load_ints(quants + bytes_4, part), quad, 0x10));
  Ints upper = load_ints(quants + bytes_4 + quad % 4 / 2 * quad_bytes, part);
  return either(low, to_bit_4(upper, quad < 4 ? 4 + quad % 2 * 2 : quad % 2 * 2, 0x30));
}

// The order in which quads are taken: those that share bytes follow each other.
template <int bits>
FORERUN_INLINE constexpr int quad_at(int first_quad, int q, int quads) {
  return bits < 8 && quads == 8 ? q / 2 + q % 2 * 4 : first_quad + q;
}

#endif

#if defined(FORERUN_VNNI)

// For each row and output: the sum of (weight - offset) * x over quads first_quad .. first_quad + quads - 1 of a group.
// x(r): the row's values; minus_sum(r): minus their sum over these quads. The offset is 1 << offset_shift, or none at 0;
// of 8 bits it is always 128, undone here.
template <int bits, int offset_shift, int first_quad, int quads, int rows, class Values, class MinusSum>
FORERUN_INLINE void dot(const std::uint8_t* quants, const Values& x, const MinusSum& minus_sum,
                        Ints (&sums)[rows][parts]) {
  for (int r = 0; r < rows; ++r) {
    Ints start = offset_shift ? shift_left(broadcast32(minus_sum(r)), offset_shift) : zero_ints();
    for (int part = 0; part < parts; ++part) sums[r][part] = start;
  }
#pragma GCC unroll 8
  for (int q = 0; q < quads; ++q) {
    int quad = quad_at<bits>(first_quad, q, quads);
    Ints weights[parts];
#pragma GCC unroll 2
    for (int part = 0; part < parts; ++part) {
      weights[part] = load_quad<bits>(quants, quad, part);
      if constexpr (bits == 8) weights[part] = plus_128(weights[part]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      Ints values = broadcast_quad(x(r) + 4 * quad);
#pragma GCC unroll 2
      for (int part = 0; part < parts; ++part) {
        sums[r][part] = add_products(sums[r][part], weights[part], values);
      }
    }
  }
}

#elif !defined(FORERUN_ISA_portable)

// Sums of pairs are of 16 bits. With |x| <= 127 so many of them can be added up before they need 32.
inline constexpr int quads_in_16_bits(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : 2; }

// Signed bytes: one sum of pairs may fill 16 bits, so each is widened at once.
template <int rows, class Values>
FORERUN_INLINE void dot_8_bits(const std::uint8_t* quants, const Values& x, Ints (&sums)[rows][parts]) {
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
#pragma GCC unroll 2
    for (int part = 0; part < parts; ++part) {
      Signed weights = split_sign(load_quad<8>(quants, quad, part));
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        Ints sum = widen(signed_pair_sums(weights, broadcast_quad(x(r) + 4 * quad)));
        sums[r][part] = quad == 0 ? sum : add32(sums[r][part], sum);
      }
    }
  }
}

template <int bits, int first_quad, int quads, int rows, class Values>
FORERUN_INLINE void dot_unsigned(const std::uint8_t* quants, const Values& x, Ints (&sums)[rows][parts]) {
  constexpr int chunk = quads_in_16_bits(bits);
#pragma GCC unroll 8
  for (int start = 0; start < quads; start += chunk) {
    Ints words[rows][parts];
#pragma GCC unroll 8
    for (int q = start; q < start + chunk; ++q) {
      int quad = quad_at<bits>(first_quad, q, quads);
#pragma GCC unroll 2
      for (int part = 0; part < parts; ++part) {
        Ints weights = load_quad<bits>(quants, quad, part);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          Ints pairs = pair_sums(weights, broadcast_quad(x(r) + 4 * quad));
          words[r][part] = q == start ? pairs : add16(words[r][part], pairs);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
      for (int part = 0; part < parts; ++part) {
        Ints sum = widen(words[r][part]);
        sums[r][part] = start == 0 ? sum : add32(sums[r][part], sum);
      }
    }
  }
}

// As above, for VNNI; 8 bits have no offset here.
template <int bits, int offset_shift, int first_quad, int quads, int rows, class Values, class MinusSum>
FORERUN_INLINE void dot(const std::uint8_t* quants, const Values& x, const MinusSum& minus_sum,
                        Ints (&sums)[rows][parts]) {
  if constexpr (bits == 8) {
    dot_8_bits(quants, x, sums);
  } else {
    dot_unsigned<bits, first_quad, quads>(quants, x, sums);
  }
  if constexpr (offset_shift > 0) {
    for (int r = 0; r < rows; ++r) {
      Ints correction = shift_left(broadcast32(minus_sum(r)), offset_shift);
      for (int part = 0; part < parts; ++part) sums[r][part] = add32(sums[r][part], correction);
    }
  }
}

#endif

}  // namespace

}  // namespace forerun::FORERUN_ISA
