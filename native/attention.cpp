#include "attention.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "threads.h"

namespace forerun {

namespace {

constexpr int tasks_per_thread = 4;
constexpr std::int64_t serial_products = 1 << 17;  // quicker done than handed out

std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void convert(float value, float& to) { to = value; }
void convert(float value, std::uint16_t& to) { to = to_bf16(value); }

// A token's key as a column, its value as a row.
template <class Element>
void put(const float* key, const float* value, std::int64_t dim, std::int64_t stride, void* keys, void* values) {
  auto* column = static_cast<Element*>(keys);
  auto* row = static_cast<Element*>(values);
  for (std::int64_t d = 0; d < dim; ++d) convert(key[d], column[d * stride]);
  for (std::int64_t d = 0; d < dim; ++d) convert(value[d], row[d]);
}

template <class Element>
void copy_token(const void* keys, std::int64_t key_stride, const void* value, std::int64_t dim, void* to_keys,
                void* to_value) {
  const auto* column = static_cast<const Element*>(keys);
  auto* to = static_cast<Element*>(to_keys);
  for (std::int64_t d = 0; d < dim; ++d) to[d * run_keys] = column[d * key_stride];
  std::memcpy(to_value, value, static_cast<std::size_t>(dim) * sizeof(Element));
}

struct Buffers {
  Scratch<float> query, scores, sums, splits;
  Scratch<char> own_keys, own_values;
  Scratch<int> from, to;
};

Buffers& buffers() {  // of the calling thread
  thread_local Buffers instance;
  return instance;
}

}  // namespace

// A tile and one kv head, `index` = tile * kv_heads + head; its memory is the calling thread's, for one Work at a time.
struct Attention::Work {
  const AttentionTile& tile;
  std::int64_t layer, head;
  std::int64_t group, num_queries, num_keys, num_own;
  std::int64_t window;  // of the layer, as large as any position where it has none
  const std::int64_t *rows, *table, *path;
  const float* query = nullptr;      // [num_rows * group][dim], scaled
  const char* own_keys = nullptr;    // [num_own / 16][dim][16]: the path's own tokens
  const char* own_values = nullptr;  // [num_own][dim]

  // Where `row` x [heads][dim] has query i.
  std::int64_t place(std::int64_t i, std::int64_t dim) const { return (head * group + i % group) * dim; }
  std::int64_t row(std::int64_t i) const { return rows[i / group]; }

