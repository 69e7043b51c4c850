#include "linear.h"

#include "kernels/simd.h"

namespace forerun::FORERUN_ISA {

namespace {


// Bytes ahead; the processor's own prefetch stops at each page. Measured: 1 row gains little, 8 rows a third.
constexpr int prefetch_distance = 2048;

// The share of group g, so that requests come evenly: a burst of them would wait for each other.
template <class Record, int groups>
FORERUN_INLINE void prefetch(const Record& record, int g) {
  constexpr int share = (sizeof(Record) + groups - 1) / groups;
  const char* start = reinterpret_cast<const char*>(&record) + prefetch_distance + g * share;
#pragma GCC unroll 16
  for (int i = 0; i < share; i += 64) __builtin_prefetch(start + i);
}

// A format says, for group g of a record: its scale, its minimum (where has_minimum), and how many bits its quants have.

template <class RecordType, int bits_, int offset_shift_, bool has_minimum_>
struct PairFormat {  // two groups a record, halves as scales
  using Record = RecordType;
  static constexpr int bits = bits_, offset_shift = offset_shift_, groups = 2;
  static constexpr bool has_minimum = has_minimum_, half_scales = false;

  const Record& record;
  FORERUN_INLINE explicit PairFormat(const Record& r) : record(r) {}
  FORERUN_INLINE Floats scale(int group, int part) const { return load_halves(record.scale[group], part); }
  FORERUN_INLINE Floats minimum(int group, int part) const {
    if constexpr (has_minimum) return load_halves(record.minimum[group], part);
    return zero_floats();
  }
};

template <class RecordType, int bits_>
struct SuperFormat {  // eight groups a record, whose scales are halves times small integers: exact in float32
  using Record = RecordType;
  static constexpr int bits = bits_, offset_shift = 0, groups = 8;
  static constexpr bool has_minimum = true, half_scales = false;

  const Record& record;
  Floats all_scale[parts], all_minimum[parts];
  FORERUN_INLINE explicit SuperFormat(const Record& r) : record(r) {
    for (int part = 0; part < parts; ++part) {
      all_scale[part] = load_halves(r.scale, part);
      all_minimum[part] = negative(load_halves(r.minimum, part));
    }
  }
  FORERUN_INLINE Floats scale(int group, int part) const {
    return multiply(all_scale[part], load_u8(record.group_scale[group], part));
  }
  FORERUN_INLINE Floats minimum(int group, int part) const {
    return multiply(all_minimum[part], load_u8(record.group_minimum[group], part));
  }
};

struct Q6KFormat {
  using Record = Q6KRecord;
  static constexpr int bits = 6, offset_shift = 5, groups = 8;
  static constexpr bool has_minimum = false, half_scales = true;

