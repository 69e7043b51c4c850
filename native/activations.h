// Rows of float32 as int8 with a scale for each group of 32 along K, as the quantised products read them.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace forerun {

inline constexpr int group_size = 32;
inline constexpr int tile_rows = 4;

// One group of four rows. value ~ values * scale. Four rows share it so that a product finds all it needs in one
// stream; rows that are not there are neither written nor read.
struct alignas(64) ActivationGroup {
  std::int8_t values[tile_rows][group_size];  // -127..127
  float scale[tile_rows];
  float scaled_sum[tile_rows];                // scale * (sum of the values): meets the minimum of a weight group
  std::int32_t minus_sum[tile_rows];          // - (sum of the values): undoes the offset of unsigned weights
  std::int16_t minus_half_sum[2][tile_rows];  // the same of the first and of the last 16 values
};
static_assert(sizeof(ActivationGroup) == 192);

// Groups of a row, an even number: weights come in records of two groups or more.
inline std::int64_t num_groups(std::int64_t k) { return (k + 2 * group_size - 1) / (2 * group_size) * 2; }

// Row t of [T, K] is lane t % tile_rows of tile t / tile_rows; a tile is num_groups(k) groups. Where a row has two terms
// they count as two rows, one after the other.
inline std::int64_t num_tiles(std::int64_t rows) { return (rows + tile_rows - 1) / tile_rows; }

struct ActivationKernels {
  // Quantises one row x [k] into `lane` of a tile; groups past k become zero. Where a group holds a number that is not
  // finite its scale is not finite, so that the row's results are not. With two terms the rest, x less what was written,
  // goes into the next lane in the same way: the sum of both is x to about 15 bits.
  void (*quantize)(const float* x, std::int64_t k, int terms, ActivationGroup* tile, int lane);
};

}  // namespace forerun

FORERUN_KERNELS(ActivationKernels, activation_kernels)
