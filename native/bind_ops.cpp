#include <nanobind/stl/vector.h>

#include <vector>

#include "attention.h"
#include "bind.h"
#include "ops.h"

namespace nb = nanobind;

namespace forerun {

namespace {

ConstRows const_rows(Address data, std::int64_t stride) { return {at<const float>(data), stride}; }
MutableRows mutable_rows(Address data, std::int64_t stride) { return {at<float>(data), stride}; }
const Linear& linear_at(Address address) { return *at<const Linear>(address); }

void py_norm(Address x, std::int64_t x_stride, std::int64_t rows, std::int64_t n, Address weight, float eps,
             Address out, std::int64_t out_stride) {
  norm_rows(const_rows(x, x_stride), rows, n, {at<const float>(weight), eps}, mutable_rows(out, out_stride));
}

void py_norm_linear(Address x, std::int64_t x_stride, std::int64_t rows, Address weight, float eps, Address linear,
                    Address y, std::int64_t y_stride) {
  norm_linear(const_rows(x, x_stride), rows, {at<const float>(weight), eps}, linear_at(linear),
              mutable_rows(y, y_stride));
}

void py_linear_add(Address x, std::int64_t x_stride, std::int64_t rows, Address linear, Address post_weight,
                   float post_eps, float scale, Address to, std::int64_t to_stride) {
  linear_add(const_rows(x, x_stride), rows, linear_at(linear), {{at<const float>(post_weight), post_eps}, scale},
             mutable_rows(to, to_stride));
}

void py_mlp(Address x, std::int64_t x_stride, std::int64_t rows, Address weight, float eps, Address gate_up,
            bool gelu, Address down, Address post_weight, float post_eps, float scale, Address to,
            std::int64_t to_stride) {
  Mlp parts{{at<const float>(weight), eps}, linear_at(gate_up), gelu ? gelu_tanh : silu, linear_at(down)};
  mlp(const_rows(x, x_stride), rows, parts, {{at<const float>(post_weight), post_eps}, scale},
      mutable_rows(to, to_stride));
}

void py_rope(Address qkv, std::int64_t stride, std::int64_t rows, Address cos, Address sin, std::int64_t half,
             std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim, Address q_norm, Address k_norm,
             bool whole_norm, float eps) {
  Rope rope{const_rows(cos, half), const_rows(sin, half), half, num_heads, num_kv_heads, head_dim,
            at<const float>(q_norm), at<const float>(k_norm), whole_norm, eps};
  rope_rows(mutable_rows(qkv, stride), rows, rope);
}

// An Attention with the layout of the step that it attends; the cache and the layout's ints are Python's memory.
class AttentionObject {
 public:
  AttentionObject(std::int64_t num_layers, std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                  std::int64_t block_size, bool bf16, Address cache, float scale, float softcap,
                  std::vector<std::int64_t> windows)
      : attention_({num_layers, num_kv_heads, head_dim, block_size, bf16}, num_heads, at<void>(cache),
                   {scale, softcap, std::move(windows)}) {}

  void begin(Address slots, std::int64_t num_rows, Address tiles, std::int64_t num_tiles, Address ints) {
    layout_ = {at<const std::int64_t>(slots), num_rows, at<const AttentionTile>(tiles), num_tiles,
               at<const std::int64_t>(ints)};
  }

  void attend(std::int64_t layer, Address query, std::int64_t query_stride, Address key, std::int64_t key_stride,
              Address value, std::int64_t value_stride, Address out, std::int64_t out_stride) const {
    attention_.attend(layout_, layer, const_rows(query, query_stride), const_rows(key, key_stride),
                      const_rows(value, value_stride), mutable_rows(out, out_stride));
  }

 private:
  Attention attention_;
  AttentionLayout layout_;
};

}  // namespace

void bind_ops(nb::module_& module) {
  using unlocked = nb::call_guard<nb::gil_scoped_release>;
  module.def("norm", &py_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("n"), nb::arg("weight"),
             nb::arg("eps"), nb::arg("out"), nb::arg("out_stride"), unlocked());
  module.def("norm_linear", &py_norm_linear, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("weight"),
             nb::arg("eps"), nb::arg("linear"), nb::arg("y"), nb::arg("y_stride"), unlocked());
  module.def("linear_add", &py_linear_add, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("linear"),
             nb::arg("post_weight"), nb::arg("post_eps"), nb::arg("scale"), nb::arg("to"), nb::arg("to_stride"),
             unlocked());
  module.def("mlp", &py_mlp, nb::arg("x"), nb::arg("x_stride"), nb::arg("rows"), nb::arg("weight"), nb::arg("eps"),
             nb::arg("gate_up"), nb::arg("gelu"), nb::arg("down"), nb::arg("post_weight"), nb::arg("post_eps"),
             nb::arg("scale"), nb::arg("to"), nb::arg("to_stride"), unlocked());
  module.def("rope", &py_rope, nb::arg("qkv"), nb::arg("stride"), nb::arg("rows"), nb::arg("cos"), nb::arg("sin"),
             nb::arg("half"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("q_norm"),
             nb::arg("k_norm"), nb::arg("whole_norm"), nb::arg("eps"), unlocked());
  module.def(
      "exponential",
      [](Address x, std::int64_t n, Address out) { row_kernels().exponential(at<const float>(x), n, at<float>(out)); },
      nb::arg("x"), nb::arg("n"), nb::arg("out"));
  nb::class_<AttentionObject>(module, "Attention")
      .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool, Address, float, float,
                    std::vector<std::int64_t>>(),
           nb::arg("num_layers"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
           nb::arg("block_size"), nb::arg("bf16"), nb::arg("cache"), nb::arg("scale"), nb::arg("softcap"),
           nb::arg("windows"))
      .def("begin", &AttentionObject::begin, nb::arg("slots"), nb::arg("num_rows"), nb::arg("tiles"),
           nb::arg("num_tiles"), nb::arg("ints"))
      .def("attend", &AttentionObject::attend, nb::arg("layer"), nb::arg("query"), nb::arg("query_stride"),
           nb::arg("key"), nb::arg("key_stride"), nb::arg("value"), nb::arg("value_stride"), nb::arg("out"),
           nb::arg("out_stride"), unlocked());
}

}  // namespace forerun
