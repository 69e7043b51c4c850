#include "ops.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "threads.h"

namespace forerun {

namespace {

constexpr std::int64_t serial_values = 1 << 14;  // quicker done than handed out
constexpr std::int64_t rows_at_once = 512;       // bounds the memory of what is made of a product's rows
constexpr std::int64_t mlp_rows_at_once = 128;   // what lies between its products stays in the cache

// body(row) for all rows; on this thread alone where that is little work.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t row_values, const Body& body) {
  if (rows * row_values <= serial_values) {
    for (std::int64_t row = 0; row < rows; ++row) body(row);
  } else {
    parallel_for(rows, body);
  }
}

// body(first, count) for all rows, some at once.
template <class Body>
void in_chunks(std::int64_t rows, std::int64_t at_once, const Body& body) {
  for (std::int64_t first = 0; first < rows; first += at_once) body(first, std::min(at_once, rows - first));
}

struct Needs {
  bool tiles = false, floats = false;
};

Needs needs_of(const Linear& linear) {
  Needs needs;
  for (int s = 0; s < linear.num_segments; ++s) {
    (linear.segments[s].kind == Kind::bf16 ? needs.floats : needs.tiles) = true;
  }
  return needs;
}

struct Buffers {
  Scratch<float> row, floats, middle, product;
};

Buffers& buffers() {  // of the calling thread
  thread_local Buffers instance;
  return instance;
}

std::int64_t num_outputs(const Linear& linear) {
  std::int64_t n = 0;
  for (int s = 0; s < linear.num_segments; ++s) n += linear.segments[s].n;
  return n;
}

// y = make(row, out [k]) W + bias. The made rows are quantised at once; they are kept where a segment wants floats.
template <class Make>
void made_linear(const Make& make, std::int64_t rows, const Linear& linear, MutableRows y) {
  Needs needs = needs_of(linear);
  std::int64_t k = linear.k, groups = num_groups(k);
  float* floats = needs.floats ? buffers().floats.get(rows * k) : nullptr;
  std::int64_t tile_height = tile_rows / linear.terms, count = num_tiles(rows * linear.terms);
  ActivationGroup* tiles = needs.tiles ? activation_buffer(rows * linear.terms, k) : nullptr;
  auto quantize = activation_kernels().quantize;
  auto make_tile = [&](std::int64_t tile) {  // its rows share their groups' cache lines
    std::int64_t first = tile * tile_height, end = std::min(rows, first + tile_height);
    for (std::int64_t row = first; row < end; ++row) {
      float* made = needs.floats ? floats + row * k : buffers().row.get(k);
      make(row, made);
      int lane = static_cast<int>((row - first) * linear.terms);
      if (needs.tiles) quantize(made, k, linear.terms, tiles + tile * groups, lane);
    }
  };
  for_rows(count, tile_height * k, make_tile);
  run_linear(linear, floats, k, tiles, rows, y.data, y.stride);
}

// A row normed, or copied where there is no norm.
void make_normed(const float* x, Norm norm, std::int64_t n, float* out) {
  if (norm.weight) {
    row_kernels().rms_norm(x, norm.weight, norm.eps, n, out);
  } else {
    std::memcpy(out, x, static_cast<std::size_t>(n) * sizeof(float));
  }
}

// The rows made are normed in their place.
void merge_rows(MutableRows made, std::int64_t rows, std::int64_t n, Merge merge, MutableRows to) {
  const RowKernels& kernels = row_kernels();
  for_rows(rows, n, [&](std::int64_t row) {
    float* x = made.row(row);
    if (merge.norm.weight) kernels.rms_norm(x, merge.norm.weight, merge.norm.eps, n, x);
    kernels.add(x, merge.scale, n, to.row(row));
  });
}

}  // namespace

void norm_rows(ConstRows x, std::int64_t rows, std::int64_t n, Norm norm, MutableRows out) {
  auto rms_norm = row_kernels().rms_norm;
  for_rows(rows, n, [&](std::int64_t row) { rms_norm(x.row(row), norm.weight, norm.eps, n, out.row(row)); });
}

void norm_linear(ConstRows x, std::int64_t rows, Norm norm, const Linear& linear, MutableRows y) {
  in_chunks(rows, rows_at_once, [&](std::int64_t first, std::int64_t count) {
    auto make = [&](std::int64_t row, float* out) { make_normed(x.row(first + row), norm, linear.k, out); };
    made_linear(make, count, linear, {y.row(first), y.stride});
  });
}

void linear_add(ConstRows x, std::int64_t rows, const Linear& linear, Merge merge, MutableRows to) {
  std::int64_t n = num_outputs(linear);
  bool needs_tiles = needs_of(linear).tiles;
  in_chunks(rows, rows_at_once, [&](std::int64_t first, std::int64_t count) {
    MutableRows product{buffers().product.get(count * n), n};
    ActivationGroup* tiles = needs_tiles ? activation_buffer(count * linear.terms, linear.k) : nullptr;
    if (needs_tiles) quantize_rows(x.row(first), x.stride, count, linear.k, linear.terms, tiles);
    run_linear(linear, x.row(first), x.stride, tiles, count, product.data, product.stride);
    merge_rows(product, count, n, merge, {to.row(first), to.stride});
  });
}

void mlp(ConstRows x, std::int64_t rows, const Mlp& mlp, Merge merge, MutableRows to) {
  auto gated = row_kernels().gated[mlp.activation];
  std::int64_t middle = mlp.down.k, hidden = num_outputs(mlp.down);
  in_chunks(rows, mlp_rows_at_once, [&](std::int64_t first, std::int64_t count) {
    MutableRows both{buffers().middle.get(count * 2 * middle), 2 * middle};
    norm_linear({x.row(first), x.stride}, count, mlp.norm, mlp.gate_up, both);
    MutableRows product{buffers().product.get(count * hidden), hidden};
    auto make = [&](std::int64_t row, float* out) { gated(both.row(row), both.row(row) + middle, middle, out); };
    made_linear(make, count, mlp.down, product);
    merge_rows(product, count, hidden, merge, {to.row(first), to.stride});
  });
}

void rope_rows(MutableRows qkv, std::int64_t rows, const Rope& rope) {
  const RowKernels& kernels = row_kernels();
  std::int64_t dim = rope.head_dim;
  auto turn = [&](std::int64_t row, float* x, std::int64_t num_heads, const float* weight) {
    std::int64_t size = num_heads * dim, normed = rope.whole_norm ? size : dim;
    for (std::int64_t i = 0; weight && i < size; i += normed) kernels.rms_norm(x + i, weight, rope.eps, normed, x + i);
    for (std::int64_t i = 0; i < size; i += dim) kernels.rope(x + i, rope.cos.row(row), rope.sin.row(row), rope.half);
  };
  for_rows(rows, (rope.num_heads + rope.num_kv_heads) * dim, [&](std::int64_t row) {
    turn(row, qkv.row(row), rope.num_heads, rope.q_norm);
    turn(row, qkv.row(row) + rope.num_heads * dim, rope.num_kv_heads, rope.k_norm);
  });
}

}  // namespace forerun
