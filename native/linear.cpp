#include "bind.h"

namespace forerun {

void bind_linear(nanobind::module_&) {}

}  // namespace forerun
