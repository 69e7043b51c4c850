// From the rows of a checkpoint to packed weights, and back to float32. At load only, and for embedding look-ups.
#pragma once

#include <cstdint>

#include "weights.h"

namespace forerun {

// The number that GGUF files give a type.
enum class Source {
  f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14,
  iq4_nl = 20, bf16 = 30,
};

// Whether rows of `source` can become `kind`; floating sources become q8_0 (rounded) or bf16, others only their own kind.
bool can_pack(int source, Kind kind);

// Bytes of `k` values of a source; 0 if k is not a whole number of its blocks.
std::int64_t source_bytes(int source, std::int64_t k);

// Writes rows into outputs first_row .. of `packed` (panel_bytes a panel, zeros at first). Row i of these is row
// order[i] of `rows`, or row i without an order. Two calls may run at once only if they share no panel.
void pack_rows(int source, Kind kind, const std::uint8_t* rows, std::int64_t num_rows, std::int64_t k,
               const std::int64_t* order, std::uint8_t* packed, std::int64_t first_row);

// out [num_ids, k]: the values of the outputs `ids`.
void unpack_rows(Kind kind, const std::uint8_t* packed, std::int64_t k, const std::int64_t* ids, std::int64_t num_ids,
                 float* out);

}  // namespace forerun
