#include "linear.h"

#include <algorithm>
#include <new>

#include "threads.h"

namespace forerun {

namespace {

// A task's panels: so many bytes that they stay in a core's cache for the next rows, enough tasks to share out evenly.
constexpr std::int64_t max_task_bytes = 96 << 10;
constexpr std::int64_t min_task_bytes = 16 << 10;
constexpr int tasks_per_thread = 4;

constexpr std::int64_t serial_quantize = 1 << 14;  // values: quicker done than handed out

struct Part {  // of a segment's panels, in tasks
  std::int64_t panels, panels_per_task, tasks;
};

Part split(const Segment& segment, std::int64_t k) {
  std::int64_t panels = num_panels(segment.n), bytes = panel_bytes(segment.kind, k);
  std::int64_t share = panels * bytes / (num_threads() * tasks_per_thread);
  std::int64_t wanted = std::clamp(share, min_task_bytes, max_task_bytes);
  std::int64_t per_task = std::max<std::int64_t>(1, wanted / std::max<std::int64_t>(1, bytes));
  return {panels, per_task, (panels + per_task - 1) / per_task};
}

struct Rows {
  const float* x;
  std::int64_t x_stride;
  const ActivationGroup* tiles;
  int terms;  // a row has in the tiles
  std::int64_t count, k;
  float* y;
  std::int64_t y_stride;
};

// result: of `count` terms, `terms` a row, the first of which is row `first`.
void write_out(float (*result)[panel_outputs], const Segment& segment, std::int64_t panel, std::int64_t first,
               int count, int terms, const Rows& rows, std::int64_t column) {
  std::int64_t n = panel * panel_outputs;
  int width = static_cast<int>(std::min<std::int64_t>(panel_outputs, segment.n - n));
  for (int r = 0; r < count; r += terms) {
    for (int i = 0; i < panel_outputs && terms == 2; ++i) result[r][i] += result[r + 1][i];
    float* y = rows.y + (first + r / terms) * rows.y_stride + column + n;
    for (int i = 0; i < width; ++i) y[i] = segment.bias ? result[r][i] + segment.bias[n + i] : result[r][i];
  }
}

// Panels first_panel .. end - 1 of a segment for all rows: rows outside, so that the panels come from the cache.
void run_panels(const Segment& segment, std::int64_t first_panel, std::int64_t end, const Rows& rows,
                std::int64_t column) {
  const PanelKernel* kernels = linear_kernels().panel[static_cast<int>(segment.kind)];
  std::int64_t bytes = panel_bytes(segment.kind, rows.k), tile = num_groups(rows.k);
  int terms = segment.kind == Kind::bf16 ? 1 : rows.terms;
  std::int64_t all = rows.count * terms;
  PanelCall call{};
  call.records = panel_records(segment.kind, rows.k);
  call.x_stride = rows.x_stride;
  call.k = rows.k;
  alignas(64) float result[max_rows][panel_outputs];
  call.out = result;
  for (std::int64_t first = 0; first < all; first += max_rows) {
    int count = static_cast<int>(std::min<std::int64_t>(max_rows, all - first));
    call.x = rows.x + first * rows.x_stride;
    for (int i = 0; i < max_rows / tile_rows && rows.tiles; ++i) {
      call.tiles[i] = rows.tiles + (first / tile_rows + i) * tile;
    }
    for (std::int64_t panel = first_panel; panel < end; ++panel) {
      call.panel = segment.panels + panel * bytes;
      kernels[count - 1](call);
      write_out(result, segment, panel, first / terms, count, terms, rows, column);
    }
  }
}

}  // namespace

ActivationGroup* activation_buffer(std::int64_t rows, std::int64_t k) {
  struct Buffer {
    ActivationGroup* groups = nullptr;
    std::int64_t size = 0;
    ~Buffer() { release(); }
    void release() { ::operator delete(groups, std::align_val_t{alignof(ActivationGroup)}); }
  };
  thread_local Buffer buffer;
  std::int64_t needed = num_tiles(rows) * num_groups(k);
  if (needed > buffer.size) {
    buffer.release();
    buffer.groups = nullptr;
    buffer.size = 0;
    auto align = std::align_val_t{alignof(ActivationGroup)};
    buffer.groups = static_cast<ActivationGroup*>(::operator new(needed * sizeof(ActivationGroup), align));
    buffer.size = needed;
  }
  return buffer.groups;
}

void quantize_rows(const float* x, std::int64_t x_stride, std::int64_t rows, std::int64_t k, int terms,
                   ActivationGroup* tiles) {
  auto quantize = activation_kernels().quantize;
  std::int64_t tile_height = tile_rows / terms, count = num_tiles(rows * terms);
  auto quantize_tile = [&](std::int64_t tile) {
    std::int64_t first = tile * tile_height, end = std::min(rows, first + tile_height);
    for (std::int64_t row = first; row < end; ++row) {
      quantize(x + row * x_stride, k, terms, tiles + tile * num_groups(k), static_cast<int>((row - first) * terms));
    }
  };
  if (rows * k <= serial_quantize) {
    for (std::int64_t tile = 0; tile < count; ++tile) quantize_tile(tile);
  } else {
    parallel_for(count, quantize_tile);
  }
}

void run_linear(const Linear& linear, const float* x, std::int64_t x_stride, const ActivationGroup* tiles,
                std::int64_t num_rows, float* y, std::int64_t y_stride) {
  Rows rows{x, x_stride, tiles, linear.terms, num_rows, linear.k, y, y_stride};
  std::int64_t num_tasks = 0;
  for (int s = 0; s < linear.num_segments; ++s) num_tasks += split(linear.segments[s], linear.k).tasks;
  parallel_for(num_tasks, [&](std::int64_t task) {
    std::int64_t column = 0;
    for (int s = 0; s < linear.num_segments; ++s) {
      const Segment& segment = linear.segments[s];
      Part part = split(segment, linear.k);
      if (task < part.tasks) {
        std::int64_t first = task * part.panels_per_task;
        run_panels(segment, first, std::min(first + part.panels_per_task, part.panels), rows, column);
        return;
      }
      task -= part.tasks;
      column += segment.n;
    }
  });
}

}  // namespace forerun
