// Each part's functions for Python. Tensors come as addresses and shapes: the extension does not know torch. The Python
// doors (forerun/kernels/native*.py) check shapes, dtypes and contiguity, and keep tensors alive during a call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace forerun {

using Address = std::uintptr_t;  // tensor.data_ptr()

template <class Value>
Value* at(Address address) {
  return reinterpret_cast<Value*>(address);
}

void bind_linear(nanobind::module_& module);
void bind_ops(nanobind::module_& module);
void bind_memory(nanobind::module_& module);

}  // namespace forerun
