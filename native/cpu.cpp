#include "cpu.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(FORERUN_X86)
#include <cpuid.h>
#endif

namespace forerun {

namespace {

constexpr const char* names[num_isas] = {"portable", "avx2", "avxvnni", "avx512", "avx512vnni"};

Isa best_isa() {
  int limit = num_isas - 1;
  if (const char* wanted = std::getenv("FORERUN_ISA")) {
    for (int i = 0; i < num_isas; ++i) {
      if (std::strcmp(wanted, names[i]) == 0) limit = i;
    }
  }
  while (limit > 0 && !isa_supported(static_cast<Isa>(limit))) --limit;
  return static_cast<Isa>(limit);
}

#if defined(FORERUN_X86)
// The 256-bit form of VNNI, which CPUs without AVX-512 have; compilers' own question for it is young.
bool has_avxvnni() {
#if defined(FORERUN_AVXVNNI)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
#else
  return false;  // this build's compiler did not know it
#endif
}
#endif

std::atomic<int>& current() {
  static std::atomic<int> isa{static_cast<int>(best_isa())};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) { return names[static_cast<int>(isa)]; }

bool isa_supported(Isa isa) {
#if defined(FORERUN_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avxvnni) return avx2 && has_avxvnni();
  if (isa == Isa::avx512) return avx512;
  if (isa == Isa::avx512vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return isa == Isa::portable;
}

Isa current_isa() { return static_cast<Isa>(current().load(std::memory_order_relaxed)); }

bool set_current_isa(Isa isa) {
  if (!isa_supported(isa)) return false;
  current().store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

}  // namespace forerun
