// Products with packed weights. An output's value is one chain of float32 fused multiply-adds over its groups, in the
// order of K, of exact integer sums: it depends on its row of x and its row of W only, not on other rows, tiles,
// threads or the instruction set.
#pragma once

#include <cstdint>

#include "activations.h"
#include "cpu.h"
#include "weights.h"

namespace forerun {

inline constexpr int max_rows = 8;  // that a kernel takes at once

// One panel times 1 to max_rows rows.
struct PanelCall {
  const void* panel;
  std::int64_t records;
  const ActivationGroup* tiles[max_rows / tile_rows];  // quantised kinds: the rows' tiles, row 0 in lane 0
  const float* x;                                      // bf16: [rows, k]
  std::int64_t x_stride;
  std::int64_t k;
  float (*out)[panel_outputs];  // [rows]
};

using PanelKernel = void (*)(const PanelCall& call);

struct LinearKernels {
  PanelKernel panel[num_kinds][max_rows];  // [kind][rows - 1]
};

}  // namespace forerun

FORERUN_KERNELS(LinearKernels, linear_kernels)

namespace forerun {

// Part of the outputs of a product, all of one kind.
struct Segment {
  Kind kind;
  const std::uint8_t* panels;
  std::int64_t n;
  const float* bias;  // [n], or null
};

// y [rows, sum of n] = x [rows, k] times the segments' weights, side by side.
struct Linear {
  std::int64_t k = 0;
  int terms = 1;  // of each quantised row, 1 or 2: what they give is added up
  int num_segments = 0;
  const Segment* segments = nullptr;
};

// Memory for the tiles of so many rows, terms counted, of the calling thread; valid until its next call of this.
ActivationGroup* activation_buffer(std::int64_t rows, std::int64_t k);

// x [rows, k], rows x_stride floats apart, into tiles, with `terms` each.
void quantize_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t k, int terms,
                   ActivationGroup* tiles);

// tiles: the rows quantised, for segments of quantised kinds. x: the rows, for bf16 segments. Either may be null where
// no segment needs it. y: rows y_stride floats apart.
void run_linear(const Linear& linear, const float* x, std::int64_t x_stride, const ActivationGroup* tiles,
                std::int64_t rows, float* y, std::int64_t y_stride);

}  // namespace forerun
