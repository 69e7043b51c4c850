// What stands between the products of a decoder layer, row by row. A row's bits depend on that row only.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "linear.h"

namespace forerun {

struct RowKernels {
  // out [n] = x scaled to unit root mean square, times weight; out may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t n, float* out);
  // out [n] = activation(gate) * up, by Activation; out may be gate.
  void (*gated[2])(const float* gate, const float* up, std::int64_t n, float* out);
  // Rotates the halves of x [2 * half]; in the operations of the plain twin, so with its bits.
  void (*rope)(float* x, const float* cos, const float* sin, std::int64_t half);
  // to [n] += scale * x
  void (*add)(const float* x, float scale, std::int64_t n, float* to);
  void (*exponential)(const float* x, std::int64_t n, float* out);  // for tests
};

}  // namespace forerun

FORERUN_KERNELS(RowKernels, row_kernels)

namespace forerun {

enum Activation { silu, gelu_tanh };

struct Norm {
  const float* weight;  // null: no norm
  float eps;
};

// How rows join others: to += scale * norm(rows).
struct Merge {
  Norm norm;
  float scale;
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

// y [rows, N] = (x [rows, k] normed where there is a norm) W + bias
void norm_linear(ConstRows x, std::int64_t rows, Norm norm, const Linear& linear, MutableRows y);

// x [rows, k] W + bias, merged into to [rows, N].
void linear_add(ConstRows x, std::int64_t rows, const Linear& linear, Merge merge, MutableRows to);

struct Mlp {
  Norm norm;
  const Linear& gate_up;
  Activation activation;
  const Linear& down;
};

// down(activation(gate) * up) with gate, up = the halves of gate_up(x normed), merged into to. x, to [rows, H] may be
// the same rows.
void mlp(ConstRows x, std::int64_t rows, const Mlp& mlp, Merge merge, MutableRows to);

struct Rope {
  ConstRows cos, sin;  // [rows, half]
  std::int64_t half;   // of the first 2 * half values of a head, which are rotated
  std::int64_t num_heads, num_kv_heads, head_dim;
  const float *q_norm, *k_norm;  // [head_dim], or null
  bool whole_norm;               // of all heads of a row together: q_norm [num_heads * head_dim], k_norm likewise
  float eps;
};

// In place on the q and k heads of qkv [rows, (num_heads + 2 num_kv_heads) * head_dim]: norm where given, then rotate.
void rope_rows(MutableRows qkv, std::int64_t rows, const Rope& rope);

}  // namespace forerun
