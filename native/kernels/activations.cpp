#include "activations.h"

#include <cstring>

#if !defined(FORERUN_ISA_portable)
#include <immintrin.h>
#endif

namespace forerun::FORERUN_ISA {

namespace {

constexpr float largest = 127.0f;
constexpr float smallest_scaled = 1e-30f;  // below, 127 / amax nears infinity: such a group counts as zeros

struct Sums {
  std::int32_t all, first_half;
};

#if defined(FORERUN_ISA_portable)

// The largest absolute value, by its bits: so it is NaN if any value is, whatever the order.
float largest_absolute(const float* x) {
  std::int32_t bits = 0;
  for (int i = 0; i < group_size; ++i) {
    std::int32_t value;
    std::memcpy(&value, x + i, sizeof(value));
    value &= 0x7fffffff;
    bits = value > bits ? value : bits;
  }
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

Sums round_group(const float* x, float inverse, std::int8_t* values) {
  Sums sums{0, 0};
  for (int i = 0; i < group_size; ++i) {
    auto value = static_cast<std::int32_t>(__builtin_lrintf(x[i] * inverse));
    values[i] = static_cast<std::int8_t>(value);
    sums.all += value;
    if (i < group_size / 2) sums.first_half += value;
  }
  return sums;
}

#else

float largest_absolute(const float* x) {
  const __m256i absolute = _mm256_set1_epi32(0x7fffffff);
  __m256i bits = _mm256_setzero_si256();
  for (int i = 0; i < group_size; i += 8) {
    __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    bits = _mm256_max_epi32(bits, _mm256_and_si256(value, absolute));
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(half));
}

std::int32_t sum_of(__m256i lanes) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

Sums round_group(const float* x, float inverse, std::int8_t* values) {
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i rounded[4];
  for (int i = 0; i < 4; ++i) rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
  __m256i first = _mm256_add_epi32(rounded[0], rounded[1]), second = _mm256_add_epi32(rounded[2], rounded[3]);
  __m256i words = _mm256_packs_epi32(rounded[0], rounded[1]), more = _mm256_packs_epi32(rounded[2], rounded[3]);
  __m256i bytes = _mm256_packs_epi16(words, more);  // packs work within halves: put the fours in order
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), bytes);
  return {sum_of(_mm256_add_epi32(first, second)), sum_of(first)};
}

#endif

void quantize_group(const float* x, ActivationGroup& group, int lane) {
  float amax = largest_absolute(x);
  bool scaled = amax >= smallest_scaled && amax <= 3.4028234664e38f;
  Sums sums{0, 0};
  if (scaled) {
    sums = round_group(x, largest / amax, group.values[lane]);
  } else {
    std::memset(group.values[lane], 0, group_size);
  }
  bool finite = amax <= 3.4028234664e38f;
  float scale = scaled ? amax / largest : finite ? 0.0f : __builtin_nanf("");
  group.scale[lane] = scale;
  group.scaled_sum[lane] = scale * static_cast<float>(sums.all);
  group.minus_sum[lane] = -sums.all;
  group.minus_half_sum[0][lane] = static_cast<std::int16_t>(-sums.first_half);
  group.minus_half_sum[1][lane] = static_cast<std::int16_t>(sums.first_half - sums.all);
}

void quantize_terms(const float* x, int terms, ActivationGroup& group, int lane) {
  quantize_group(x, group, lane);
  if (terms == 1) return;
  float rest[group_size];
  for (int i = 0; i < group_size; ++i) {
    rest[i] = x[i] - static_cast<float>(group.values[lane][i]) * group.scale[lane];
  }
  quantize_group(rest, group, lane + 1);
}

void quantize(const float* x, std::int64_t k, int terms, ActivationGroup* tile, int lane) {
  std::int64_t whole = k / group_size, all = num_groups(k);
  for (std::int64_t g = 0; g < whole; ++g) quantize_terms(x + g * group_size, terms, tile[g], lane);
  for (std::int64_t g = whole; g < all; ++g) {
    float last[group_size] = {};
    if (g == whole) std::memcpy(last, x + g * group_size, (k - g * group_size) * sizeof(float));
    quantize_terms(last, terms, tile[g], lane);
  }
}

}  // namespace

extern const ActivationKernels activation_kernels = {quantize};

}  // namespace forerun::FORERUN_ISA