  // Query i sees the keys from .. to - 1.
  std::int64_t to(std::int64_t i) const { return tile.first_position + i / group + 1; }
  std::int64_t from(std::int64_t i) const { return std::max<std::int64_t>(0, to(i) - window); }
  // All queries together see keys of the splits first .. end - 1.
  std::int64_t first_split() const { return from(0) / split_keys; }
  std::int64_t end_split() const { return (num_keys + split_keys - 1) / split_keys; }
};

char* Attention::block(std::int64_t id, std::int64_t layer, int part, std::int64_t kv_head) const {
  std::int64_t matrix = ((id * shape_.num_layers + layer) * 2 + part) * shape_.num_kv_heads + kv_head;
  return cache_ + matrix * shape_.head_dim * shape_.block_size * element_bytes();
}

void Attention::write_head(const AttentionLayout& layout, std::int64_t layer, std::int64_t head, ConstRows key,
                           ConstRows value) const {
  std::int64_t dim = shape_.head_dim, size = shape_.block_size;
  auto put_token = shape_.bf16 ? put<std::uint16_t> : put<float>;
  for (std::int64_t row = 0; row < layout.num_rows; ++row) {
    std::int64_t id = layout.slots[row] / size, place = layout.slots[row] % size;
    put_token(key.row(row) + head * dim, value.row(row) + head * dim, dim, size,
              block(id, layer, 0, head) + place * element_bytes(),
              block(id, layer, 1, head) + place * dim * element_bytes());
  }
}

void Attention::write(const AttentionLayout& layout, std::int64_t layer, ConstRows key, ConstRows value) const {
  auto write_one = [&](std::int64_t head) { write_head(layout, layer, head, key, value); };
  if (layout.num_rows * shape_.num_kv_heads * shape_.head_dim < serial_products / 16) {
    for (std::int64_t head = 0; head < shape_.num_kv_heads; ++head) write_one(head);
  } else {
    parallel_for(shape_.num_kv_heads, write_one);
  }
}

Attention::Work Attention::work(const AttentionLayout& layout, std::int64_t layer, std::int64_t index) const {
  const AttentionTile& tile = layout.tiles[index / shape_.num_kv_heads];
  std::int64_t group = num_heads_ / shape_.num_kv_heads, num_keys = tile.first_position + tile.num_rows;
  std::int64_t window = rule_.windows[static_cast<std::size_t>(layer)];
  return {tile, layer, index % shape_.num_kv_heads, group, tile.num_rows * group, num_keys,
          tile.path_length ? std::min(tile.path_length, num_keys - tile.path_start) : 0,
          window ? window : num_keys, layout.ints + tile.rows_at, layout.ints + tile.table_at, layout.ints + tile.path_at};
}

void Attention::load_query(Work& work, ConstRows query) const {
  std::int64_t dim = shape_.head_dim;
  float* scaled = buffers().query.get(work.num_queries * dim);
  for (std::int64_t i = 0; i < work.num_queries; ++i) {
    const float* from = query.row(work.row(i)) + work.place(i, dim);
    for (std::int64_t d = 0; d < dim; ++d) scaled[i * dim + d] = from[d] * rule_.scale;
  }
  work.query = scaled;
}

void Attention::load_path(Work& work) const {
  if (work.num_own == 0) return;
  std::int64_t dim = shape_.head_dim, bytes = element_bytes();
  std::int64_t columns = (work.num_own + run_keys - 1) / run_keys * run_keys;
  char* keys = buffers().own_keys.get(columns * dim * bytes);
  char* values = buffers().own_values.get(work.num_own * dim * bytes);
  std::memset(keys, 0, static_cast<std::size_t>(columns * dim * bytes));
  auto copy = shape_.bf16 ? copy_token<std::uint16_t> : copy_token<float>;
  for (std::int64_t i = 0; i < work.num_own; ++i) {
    std::int64_t id = work.path[i] / shape_.block_size, place = work.path[i] % shape_.block_size;
    copy(block(id, work.layer, 0, work.head) + place * bytes, shape_.block_size,
         block(id, work.layer, 1, work.head) + place * dim * bytes, dim,
         keys + (i / run_keys * dim * run_keys + i % run_keys) * bytes, values + i * dim * bytes);
  }
  work.own_keys = keys;
  work.own_values = values;
}

int Attention::runs_of(const Work& work, std::int64_t split, KeyRun* runs) const {
  std::int64_t start = split * split_keys, end = std::min(start + split_keys, work.num_keys);
  std::int64_t own_start = work.num_own ? work.tile.path_start : end;
  std::int64_t dim = shape_.head_dim, bytes = element_bytes();
  int count = 0;
  for (std::int64_t position = start; position < end;) {
    bool own = position >= own_start;
    std::int64_t place = own ? position - own_start : position;
    std::int64_t size = own ? run_keys : shape_.block_size, limit = own ? end : std::min(end, own_start);
    std::int64_t column = place % size, width = std::min<std::int64_t>(run_keys, size - column);
    KeyRun& run = runs[count++];
    if (own) {
      run.keys = work.own_keys + (place / size * dim * size + column) * bytes;
      run.values = work.own_values + place * dim * bytes;
    } else {
      run.keys = block(work.table[place / size], work.layer, 0, work.head) + column * bytes;
      run.values = block(work.table[place / size], work.layer, 1, work.head) + column * dim * bytes;
    }
    run.key_stride = size;
    run.first = static_cast<int>(position - start);
    run.count = static_cast<int>(std::min(width, limit - position));
    run.width = static_cast<int>(width);
    position += run.count;
  }
  return count;
}

void Attention::attend_split(const Work& work, std::int64_t split, float* out, float* maximum, float* total) const {
  KeyRun runs[max_runs];
  int *from = buffers().from.get(work.num_queries), *to = buffers().to.get(work.num_queries);
  auto place = [&](std::int64_t position) {
    return static_cast<int>(std::clamp<std::int64_t>(position - split * split_keys, 0, split_keys));
  };
  for (std::int64_t i = 0; i < work.num_queries; ++i) {
    from[i] = place(work.from(i));
    to[i] = place(work.to(i));
  }
  AttentionPiece piece{work.query, work.num_queries, shape_.head_dim, runs, runs_of(work, split, runs), from, to,
                       rule_.softcap, buffers().scores.get(work.num_queries * score_stride), out, maximum, total};
  attention_kernels().attend[shape_.bf16](piece);
}

void Attention::finish(const Work& work, const float* out, const float* total, MutableRows result) const {
  std::int64_t dim = shape_.head_dim;
  for (std::int64_t i = 0; i < work.num_queries; ++i) {
    attention_kernels().divide(out + i * dim, total[i], dim, result.row(work.row(i)) + work.place(i, dim));
  }
}

// What a split's queries come to: out [queries][dim], then the largest score and the sum of weights of each.
struct Attention::Partial {
  float *out, *maximum, *total;

