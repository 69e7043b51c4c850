#include "attention.h"

#include "kernels/vector.h"

namespace forerun::FORERUN_ISA {

namespace {

#if defined(FORERUN_ISA_avx2) || defined(FORERUN_ISA_avxvnni)
constexpr int max_queries = 4, max_sums = 4;  // at once; a sum takes two of 16 registers
#elif defined(FORERUN_ISA_portable)
constexpr int max_queries = 1, max_sums = 1;
#else
constexpr int max_queries = 8, max_sums = 16;
#endif

// Vectors side by side that `rows` queries work on at once: sums enough to hide the latency of one.
template <int rows>
inline constexpr int columns = rows * 4 <= max_sums ? 4 : rows * 2 <= max_sums ? 2 : 1;

FORERUN_INLINE Vector splat(const float* p) { return all(*p); }

// Scores of queries first .. first + rows - 1 with the keys of `count` runs of full width.
template <class Element, int rows, int count>
FORERUN_INLINE void score_runs(const AttentionPiece& piece, std::int64_t first, const KeyRun* runs) {
  const float* query = piece.query + first * piece.dim;
  Vector sums[rows][count];
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < count; ++c) sums[r][c] = all(0.0f);
  }
  for (std::int64_t d = 0; d < piece.dim; ++d) {
    Vector key[count];
#pragma GCC unroll 8
    for (int c = 0; c < count; ++c) key[c] = load(static_cast<const Element*>(runs[c].keys) + d * runs[c].key_stride);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      Vector x = splat(query + r * piece.dim + d);
#pragma GCC unroll 8
      for (int c = 0; c < count; ++c) sums[r][c] = fused(key[c], x, sums[r][c]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < count; ++c) store(piece.scores + (first + r) * score_stride + runs[c].first, sums[r][c]);
  }
}

template <class Element>
void score_narrow(const AttentionPiece& piece, std::int64_t query, const KeyRun& run) {
  const auto* keys = static_cast<const Element*>(run.keys);
  Vector sum = all(0.0f);
  for (std::int64_t d = 0; d < piece.dim; ++d) {
    sum = fused(load(keys + d * run.key_stride, run.width), all(piece.query[query * piece.dim + d]), sum);
  }
  store(piece.scores + query * score_stride + run.first, sum, run.width);
}

// Runs in order, so that what a run writes past its last key is overwritten by the next.
template <class Element, int rows>
void score(const AttentionPiece& piece, std::int64_t first) {
  constexpr int together = columns<rows>;
  for (int i = 0; i < piece.num_runs;) {
    int full = 0;
    while (full < together && i + full < piece.num_runs && piece.runs[i + full].width == run_keys) ++full;
    if (full == together) {
      score_runs<Element, rows, together>(piece, first, piece.runs + i);
      i += together;
    } else if (full > 0) {
      score_runs<Element, rows, 1>(piece, first, piece.runs + i);
      ++i;
    } else {
      for (int r = 0; r < rows; ++r) score_narrow<Element>(piece, first + r, piece.runs[i]);
      ++i;
    }
  }
}

// Scores to weights, with their largest and their sum, over the vectors that hold the keys seen.
void softmax(const AttentionPiece& piece, std::int64_t query) {
  float* scores = piece.scores + query * score_stride;
  int from = piece.from[query], to = piece.to[query];
  int start = from / lanes * lanes;
  auto seen = [&](const Vector& a, int i, float rest) {
    Vector result = to - i < lanes ? first(a, to - i, rest) : a;
    return from > i ? last(result, lanes - (from - i), rest) : result;
  };
  Vector best = all(-__builtin_inff());
  for (int i = start; i < to; i += lanes) {
    Vector score = load(scores + i);
    if (piece.softcap > 0) {
      score = multiply(hyperbolic_tangent(divide(score, all(piece.softcap))), all(piece.softcap));
      store(scores + i, score);
    }
    best = larger(best, seen(score, i, -__builtin_inff()));
  }
  float maximum = largest(best);
  Vector total = all(0.0f);
  for (int i = start; i < to; i += lanes) {
    Vector weight = seen(exponential(subtract(load(scores + i), all(maximum))), i, 0.0f);
    store(scores + i, weight);
    total = add(total, weight);
  }
  piece.maximum[query] = maximum;
  piece.total[query] = sum(total);
}

template <bool whole, class Element>
FORERUN_INLINE Vector take(const Element* p, int count) {
  if constexpr (whole) return load(p);
  return load(p, count);
}

