#include "bind.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;

namespace forerun {

namespace {

// Best effort: a system without large pages, or short of them, gives small ones.
void advise_large_pages(Address start, std::size_t bytes) {
#if defined(__linux__)
  constexpr Address page = 4096;
  Address first = (start + page - 1) / page * page, end = (start + bytes) / page * page;
  if (end > first) madvise(at<void>(first), end - first, MADV_HUGEPAGE);
#else
  (void)start;
  (void)bytes;
#endif
}

}  // namespace

void bind_memory(nb::module_& module) {
  module.def("advise_large_pages", &advise_large_pages, nb::arg("start"), nb::arg("bytes"));
}

}  // namespace forerun
