#include "kernels/vector.h"
#include "ops.h"

namespace forerun::FORERUN_ISA {

namespace {

// body(i, count) for n values: sixteen at once, then the rest.
template <class Body>
FORERUN_INLINE void for_each_vector(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, lanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

FORERUN_INLINE Vector take(const float* p, int count) { return count == lanes ? load(p) : load(p, count); }

FORERUN_INLINE void put(float* p, const Vector& a, int count) {
  if (count == lanes) {
    store(p, a);
  } else {
    store(p, a, count);
  }
}

void rms_norm(const float* x, const float* weight, float eps, std::int64_t n, float* out) {
  Vector squares[2] = {all(0.0f), all(0.0f)};
  for_each_vector(n, [&](std::int64_t i, int count) {
    Vector value = take(x + i, count);
    Vector& to = squares[i / lanes % 2];
    to = fused(value, value, to);
  });
  float mean = sum(add(squares[0], squares[1])) / static_cast<float>(n);
  Vector scale = all(1.0f / __builtin_sqrtf(mean + eps));
  for_each_vector(n, [&](std::int64_t i, int count) {
    put(out + i, multiply(multiply(take(x + i, count), scale), take(weight + i, count)), count);
  });
}

// What the sigmoid of a gate is taken of.
FORERUN_INLINE Vector silu_slope(const Vector& gate) { return gate; }

// GELU by tanh: gate (1 + tanh(z / 2)) / 2 = gate * sigmoid(z), z = sqrt(8 / pi) (gate + 0.044715 gate^3).
FORERUN_INLINE Vector gelu_slope(const Vector& gate) {
  Vector factor = fused(multiply(gate, gate), all(0.044715f), all(1.0f));
  return multiply(multiply(gate, all(1.5957691216f)), factor);
}

template <Vector (*slope)(const Vector&)>
void gated(const float* gate, const float* up, std::int64_t n, float* out) {
  for_each_vector(n, [&](std::int64_t i, int count) {
    Vector g = take(gate + i, count);
    Vector active = divide(g, add(all(1.0f), exponential(subtract(all(0.0f), slope(g)))));
    put(out + i, multiply(active, take(up + i, count)), count);
  });
}

void rope(float* x, const float* cos, const float* sin, std::int64_t half) {
  for_each_vector(half, [&](std::int64_t i, int count) {
    Vector first = take(x + i, count), second = take(x + half + i, count);
    Vector c = take(cos + i, count), s = take(sin + i, count);
    put(x + i, subtract(multiply(first, c), multiply(second, s)), count);
    put(x + half + i, add(multiply(second, c), multiply(first, s)), count);
  });
}

void add_row(const float* x, float scale, std::int64_t n, float* to) {
  for_each_vector(n, [&](std::int64_t i, int count) {
    put(to + i, add(take(to + i, count), multiply(take(x + i, count), all(scale))), count);
  });
}

void exponential_row(const float* x, std::int64_t n, float* out) {
  for_each_vector(n, [&](std::int64_t i, int count) { put(out + i, exponential(take(x + i, count)), count); });
}

}  // namespace

extern const RowKernels row_kernels = {rms_norm, {gated<silu_slope>, gated<gelu_slope>}, rope, add_row, exponential_row};

}  // namespace forerun::FORERUN_ISA