  const Record& record;
  Floats all_scale[parts];
  FORERUN_INLINE explicit Q6KFormat(const Record& r) : record(r) {
    for (int part = 0; part < parts; ++part) all_scale[part] = load_halves(r.scale, part);
  }
  FORERUN_INLINE Floats scale(int half_group, int part) const {
    return multiply(all_scale[part], load_s8(record.half_scale[half_group], part));
  }
};

#if defined(FORERUN_VNNI)
using Q80Format = PairFormat<Q80Record, 8, 7, false>;  // dot() works on value + 128
#else
using Q80Format = PairFormat<Q80Record, 8, 0, false>;
#endif

// Rows of x as a kernel sees them: row r is lane r % tile_rows of group[r / tile_rows].
struct Rows {
  const ActivationGroup* group[max_rows / tile_rows];
  FORERUN_INLINE const ActivationGroup& of(int row) const { return *group[row / tile_rows]; }
};

// total += sums * (weight scale * x scale), for `count` rows from row `first`.
template <int count>
FORERUN_INLINE void add_scaled(const Ints (&sums)[count][parts], const Floats (&weight_scale)[parts], const Rows& x,
                               int first, Floats (*total)[parts]) {
#pragma GCC unroll 8
  for (int r = 0; r < count; ++r) {
    Floats x_scale = broadcast(&x.of(first + r).scale[(first + r) % tile_rows]);
#pragma GCC unroll 2
    for (int part = 0; part < parts; ++part) {
      Floats scale = multiply(weight_scale[part], x_scale);
      total[first + r][part] = fused(to_floats(sums[r][part]), scale, total[first + r][part]);
    }
  }
}

template <int count>
FORERUN_INLINE void add_minimums(const Floats (&minimum)[parts], const Rows& x, int first, Floats (*total)[parts]) {
#pragma GCC unroll 8
  for (int r = 0; r < count; ++r) {
    Floats x_sum = broadcast(&x.of(first + r).scaled_sum[(first + r) % tile_rows]);
#pragma GCC unroll 2
    for (int part = 0; part < parts; ++part) {
      total[first + r][part] = fused(minimum[part], x_sum, total[first + r][part]);
    }
  }
}

// Group g of a record for rows first .. first + count - 1.
template <class Format, int count>
FORERUN_INLINE void add_group(const Format& format, int g, const Rows& x, int first, Floats (*total)[parts]) {
  constexpr int bits = Format::bits, shift = Format::offset_shift;
  auto values = [&](int r) { return x.of(first + r).values[(first + r) % tile_rows]; };
  const std::uint8_t* quants = format.record.quants[g];
  Ints sums[count][parts];
  Floats scale[parts];
  if constexpr (Format::half_scales) {
    auto first_half = [&](int r) { return &x.of(first + r).minus_half_sum[0][(first + r) % tile_rows]; };
    dot<bits, shift, 0, 4>(quants, values, first_half, sums);
    for (int part = 0; part < parts; ++part) scale[part] = format.scale(2 * g, part);
    add_scaled(sums, scale, x, first, total);
    auto second_half = [&](int r) { return &x.of(first + r).minus_half_sum[1][(first + r) % tile_rows]; };
    dot<bits, shift, 4, 4>(quants, values, second_half, sums);
    for (int part = 0; part < parts; ++part) scale[part] = format.scale(2 * g + 1, part);
    add_scaled(sums, scale, x, first, total);
  } else {
    auto minus_sum = [&](int r) { return &x.of(first + r).minus_sum[(first + r) % tile_rows]; };
    dot<bits, shift, 0, 8>(quants, values, minus_sum, sums);
    for (int part = 0; part < parts; ++part) scale[part] = format.scale(g, part);
    add_scaled(sums, scale, x, first, total);
  }
  if constexpr (Format::has_minimum) {
    Floats minimum[parts];
    for (int part = 0; part < parts; ++part) minimum[part] = format.minimum(g, part);
    add_minimums<count>(minimum, x, first, total);
  }
}

#if defined(FORERUN_ISA_portable)

template <class Format, int rows>
FORERUN_INLINE void add_all_rows(const Format& format, int g, const Rows& x, Floats (*total)[parts]) {
#pragma GCC unroll 1
  for (int r = 0; r < rows; ++r) add_group<Format, 1>(format, g, x, r, total);
}

#else

// rows_at_once by rows_at_once: more would not fit in the registers.
template <class Format, int rows, int first = 0>
FORERUN_INLINE void add_all_rows(const Format& format, int g, const Rows& x, Floats (*total)[parts]) {
  if constexpr (first < rows) {
    add_group<Format, (rows - first < rows_at_once ? rows - first : rows_at_once)>(format, g, x, first, total);
    add_all_rows<Format, rows, first + rows_at_once>(format, g, x, total);
  }
}

#endif

template <class Format, int rows>
void quantised_panel(const PanelCall& call) {
  const auto* records = static_cast<const typename Format::Record*>(call.panel);
  Rows x{{call.tiles[0], call.tiles[1]}};
  Floats total[rows][parts];
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < parts; ++part) total[r][part] = zero_floats();
  }
  for (std::int64_t i = 0; i < call.records; ++i) {
    const Format format(records[i]);
    for (int g = 0; g < Format::groups; ++g) {
      prefetch<typename Format::Record, Format::groups>(records[i], g);
      add_all_rows<Format, rows>(format, g, x, total);
      ++x.group[0];
      if constexpr (rows > tile_rows) ++x.group[1];
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < parts; ++part) store(call.out[r], part, total[r][part]);
  }
}