// out += weights * values over the keys from .. to - 1, for `rows` queries and columns d .. of `count` vectors; of one
// vector with `width` columns where it is not whole.
template <class Element, int rows, int count, bool whole>
FORERUN_INLINE void add_columns(const AttentionPiece& piece, std::int64_t first, int from, int to, std::int64_t d,
                                int width) {
  float* out = piece.out + first * piece.dim + d;
  const float* weights = piece.scores + first * score_stride;
  Vector sums[rows][count];
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < count; ++c) sums[r][c] = take<whole>(out + r * piece.dim + c * lanes, width);
  }
  for (int i = 0; i < piece.num_runs && piece.runs[i].first < to; ++i) {
    const KeyRun& run = piece.runs[i];
    int start = from > run.first ? from - run.first : 0;
    int end = to - run.first < run.count ? to - run.first : run.count;
    const auto* values = static_cast<const Element*>(run.values) + d;
    for (int key = start; key < end; ++key) {
      Vector value[count];
#pragma GCC unroll 8
      for (int c = 0; c < count; ++c) value[c] = take<whole>(values + key * piece.dim + c * lanes, width);
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        Vector weight = splat(weights + r * score_stride + run.first + key);
#pragma GCC unroll 8
        for (int c = 0; c < count; ++c) sums[r][c] = fused(value[c], weight, sums[r][c]);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < count; ++c) {
      float* p = out + r * piece.dim + c * lanes;
      if constexpr (whole) {
        store(p, sums[r][c]);
      } else {
        store(p, sums[r][c], width);
      }
    }
  }
}

template <class Element, int rows>
void add_values(const AttentionPiece& piece, std::int64_t first, int from, int to) {
  constexpr int together = columns<rows>;
  std::int64_t d = 0;
  for (; d + together * lanes <= piece.dim; d += together * lanes) {
    add_columns<Element, rows, together, true>(piece, first, from, to, d, lanes);
  }
  for (; d + lanes <= piece.dim; d += lanes) add_columns<Element, rows, 1, true>(piece, first, from, to, d, lanes);
  if (d < piece.dim) {
    add_columns<Element, rows, 1, false>(piece, first, from, to, d, static_cast<int>(piece.dim - d));
  }
}

// Queries side by side go together over the keys that all of them see; what else each sees is added by itself, keys in
// order all the same: what a query does not see must not touch it, not even times zero.
template <class Element, int rows>
void attend_queries(const AttentionPiece& piece, std::int64_t first) {
  int from = 0, to = split_keys;
  for (std::int64_t query = first; query < first + rows; ++query) {
    from = piece.from[query] > from ? piece.from[query] : from;
    to = piece.to[query] < to ? piece.to[query] : to;
  }
  if (from >= to) from = to = 0;  // no key in common: each by itself
  score<Element, rows>(piece, first);
  for (std::int64_t query = first; query < first + rows; ++query) {
    if (piece.from[query] >= piece.to[query]) continue;
    softmax(piece, query);
    for (std::int64_t d = 0; d < piece.dim; ++d) piece.out[query * piece.dim + d] = 0;
    if (piece.from[query] < from) add_values<Element, 1>(piece, query, piece.from[query], from);
  }
  if (from < to) add_values<Element, rows>(piece, first, from, to);
  for (std::int64_t query = first; query < first + rows; ++query) {
    int start = piece.from[query] > to ? piece.from[query] : to;
    if (start < piece.to[query]) add_values<Element, 1>(piece, query, start, piece.to[query]);
  }
}

template <class Element, int rows>
FORERUN_INLINE void attend_rest(const AttentionPiece& piece, std::int64_t first) {
  if constexpr (rows > 0) {
    if (piece.num_queries - first == rows) return attend_queries<Element, rows>(piece, first);
    attend_rest<Element, rows - 1>(piece, first);
  }
}

template <class Element>
void attend(const AttentionPiece& piece) {
  std::int64_t first = 0;
  for (; first + max_queries <= piece.num_queries; first += max_queries) {
    attend_queries<Element, max_queries>(piece, first);
  }
  attend_rest<Element, max_queries - 1>(piece, first);
}

void join(float* out, float* maximum, float* total, const float* more, float more_maximum, float more_total,
          std::int64_t dim) {
  float highest = *maximum > more_maximum ? *maximum : more_maximum;
  float both[lanes] = {*maximum - highest, more_maximum - highest};
  store(both, exponential(load(both)));
  Vector kept = all(both[0]), added = all(both[1]);
  *total = *total * both[0] + more_total * both[1];
  *maximum = highest;
  std::int64_t d = 0;
  for (; d + lanes <= dim; d += lanes) store(out + d, fused(load(more + d), added, multiply(load(out + d), kept)));
  if (d < dim) {
    int count = static_cast<int>(dim - d);
    store(out + d, fused(load(more + d, count), added, multiply(load(out + d, count), kept)), count);
  }
}

void divide_row(const float* out, float total, std::int64_t dim, float* result) {
  std::int64_t d = 0;
  for (; d + lanes <= dim; d += lanes) store(result + d, divide(load(out + d), all(total)));
  if (d < dim) {
    int count = static_cast<int>(dim - d);
    store(result + d, divide(load(out + d, count), all(total)), count);
  }
}

}  // namespace

extern const AttentionKernels attention_kernels = {{attend<float>, attend<Bf16>}, join, divide_row};

}  // namespace forerun::FORERUN_ISA
