// Attention over paged keys and values.
//
// A cache is blocks, one after another; a block holds, for each layer, its keys and then its values:
//   keys   [kv_heads][head_dim][block_size]   a token is a column: 16 tokens' scores are 16 lanes of one sum over d
//   values [kv_heads][block_size][head_dim]   a token is a row
//
// Keys are taken in splits of 128 counted from position 0. Within a split a score is one chain over d, the softmax is
// that of the split's largest score, weights are summed in lanes (position modulo 16), values are added in the order of
// positions; splits are joined in order. So a row's bits depend on its query, keys and values only: not on other rows,
// tiles, threads, chunks, blocks or the instruction set. With a window, splits that lie before it are left out, and keys
// before it within a split have no part in any sum.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cpu.h"
#include "ops.h"

namespace forerun {

inline constexpr int split_keys = 128;
inline constexpr int run_keys = 16;
inline constexpr int score_stride = split_keys + run_keys;  // whole vectors are written, past the last key too
inline constexpr int max_runs = split_keys;

// Up to 16 keys of a split whose tokens lie side by side.
struct KeyRun {
  const void* keys;        // [head_dim][key_stride]
  const void* values;      // [count][head_dim]
  std::int64_t key_stride;
  int first;               // place in the split
  int count;
  int width;               // columns that may be read, count at least
};

// Some queries and one split of the keys of their head.
struct AttentionPiece {
  const float* query;      // [num_queries][dim], scaled
  std::int64_t num_queries, dim;
  const KeyRun* runs;
  int num_runs;
  const int* from;         // [num_queries]: the first key of the split that it sees
  const int* to;           // [num_queries]: one past the last, 0 to 128; not above `from` where it sees none
  float softcap;           // scores become softcap * tanh(score / softcap); 0: they stay
  float* scores;           // [num_queries][score_stride], for the kernel's use
  float* out;              // [num_queries][dim]: sum of weight * value
  float* maximum;          // [num_queries]: of the scores; not written where nothing is seen, nor are out and total
  float* total;            // [num_queries]: of the weights, exp(score - maximum)
};

struct AttentionKernels {
  void (*attend[2])(const AttentionPiece& piece);  // [float32, bf16] keys and values
  // Adds a later split to an earlier one.
  void (*join)(float* out, float* maximum, float* total, const float* more, float more_maximum, float more_total,
               std::int64_t dim);
  void (*divide)(const float* out, float total, std::int64_t dim, float* result);
};

}  // namespace forerun

FORERUN_KERNELS(AttentionKernels, attention_kernels)

namespace forerun {

struct CacheShape {
  std::int64_t num_layers, num_kv_heads, head_dim, block_size;
  bool bf16;
};

struct AttentionRule {
  float scale;                        // of query times key
  float softcap;                      // as in AttentionPiece
  std::vector<std::int64_t> windows;  // [num_layers]: tokens that a token sees, itself included; 0: all
};

// Rows of one path, in order. All `_at` are places in the layout's ints.
struct AttentionTile {
  std::int64_t rows_at, num_rows;  // rows of the step
  std::int64_t first_position;     // of the first row; the others follow one by one
  std::int64_t table_at;           // block ids
  std::int64_t path_at, path_start, path_length;  // slots of the tokens from path_start on; length 0: at their places
};

struct AttentionLayout {
  const std::int64_t* slots = nullptr;  // [num_rows]
  std::int64_t num_rows = 0;
  const AttentionTile* tiles = nullptr;
  std::int64_t num_tiles = 0;
  const std::int64_t* ints = nullptr;
};

class Attention {
 public:
  Attention(const CacheShape& shape, std::int64_t num_heads, void* cache, AttentionRule rule)
      : shape_(shape), num_heads_(num_heads), cache_(static_cast<char*>(cache)), rule_(std::move(rule)) {}

  // Writes the rows' keys and values, then attends. All rows are heads side by side.
  void attend(const AttentionLayout& layout, std::int64_t layer, ConstRows query, ConstRows key, ConstRows value,
              MutableRows out) const;

 private:
  struct Work;     // a tile, and one kv head
  struct Partial;  // what some keys come to

  std::int64_t element_bytes() const { return shape_.bf16 ? 2 : 4; }
  char* block(std::int64_t id, std::int64_t layer, int part, std::int64_t kv_head) const;
  void write(const AttentionLayout& layout, std::int64_t layer, ConstRows key, ConstRows value) const;
  void write_head(const AttentionLayout& layout, std::int64_t layer, std::int64_t head, ConstRows key,
                  ConstRows value) const;
  Work work(const AttentionLayout& layout, std::int64_t layer, std::int64_t index) const;
  void load_query(Work& work, ConstRows query) const;
  void load_path(Work& work) const;
  int runs_of(const Work& work, std::int64_t split, KeyRun* runs) const;
  void attend_split(const Work& work, std::int64_t split, float* out, float* maximum, float* total) const;
  void join(const Work& work, const Partial& sum, const Partial& more, std::int64_t split) const;
  void finish(const Work& work, const float* out, const float* total, MutableRows result) const;
  void attend_whole(const Work& work, MutableRows result) const;
  void attend_in_splits(const AttentionLayout& layout, std::int64_t layer, ConstRows query, MutableRows out) const;

  CacheShape shape_;
  std::int64_t num_heads_;
  char* cache_;
  AttentionRule rule_;
};

}  // namespace forerun
