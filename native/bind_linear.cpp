#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind.h"
#include "linear.h"
#include "pack.h"

namespace nb = nanobind;

namespace forerun {

namespace {

Kind kind_of(const std::string& name) {
  for (int i = 0; i < num_kinds; ++i) {
    if (name == kind_info(static_cast<Kind>(i)).name) return static_cast<Kind>(i);
  }
  throw std::invalid_argument("no packed kind is named " + name);
}

std::vector<std::string> kinds() {
  std::vector<std::string> names;
  for (int i = 0; i < num_kinds; ++i) names.emplace_back(kind_info(static_cast<Kind>(i)).name);
  return names;
}

// A Linear that owns its list of segments; the weights' memory is Python's.
class LinearObject {
 public:
  using Part = std::tuple<std::string, Address, std::int64_t, Address>;  // kind, panels, n, bias or 0

  LinearObject(std::int64_t k, const std::vector<Part>& parts, int terms) {
    if (terms != 1 && terms != 2) throw std::invalid_argument("a row has one or two terms");
    for (const auto& [name, panels, n, bias] : parts) {
      segments_.push_back({kind_of(name), at<const std::uint8_t>(panels), n, at<const float>(bias)});
      needs_tiles_ |= segments_.back().kind != Kind::bf16;
    }
    linear_ = {k, terms, static_cast<int>(segments_.size()), segments_.data()};
  }
  LinearObject(const LinearObject&) = delete;

  const Linear& linear() const { return linear_; }

  void run(Address x, std::int64_t x_stride, std::int64_t rows, Address y, std::int64_t y_stride) const {
    for (std::int64_t first = 0; first < rows; first += rows_at_once) {
      run_some(at<const float>(x) + first * x_stride, x_stride, std::min(rows_at_once, rows - first),
               at<float>(y) + first * y_stride, y_stride);
    }
  }

 private:
  static constexpr std::int64_t rows_at_once = 512;  // bounds the memory of the quantised rows

  void run_some(const float* x, std::int64_t x_stride, std::int64_t rows, float* y, std::int64_t y_stride) const {
    ActivationGroup* tiles = nullptr;
    if (needs_tiles_) {
      tiles = activation_buffer(rows * linear_.terms, linear_.k);
      quantize_rows(x, x_stride, rows, linear_.k, linear_.terms, tiles);
    }
    run_linear(linear_, x, x_stride, tiles, rows, y, y_stride);
  }

  std::vector<Segment> segments_;
  Linear linear_;
  bool needs_tiles_ = false;  // some segment is of a quantised kind
};

void pack(int source, const std::string& name, Address rows, std::int64_t num_rows, std::int64_t k, Address order,
          Address packed, std::int64_t first_row) {
  Kind kind = kind_of(name);
  if (!can_pack(source, kind)) throw std::invalid_argument("this source cannot become " + name);
  nb::gil_scoped_release unlocked;
  pack_rows(source, kind, at<const std::uint8_t>(rows), num_rows, k, at<const std::int64_t>(order),
            at<std::uint8_t>(packed), first_row);
}

void unpack(const std::string& name, Address packed, std::int64_t k, Address ids, std::int64_t num_ids, Address out) {
  Kind kind = kind_of(name);
  nb::gil_scoped_release unlocked;
  unpack_rows(kind, at<const std::uint8_t>(packed), k, at<const std::int64_t>(ids), num_ids, at<float>(out));
}

void quantize(Address x, std::int64_t rows, std::int64_t k, Address values, Address scales) {
  nb::gil_scoped_release unlocked;
  ActivationGroup* tiles = activation_buffer(rows, k);
  quantize_rows(at<const float>(x), k, rows, k, 1, tiles);
  std::int64_t groups = num_groups(k);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const ActivationGroup& group = tiles[row / tile_rows * groups + g];
      std::memcpy(at<std::int8_t>(values) + (row * groups + g) * group_size, group.values[row % tile_rows], group_size);
      at<float>(scales)[row * groups + g] = group.scale[row % tile_rows];
    }
  }
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def("kinds", &kinds);
  module.def("can_pack", [](int source, const std::string& kind) { return can_pack(source, kind_of(kind)); });
  module.def("source_bytes", &source_bytes, nb::arg("source"), nb::arg("k"));
  module.def("packed_bytes", [](const std::string& kind, std::int64_t n, std::int64_t k) {
    return num_panels(n) * panel_bytes(kind_of(kind), k);
  });
  module.def("pack", &pack, nb::arg("source"), nb::arg("kind"), nb::arg("rows"), nb::arg("num_rows"), nb::arg("k"),
             nb::arg("order"), nb::arg("packed"), nb::arg("first_row"));
  module.def("unpack", &unpack, nb::arg("kind"), nb::arg("packed"), nb::arg("k"), nb::arg("ids"), nb::arg("num_ids"),
             nb::arg("out"));
  module.def("quantize", &quantize, nb::arg("x"), nb::arg("rows"), nb::arg("k"), nb::arg("values"), nb::arg("scales"));
  nb::class_<LinearObject>(module, "Linear")
      .def(nb::init<std::int64_t, const std::vector<LinearObject::Part>&, int>(), nb::arg("k"), nb::arg("parts"),
           nb::arg("terms"))
      .def("address", [](const LinearObject& object) { return reinterpret_cast<Address>(&object.linear()); })
      .def("run", &LinearObject::run, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("y"),
           nb::arg("y_stride"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace forerun
