// Which instruction set the kernels run on. Chosen once from what the CPU has; tests choose others.
#pragma once

namespace forerun {

enum class Isa { portable = 0, avx2 = 1, avxvnni = 2, avx512 = 3, avx512vnni = 4 };

inline constexpr int num_isas = 5;

const char* isa_name(Isa isa);

// Whether this build and this CPU (and its operating system) can run it.
bool isa_supported(Isa isa);

// The one in use: the best supported, no better than the environment variable FORERUN_ISA names.
Isa current_isa();

// False if it is not supported. Not for use while kernels run.
bool set_current_isa(Isa isa);

}  // namespace forerun

// A part's kernels are one struct of function pointers, defined in kernels/*.cpp as forerun::<isa>::name. This declares
// them all, and forerun::name() as those of the current instruction set.
#if defined(FORERUN_X86)
#define FORERUN_KERNELS(Type, name)                       \
  namespace forerun::portable { extern const Type name; } \
  namespace forerun::avx2 { extern const Type name; }     \
  namespace forerun::avxvnni { extern const Type name; }  \
  namespace forerun::avx512 { extern const Type name; }   \
  namespace forerun::avx512vnni { extern const Type name; } \
  namespace forerun {                                     \
  inline const Type& name() {                             \
    static const Type* const table[num_isas] = {&portable::name, &avx2::name, &avxvnni::name, &avx512::name, \
                                                &avx512vnni::name}; \
    return *table[static_cast<int>(current_isa())];       \
  }                                                       \
  }
#else
#define FORERUN_KERNELS(Type, name)                       \
  namespace forerun::portable { extern const Type name; } \
  namespace forerun {                                     \
  inline const Type& name() { return portable::name; }    \
  }
#endif
