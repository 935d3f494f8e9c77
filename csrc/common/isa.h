// Dispatch over instruction sets. CMake compiles every *_cpu.cpp once per set with HYBRIDENGINE_ISA
// = portable | avx2 | avx512, each time inside the namespace of that name; the function that
// HE_CPU_KERNEL declares calls the widest one that this machine supports.
#pragma once

namespace hybridengine {

enum class Isa { portable, avx2, avx512 };

// HYBRIDENGINE_ISA=portable|avx2 in the environment lowers it (tests compare the paths).
Isa cpu_isa();

}  // namespace hybridengine

#if defined(__x86_64__)
#define HE_CPU_KERNEL(name, Params)        \
  namespace portable {                     \
  void name(const Params& params);         \
  }                                        \
  namespace avx2 {                         \
  void name(const Params& params);         \
  }                                        \
  namespace avx512 {                       \
  void name(const Params& params);         \
  }                                        \
  inline void name(const Params& params) { \
    switch (cpu_isa()) {                   \
      case Isa::avx512:                    \
        return avx512::name(params);       \
      case Isa::avx2:                      \
        return avx2::name(params);         \
      case Isa::portable:                  \
        return portable::name(params);     \
    }                                      \
  }
#else
#define HE_CPU_KERNEL(name, Params) \
  namespace portable {              \
  void name(const Params& params);  \
  }                                 \
  inline void name(const Params& params) { portable::name(params); }
#endif