// bf16 weights times float32 rows, k by k. Two k a record; `pairs` records.
template <int count>
void add_bf16(const Bf16Record* records, std::int64_t pairs, const float* x, std::int64_t x_stride,
              Floats (*total)[parts]) {
  Floats sums[count][parts];
  for (int r = 0; r < count; ++r) {
    for (int part = 0; part < parts; ++part) sums[r][part] = total[r][part];
  }
  for (std::int64_t i = 0; i < pairs; ++i, x += 2) {
    __builtin_prefetch(reinterpret_cast<const char*>(records + i) + prefetch_distance);
    Floats even[parts], odd[parts];
    for (int part = 0; part < parts; ++part) {
      even[part] = bf16_even(records[i], part);
      odd[part] = bf16_odd(records[i], part);
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; ++r) {
      Floats first = broadcast(x + r * x_stride);
      for (int part = 0; part < parts; ++part) sums[r][part] = fused(even[part], first, sums[r][part]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; ++r) {
      Floats second = broadcast(x + r * x_stride + 1);
      for (int part = 0; part < parts; ++part) sums[r][part] = fused(odd[part], second, sums[r][part]);
    }
  }
  for (int r = 0; r < count; ++r) {
    for (int part = 0; part < parts; ++part) total[r][part] = sums[r][part];
  }
}

constexpr std::int64_t bf16_chunk = 32;  // records that stay in the innermost cache for the other rows

template <int rows, int first = 0>
FORERUN_INLINE void add_bf16_rows(const Bf16Record* records, std::int64_t pairs, const float* x, std::int64_t x_stride,
                                  Floats (*total)[parts]) {
  if constexpr (first < rows) {
    constexpr int count = rows - first < rows_at_once ? rows - first : rows_at_once;
    add_bf16<count>(records, pairs, x + first * x_stride, x_stride, total + first);
    add_bf16_rows<rows, first + rows_at_once>(records, pairs, x, x_stride, total);
  }
}

template <int rows>
void bf16_panel(const PanelCall& call) {
  const auto* records = static_cast<const Bf16Record*>(call.panel);
  Floats total[rows][parts];
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < parts; ++part) total[r][part] = zero_floats();
  }
  std::int64_t pairs = call.k / 2;
  for (std::int64_t i = 0; i < pairs; i += bf16_chunk) {
    std::int64_t count = pairs - i < bf16_chunk ? pairs - i : bf16_chunk;
    add_bf16_rows<rows>(records + i, count, call.x + 2 * i, call.x_stride, total);
  }
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < parts; ++part) {
      if (call.k % 2) {
        Floats last = broadcast(call.x + r * call.x_stride + call.k - 1);
        total[r][part] = fused(bf16_even(records[pairs], part), last, total[r][part]);
      }
      store(call.out[r], part, total[r][part]);
    }
  }
}

#define FORERUN_ROWS(kernel, ...)                                                                              \
  {                                                                                                            \
    kernel<__VA_ARGS__ 1>, kernel<__VA_ARGS__ 2>, kernel<__VA_ARGS__ 3>, kernel<__VA_ARGS__ 4>,                \
        kernel<__VA_ARGS__ 5>, kernel<__VA_ARGS__ 6>, kernel<__VA_ARGS__ 7>, kernel<__VA_ARGS__ 8>             \
  }
#define FORERUN_FORMAT(...) __VA_ARGS__,

using Q40Format = PairFormat<Q40Record, 4, 3, false>;
using Q41Format = PairFormat<Q41Record, 4, 0, true>;
using Q50Format = PairFormat<Q50Record, 5, 4, false>;
using Q51Format = PairFormat<Q51Record, 5, 0, true>;
using Q4KFormat = SuperFormat<Q4KRecord, 4>;
using Q5KFormat = SuperFormat<Q5KRecord, 5>;

}  // namespace

extern const LinearKernels linear_kernels = {{
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q40Format)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q41Format)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q4KFormat)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q50Format)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q51Format)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q5KFormat)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q6KFormat)),
    FORERUN_ROWS(quantised_panel, FORERUN_FORMAT(Q80Format)),
    FORERUN_ROWS(bf16_panel),
}};

}  // namespace forerun::FORERUN_ISA