  static std::int64_t size(std::int64_t queries, std::int64_t dim) { return queries * (dim + 2); }

  Partial(float* memory, std::int64_t queries, std::int64_t dim)
      : out(memory), maximum(memory + queries * dim), total(maximum + queries) {}
};

// `more`, which is of `split`, into `sum`, for the queries that see keys of it: a query's first split is its sum so far.
void Attention::join(const Work& work, const Partial& sum, const Partial& more, std::int64_t split) const {
  auto join_query = attention_kernels().join;
  std::int64_t dim = shape_.head_dim;
  for (std::int64_t i = 0; i < work.num_queries; ++i) {
    std::int64_t first = work.from(i) / split_keys, last = (work.to(i) - 1) / split_keys;
    if (split < first || split > last) continue;
    if (split == first) {
      std::memcpy(sum.out + i * dim, more.out + i * dim, static_cast<std::size_t>(dim) * sizeof(float));
      sum.maximum[i] = more.maximum[i];
      sum.total[i] = more.total[i];
    } else {
      join_query(sum.out + i * dim, sum.maximum + i, sum.total + i, more.out + i * dim, more.maximum[i], more.total[i],
                 dim);
    }
  }
}

void Attention::attend_whole(const Work& work, MutableRows result) const {
  std::int64_t queries = work.num_queries, dim = shape_.head_dim, size = Partial::size(queries, dim);
  float* memory = buffers().sums.get(2 * size);
  Partial sum(memory, queries, dim), more(memory + size, queries, dim);
  attend_split(work, work.first_split(), sum.out, sum.maximum, sum.total);
  for (std::int64_t split = work.first_split() + 1; split < work.end_split(); ++split) {
    attend_split(work, split, more.out, more.maximum, more.total);
    join(work, sum, more, split);
  }
  finish(work, sum.out, sum.total, result);
}

// A task for each split: for few tiles with many keys.
void Attention::attend_in_splits(const AttentionLayout& layout, std::int64_t layer, ConstRows query,
                                 MutableRows out) const {
  struct Task {
    std::int64_t index, split, place;
  };
  std::int64_t dim = shape_.head_dim, needed = 0;
  std::vector<Task> tasks;
  for (std::int64_t index = 0; index < layout.num_tiles * shape_.num_kv_heads; ++index) {
    Work todo = work(layout, layer, index);
    for (std::int64_t split = todo.first_split(); split < todo.end_split(); ++split) {
      tasks.push_back({index, split, needed});
      needed += Partial::size(todo.num_queries, dim);
    }
  }
  float* memory = buffers().splits.get(needed);
  parallel_for(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t i) {
    const Task& task = tasks[static_cast<std::size_t>(i)];
    Work todo = work(layout, layer, task.index);
    load_query(todo, query);
    load_path(todo);
    Partial part(memory + task.place, todo.num_queries, dim);
    attend_split(todo, task.split, part.out, part.maximum, part.total);
  });
  for (const Task& task : tasks) {
    Work done = work(layout, layer, task.index);
    std::int64_t size = Partial::size(done.num_queries, dim), first = done.first_split();
    Partial part(memory + task.place, done.num_queries, dim);
    Partial sum(memory + task.place - (task.split - first) * size, done.num_queries, dim);
    if (task.split > first) join(done, sum, part, task.split);
    if (task.split == done.end_split() - 1) finish(done, sum.out, sum.total, out);
  }
}

void Attention::attend(const AttentionLayout& layout, std::int64_t layer, ConstRows query, ConstRows key,
                       ConstRows value, MutableRows out) const {
  write(layout, layer, key, value);
  std::int64_t num_works = layout.num_tiles * shape_.num_kv_heads, most_keys = 0, pairs = 0;
  for (std::int64_t i = 0; i < layout.num_tiles; ++i) {
    Work todo = work(layout, layer, i * shape_.num_kv_heads);
    std::int64_t keys = todo.num_keys - todo.from(0);
    most_keys = std::max(most_keys, keys);
    pairs += keys * layout.tiles[i].num_rows;
  }
  auto whole = [&](std::int64_t index) {
    Work todo = work(layout, layer, index);
    load_query(todo, query);
    load_path(todo);
    attend_whole(todo, out);
  };
  if (num_threads() == 1 || pairs * num_heads_ * shape_.head_dim <= serial_products) {
    for (std::int64_t index = 0; index < num_works; ++index) whole(index);
  } else if (most_keys > split_keys && num_works < num_threads() * tasks_per_thread) {
    attend_in_splits(layout, layer, query, out);
  } else {
    parallel_for(num_works, whole);
  }
}

}  // namespace forerun
