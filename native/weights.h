// The packed form of a weight matrix [N, K]. Panels of 16 outputs (rows of the matrix), one after another; a panel is a
// run of records along K. Within a record the four bytes of four consecutive k of each output stand side by side, output
// after output: one 64-byte load is what 16 vector lanes, one an output, multiply with four values of x.
//
//   quad j of a group of 32:  [16 outputs][4 bytes]      k = 4 j .. 4 j + 3
//   4 bits: byte = value of k | value of k + 16 << 4, four quads a group
//   5 bits: the low four as above, then one quad: bit j of a byte is the fifth bit of quad j
//   6 bits: the low four as above, then two quads: bits 4, 6, 0, 2 of quad v hold the upper two of quads 2 v, 2 v + 1,
//           2 v + 4, 2 v + 5
//   8 bits: eight quads a group
//
// Scales and minimums are those of the file, unrounded, so that a packed weight has exactly the file's values.
#pragma once

#include <cstdint>

#include "activations.h"

namespace forerun {

using Half = std::uint16_t;  // bits of an IEEE half

inline constexpr int panel_outputs = 16;
inline constexpr int quad_bytes = 4 * panel_outputs;

// Bytes of a group of a panel.
inline constexpr int bytes_4 = 4 * quad_bytes, bytes_5 = 5 * quad_bytes, bytes_6 = 6 * quad_bytes, bytes_8 = 8 * quad_bytes;

struct alignas(64) Q40Record {  // value = scale * (q - 8)
  Half scale[2][panel_outputs];
  std::uint8_t quants[2][bytes_4];
};

struct alignas(64) Q41Record {  // value = scale * q + minimum
  Half scale[2][panel_outputs];
  Half minimum[2][panel_outputs];
  std::uint8_t quants[2][bytes_4];
};

struct alignas(64) Q50Record {  // value = scale * (q - 16), q in 0..31
  Half scale[2][panel_outputs];
  std::uint8_t quants[2][bytes_5];
};

struct alignas(64) Q51Record {  // value = scale * q + minimum, q in 0..31
  Half scale[2][panel_outputs];
  Half minimum[2][panel_outputs];
  std::uint8_t quants[2][bytes_5];
};

struct alignas(64) Q80Record {  // value = scale * q, q signed; of IQ4_NL too
  Half scale[2][panel_outputs];
  std::uint8_t quants[2][bytes_8];
};

struct alignas(64) Q4KRecord {  // value = scale * group_scale * q - minimum * group_minimum
  Half scale[panel_outputs];
  Half minimum[panel_outputs];
  std::uint8_t group_scale[8][panel_outputs];
  std::uint8_t group_minimum[8][panel_outputs];
  std::uint8_t quants[8][bytes_4];
};

struct alignas(64) Q5KRecord {  // the same, q in 0..31
  Half scale[panel_outputs];
  Half minimum[panel_outputs];
  std::uint8_t group_scale[8][panel_outputs];
  std::uint8_t group_minimum[8][panel_outputs];
  std::uint8_t quants[8][bytes_5];
};

struct alignas(64) Q6KRecord {  // value = scale * half_scale * (q - 32), a half_scale for 16 values
  Half scale[panel_outputs];
  Half unused[panel_outputs];
  std::int8_t half_scale[16][panel_outputs];
  std::uint8_t quants[8][bytes_6];
};

struct alignas(64) Bf16Record {
  std::uint16_t values[panel_outputs][2];  // k, k + 1
};

enum class Kind { q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, bf16 };

inline constexpr int num_kinds = 9;

struct KindInfo {
  const char* name;
  int record_k;      // values of an output in a record
  int record_bytes;
};

const KindInfo& kind_info(Kind kind);

inline std::int64_t panel_records(Kind kind, std::int64_t k) {
  std::int64_t record_k = kind_info(kind).record_k;
  return (k + record_k - 1) / record_k;
}

inline std::int64_t panel_bytes(Kind kind, std::int64_t k) {
  return panel_records(kind, k) * kind_info(kind).record_bytes;
}

inline std::int64_t num_panels(std::int64_t n) { return (n + panel_outputs - 1) / panel_outputs; }

}  // namespace forerun
