#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bind.h"
#include "cpu.h"
#include "threads.h"

namespace nb = nanobind;

namespace forerun {

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (int i = 0; i < num_isas; ++i) {
    if (isa_supported(static_cast<Isa>(i))) names.emplace_back(isa_name(static_cast<Isa>(i)));
  }
  return names;
}

void set_isa(const std::string& name) {
  for (int i = 0; i < num_isas; ++i) {
    if (name == isa_name(static_cast<Isa>(i)) && set_current_isa(static_cast<Isa>(i))) return;
  }
  throw std::invalid_argument("instruction set " + name + " is not one of isas()");
}

}  // namespace forerun

NB_MODULE(_native, module) {
  module.def("isas", &forerun::isas);
  module.def("isa", [] { return std::string(forerun::isa_name(forerun::current_isa())); });
  module.def("set_isa", &forerun::set_isa, nb::arg("name"));
  module.def("num_threads", &forerun::num_threads);
  module.def("set_num_threads", &forerun::set_num_threads, nb::arg("count"));
  forerun::bind_linear(module);
  forerun::bind_ops(module);
  forerun::bind_memory(module);
}
