// What stands between the products of a decoder layer, row by row. A row's bits depend on that row only.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "linear.h"

namespace forerun {

struct RowKernels {
  // out [n] = x scaled to unit root mean square, times weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t n, float* out);
  // out [n] = silu(gate) * up; out may be gate.
  void (*silu_mul)(const float* gate, const float* up, std::int64_t n, float* out);
  // Rotates the halves of x [2 * half]; in the operations of the plain twin, so with its bits.
  void (*rope)(float* x, const float* cos, const float* sin, std::int64_t half);
  // to [n] += x
  void (*add)(const float* x, std::int64_t n, float* to);
  void (*exponential)(const float* x, std::int64_t n, float* out);  // for tests
};

}  // namespace forerun

FORERUN_KERNELS(RowKernels, row_kernels)

namespace forerun {

struct Norm {
  const float* weight;
  float eps;
};

// Rows of floats in memory, `stride` floats apart.
struct ConstRows {
  const float* data;
  std::int64_t stride;
  const float* row(std::int64_t i) const { return data + i * stride; }
};

struct MutableRows {
  float* data;
  std::int64_t stride;
  float* row(std::int64_t i) const { return data + i * stride; }
  operator ConstRows() const { return {data, stride}; }
};

// out [rows, n] = x normed.
void norm_rows(ConstRows x, std::int64_t rows, std::int64_t n, Norm norm, MutableRows out);

// y [rows, N] = (x [rows, k] normed) W + bias
void norm_linear(ConstRows x, std::int64_t rows, Norm norm, const Linear& linear, MutableRows y);

// to [rows, N] += x [rows, k] W + bias
void linear_add(ConstRows x, std::int64_t rows, const Linear& linear, MutableRows to);

// x [rows, H] += down(silu(gate) * up) with gate, up = the halves of gate_up(x normed)
void mlp(MutableRows x, std::int64_t rows, Norm norm, const Linear& gate_up, const Linear& down);

struct Rope {
  ConstRows cos, sin;  // [rows, head_dim / 2]
  std::int64_t num_heads, num_kv_heads, head_dim;
  const float *q_norm, *k_norm;  // [head_dim], or null
  float eps;
};

// In place on the q and k heads of qkv [rows, (num_heads + 2 num_kv_heads) * head_dim]: norm where given, then rotate.
void rope_rows(MutableRows qkv, std::int64_t rows, const Rope& rope);

}  // namespace forerun
