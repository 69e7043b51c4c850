#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "threads.h"

namespace forerun {

namespace {

constexpr int super_size = 256;  // values in a block of the K types

constexpr KindInfo kind_infos[num_kinds] = {
    {"q4_0", 64, sizeof(Q40Record)}, {"q4_1", 64, sizeof(Q41Record)}, {"q4_k", 256, sizeof(Q4KRecord)},
    {"q5_0", 64, sizeof(Q50Record)}, {"q5_1", 64, sizeof(Q51Record)}, {"q5_k", 256, sizeof(Q5KRecord)},
    {"q6_k", 256, sizeof(Q6KRecord)}, {"q8_0", 64, sizeof(Q80Record)}, {"bf16", 2, sizeof(Bf16Record)},
};

float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float half_to_float(Half half) {
  std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16, exponent = half >> 10 & 31;
  std::uint32_t mantissa = half & 0x3ff;
  if (exponent == 0) return float_of_bits(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13);
}

// To nearest, ties to even. By adding a number so large that what is to go falls off the end.
Half float_to_half(float value) {
  std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, absolute = bits & 0x7fffffff;
  if (absolute > 0x7f800000) return static_cast<Half>(sign | 0x7e00);
  if (absolute >= 0x477ff000) return static_cast<Half>(sign | 0x7c00);
  if (absolute < 0x38800000) return static_cast<Half>(sign | (bits_of(float_of_bits(absolute) + 0.5f) - 0x3f000000));
  return static_cast<Half>(sign | (((absolute + 0xfff + (absolute >> 13 & 1)) >> 13) - 0x1c000));
}

std::uint16_t float_to_bf16(float value) {
  std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

Half read_half(const std::uint8_t* p) { return static_cast<Half>(p[0] | p[1] << 8); }

// The place of value k of a group in a quad: `quad` counts from `quants`.
int place(int quad, int lane, int k) { return quad * quad_bytes + lane * 4 + k % 4; }

// Where the upper bits of a quad stand: which quad after the nibbles, and how far they are shifted up there.
struct Upper {
  int quad, shift;
};
template <int bits>
Upper upper_bits(int quad) {
  if constexpr (bits == 5) return {4, quad};
  return {4 + quad % 4 / 2, quad < 4 ? 4 + quad % 2 * 2 : quad % 2 * 2};
}

// A group's values, 0 .. 2^bits - 1, into a lane whose bits are zero or of the same group.
template <int bits>
void put(std::uint8_t* quants, int lane, const std::uint8_t* q) {
  if constexpr (bits == 8) {
    for (int quad = 0; quad < 8; ++quad) std::memcpy(quants + place(quad, lane, 0), q + 4 * quad, 4);
    return;
  }
  for (int k = 0; k < 16; ++k) quants[place(k / 4, lane, k)] = static_cast<std::uint8_t>((q[k] & 15) | q[k + 16] << 4);
  if constexpr (bits > 4) {
    for (int quad = 4; quad < bits; ++quad) std::memset(quants + place(quad, lane, 0), 0, 4);
    for (int k = 0; k < group_size; ++k) {
      Upper upper = upper_bits<bits>(k / 4);
      quants[place(upper.quad, lane, k)] |= static_cast<std::uint8_t>(q[k] >> 4 << upper.shift);
    }
  }
}

template <int bits>
int get(const std::uint8_t* quants, int lane, int k) {
  if constexpr (bits == 8) return static_cast<std::int8_t>(quants[place(k / 4, lane, k)]);
  int value = quants[place(k % 16 / 4, lane, k)] >> k / 16 * 4 & 15;
  if constexpr (bits > 4) {
    Upper upper = upper_bits<bits>(k / 4);
    value |= (quants[place(upper.quad, lane, k)] >> upper.shift & ((1 << (bits - 4)) - 1)) << 4;
  }
  return value;
}

void nibbles_apart(const std::uint8_t* packed, std::uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

void add_fifth_bits(const std::uint8_t* bits, std::uint8_t* q) {
  for (int i = 0; i < group_size; ++i) q[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
}

// A row of a checkpoint into one lane of a panel: `row` is [k] in the source's blocks, `panel` the panel's records.

void pack_q4_0(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q40Record*>(panel);
  for (std::int64_t g = 0; g < k / group_size; ++g, row += 18) {
    std::uint8_t q[group_size];
    nibbles_apart(row + 2, q);
    records[g / 2].scale[g % 2][lane] = read_half(row);
    put<4>(records[g / 2].quants[g % 2], lane, q);
  }
}

void pack_q4_1(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q41Record*>(panel);
  for (std::int64_t g = 0; g < k / group_size; ++g, row += 20) {
    std::uint8_t q[group_size];
    nibbles_apart(row + 4, q);
    records[g / 2].scale[g % 2][lane] = read_half(row);
    records[g / 2].minimum[g % 2][lane] = read_half(row + 2);
    put<4>(records[g / 2].quants[g % 2], lane, q);
  }
}

void pack_q5_0(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q50Record*>(panel);
  for (std::int64_t g = 0; g < k / group_size; ++g, row += 22) {
    std::uint8_t q[group_size];
    nibbles_apart(row + 6, q);
    add_fifth_bits(row + 2, q);
    records[g / 2].scale[g % 2][lane] = read_half(row);
    put<5>(records[g / 2].quants[g % 2], lane, q);
  }
}

void pack_q5_1(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q51Record*>(panel);
  for (std::int64_t g = 0; g < k / group_size; ++g, row += 24) {
    std::uint8_t q[group_size];
    nibbles_apart(row + 8, q);
    add_fifth_bits(row + 4, q);
    records[g / 2].scale[g % 2][lane] = read_half(row);
    records[g / 2].minimum[g % 2][lane] = read_half(row + 2);
    put<5>(records[g / 2].quants[g % 2], lane, q);
  }
}

void pack_q8_0(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q80Record*>(panel);
  for (std::int64_t g = 0; g < k / group_size; ++g, row += 34) {
    records[g / 2].scale[g % 2][lane] = read_half(row);
    put<8>(records[g / 2].quants[g % 2], lane, row + 2);
  }
}

void pack_iq4_nl(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  static constexpr std::int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  auto* records = reinterpret_cast<Q80Record*>(panel);
  for (std::int64_t g = 0; g < k / group_size; ++g, row += 18) {
    std::uint8_t q[group_size];
    nibbles_apart(row + 2, q);
    for (auto& value : q) value = static_cast<std::uint8_t>(levels[value]);
    records[g / 2].scale[g % 2][lane] = read_half(row);
    put<8>(records[g / 2].quants[g % 2], lane, q);
  }
}

// The 6-bit scale and minimum of group g out of the 12 bytes that hold eight of each.
void read_six_bits(const std::uint8_t* p, int g, std::uint8_t& scale, std::uint8_t& minimum) {
  if (g < 4) {
    scale = p[g] & 63;
    minimum = p[g + 4] & 63;
  } else {
    scale = static_cast<std::uint8_t>((p[g + 4] & 15) | p[g - 4] >> 6 << 4);
    minimum = static_cast<std::uint8_t>(p[g + 4] >> 4 | p[g] >> 6 << 4);
  }
}

// Q4_K and Q5_K: two groups share 32 bytes, the first in the low nibbles; bit g of `fifth` belongs to group g.
template <class Record>
void pack_super(const std::uint8_t* block, const std::uint8_t* fifth, const std::uint8_t* quants, Record& record,
                int lane) {
  record.scale[lane] = read_half(block);
  record.minimum[lane] = read_half(block + 2);
  for (int g = 0; g < 8; ++g) {
    read_six_bits(block + 4, g, record.group_scale[g][lane], record.group_minimum[g][lane]);
    std::uint8_t q[group_size];
    for (int i = 0; i < group_size; ++i) {
      q[i] = quants[g / 2 * 32 + i] >> g % 2 * 4 & 15;
      if (fifth) q[i] |= (fifth[i] >> g & 1) << 4;
    }
    fifth ? put<5>(record.quants[g], lane, q) : put<4>(record.quants[g], lane, q);
  }
}

void pack_q4_k(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q4KRecord*>(panel);
  for (std::int64_t b = 0; b < k / super_size; ++b, row += 144) pack_super(row, nullptr, row + 16, records[b], lane);
}

void pack_q5_k(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q5KRecord*>(panel);
  for (std::int64_t b = 0; b < k / super_size; ++b, row += 176) pack_super(row, row + 16, row + 48, records[b], lane);
}

// Four lows and four pairs of high bits interleave over 128 values.
void pack_q6_k(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q6KRecord*>(panel);
  for (std::int64_t b = 0; b < k / super_size; ++b, row += 210) {
    const std::uint8_t *low = row, *high = row + 128, *scales = row + 192;
    Q6KRecord& record = records[b];
    record.scale[lane] = read_half(row + 208);
    for (int half = 0; half < 16; ++half) record.half_scale[half][lane] = static_cast<std::int8_t>(scales[half]);
    for (int g = 0; g < 8; ++g) {
      std::uint8_t q[group_size];
      for (int i = 0; i < group_size; ++i) {
        int nibble = low[g / 4 * 64 + g % 2 * 32 + i] >> g % 4 / 2 * 4 & 15;
        q[i] = static_cast<std::uint8_t>(nibble | (high[g / 4 * 32 + i] >> g % 4 * 2 & 3) << 4);
      }
      put<6>(record.quants[g], lane, q);
    }
  }
}

float read_f32(const std::uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

float read_f16(const std::uint8_t* p) { return half_to_float(read_half(p)); }
float read_bf16(const std::uint8_t* p) { return float_of_bits(static_cast<std::uint32_t>(read_half(p)) << 16); }

template <float (*read)(const std::uint8_t*), int bytes>
void pack_as_bf16(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Bf16Record*>(panel);
  for (std::int64_t i = 0; i < k; ++i) records[i / 2].values[lane][i % 2] = float_to_bf16(read(row + i * bytes));
}

// As Q8_0 is made: scale = largest / 127, rounded to half; values by the scale before rounding.
template <float (*read)(const std::uint8_t*), int bytes>
void pack_as_q8_0(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane) {
  auto* records = reinterpret_cast<Q80Record*>(panel);
  for (std::int64_t first = 0; first < k; first += group_size) {
    float values[group_size] = {}, largest = 0;
    for (int i = 0; i < group_size && first + i < k; ++i) {
      values[i] = read(row + (first + i) * bytes);
      largest = std::max(largest, std::fabs(values[i]));
    }
    float scale = largest / 127, inverse = scale ? 1 / scale : 0;
    std::uint8_t q[group_size];
    for (int i = 0; i < group_size; ++i) {
      float rounded = std::nearbyint(values[i] * inverse);
      q[i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::clamp(rounded, -127.0f, 127.0f)));
    }
    std::int64_t g = first / group_size;
    records[g / 2].scale[g % 2][lane] = float_to_half(scale);
    put<8>(records[g / 2].quants[g % 2], lane, q);
  }
}

using PackRow = void (*)(const std::uint8_t* row, std::int64_t k, std::uint8_t* panel, int lane);

struct SourceInfo {
  Source source;
  int block_values, block_bytes;
  Kind kind;
  PackRow pack;
};

constexpr SourceInfo source_infos[] = {
    {Source::q4_0, 32, 18, Kind::q4_0, pack_q4_0},
    {Source::q4_1, 32, 20, Kind::q4_1, pack_q4_1},
    {Source::q5_0, 32, 22, Kind::q5_0, pack_q5_0},
    {Source::q5_1, 32, 24, Kind::q5_1, pack_q5_1},
    {Source::q8_0, 32, 34, Kind::q8_0, pack_q8_0},
    {Source::iq4_nl, 32, 18, Kind::q8_0, pack_iq4_nl},
    {Source::q4_k, 256, 144, Kind::q4_k, pack_q4_k},
    {Source::q5_k, 256, 176, Kind::q5_k, pack_q5_k},
    {Source::q6_k, 256, 210, Kind::q6_k, pack_q6_k},
    {Source::f32, 1, 4, Kind::bf16, pack_as_bf16<read_f32, 4>},
    {Source::f32, 1, 4, Kind::q8_0, pack_as_q8_0<read_f32, 4>},
    {Source::f16, 1, 2, Kind::bf16, pack_as_bf16<read_f16, 2>},
    {Source::f16, 1, 2, Kind::q8_0, pack_as_q8_0<read_f16, 2>},
    {Source::bf16, 1, 2, Kind::bf16, pack_as_bf16<read_bf16, 2>},
    {Source::bf16, 1, 2, Kind::q8_0, pack_as_q8_0<read_bf16, 2>},
};

const SourceInfo* find_source(int source) {
  for (const SourceInfo& info : source_infos) {
    if (static_cast<int>(info.source) == source) return &info;
  }
  return nullptr;
}

const SourceInfo* find_source(int source, Kind kind) {
  for (const SourceInfo& info : source_infos) {
    if (static_cast<int>(info.source) == source && info.kind == kind) return &info;
  }
  return nullptr;
}

// Values of a lane, in the operations and the order in which gguf computes them.

template <int bits, int offset, class Record>
void unpack_pairs(const std::uint8_t* panel, std::int64_t k, int lane, float* out) {
  const auto* records = reinterpret_cast<const Record*>(panel);
  for (std::int64_t i = 0; i < k; ++i) {
    const Record& record = records[i / 64];
    std::int64_t g = i / group_size % 2;
    int q = get<bits>(record.quants[g], lane, static_cast<int>(i % group_size)) - offset;
    out[i] = half_to_float(record.scale[g][lane]) * static_cast<float>(q);
    if constexpr (requires { record.minimum; }) out[i] += half_to_float(record.minimum[g][lane]);
  }
}

template <int bits, class Record>
void unpack_supers(const std::uint8_t* panel, std::int64_t k, int lane, float* out) {
  const auto* records = reinterpret_cast<const Record*>(panel);
  for (std::int64_t i = 0; i < k; ++i) {
    const Record& record = records[i / super_size];
    std::int64_t g = i % super_size / group_size;
    float scale = half_to_float(record.scale[lane]), minimum = half_to_float(record.minimum[lane]);
    auto q = static_cast<float>(get<bits>(record.quants[g], lane, static_cast<int>(i % group_size)));
    out[i] = scale * record.group_scale[g][lane] * q - minimum * record.group_minimum[g][lane];
  }
}

void unpack_q6_k(const std::uint8_t* panel, std::int64_t k, int lane, float* out) {
  const auto* records = reinterpret_cast<const Q6KRecord*>(panel);
  for (std::int64_t i = 0; i < k; ++i) {
    const Q6KRecord& record = records[i / super_size];
    int q = get<6>(record.quants[i % super_size / group_size], lane, static_cast<int>(i % group_size)) - 32;
    out[i] = half_to_float(record.scale[lane]) * record.half_scale[i % super_size / 16][lane] * static_cast<float>(q);
  }
}

void unpack_bf16(const std::uint8_t* panel, std::int64_t k, int lane, float* out) {
  const auto* records = reinterpret_cast<const Bf16Record*>(panel);
  for (std::int64_t i = 0; i < k; ++i) {
    out[i] = float_of_bits(static_cast<std::uint32_t>(records[i / 2].values[lane][i % 2]) << 16);
  }
}

using UnpackRow = void (*)(const std::uint8_t* panel, std::int64_t k, int lane, float* out);

constexpr UnpackRow unpack_row[num_kinds] = {
    unpack_pairs<4, 8, Q40Record>, unpack_pairs<4, 0, Q41Record>, unpack_supers<4, Q4KRecord>,
    unpack_pairs<5, 16, Q50Record>, unpack_pairs<5, 0, Q51Record>, unpack_supers<5, Q5KRecord>,
    unpack_q6_k, unpack_pairs<8, 0, Q80Record>, unpack_bf16,
};

}  // namespace

const KindInfo& kind_info(Kind kind) { return kind_infos[static_cast<int>(kind)]; }

bool can_pack(int source, Kind kind) { return find_source(source, kind) != nullptr; }

std::int64_t source_bytes(int source, std::int64_t k) {
  const SourceInfo* info = find_source(source);
  if (!info || k % info->block_values) return 0;
  return k / info->block_values * info->block_bytes;
}

void pack_rows(int source, Kind kind, const std::uint8_t* rows, std::int64_t num_rows, std::int64_t k,
               const std::int64_t* order, std::uint8_t* packed, std::int64_t first_row) {
  PackRow pack = find_source(source, kind)->pack;
  std::int64_t row_bytes = source_bytes(source, k), bytes = panel_bytes(kind, k);
  std::int64_t first_panel = first_row / panel_outputs, end = first_row + num_rows;
  parallel_for(num_panels(end) - first_panel, [&](std::int64_t task) {
    std::int64_t panel = first_panel + task;
    std::int64_t start = std::max(first_row, panel * panel_outputs);
    std::int64_t stop = std::min(end, (panel + 1) * panel_outputs);
    for (std::int64_t row = start; row < stop; ++row) {
      std::int64_t source_row = order ? order[row - first_row] : row - first_row;
      pack(rows + source_row * row_bytes, k, packed + panel * bytes, static_cast<int>(row % panel_outputs));
    }
  });
}

void unpack_rows(Kind kind, const std::uint8_t* packed, std::int64_t k, const std::int64_t* ids, std::int64_t num_ids,
                 float* out) {
  std::int64_t bytes = panel_bytes(kind, k);
  auto row = [&](std::int64_t i) {
    const std::uint8_t* panel = packed + ids[i] / panel_outputs * bytes;
    unpack_row[static_cast<int>(kind)](panel, k, static_cast<int>(ids[i] % panel_outputs), out + i * k);
  };
  constexpr std::int64_t few = 8;  // quicker done than handed out
  if (num_ids <= few) {
    for (std::int64_t i = 0; i < num_ids; ++i) row(i);
  } else {
    parallel_for(num_ids, row);
  }
}

}  // namespace forerun
