// Dispatch over instruction sets. CMake compiles every *_cpu.cpp once per set with HYBRIDENGINE_ISA
// = portable | avx2 | avx512, each time inside the namespace of that name; the function that
// HE_CPU_KERNEL declares calls the widest one that this machine supports. Kernels that multiply
// pairs of bfloat16 are also compiled as avx512_bf16, for params.dtype bf16 alone (with_factor in
// common/simd.h), and declared with HE_CPU_KERNEL_BF16.
#pragma once

namespace hybridengine {

enum class Isa { portable, avx2, avx512, avx512_bf16 };

// HYBRIDENGINE_ISA=portable|avx2|avx512 in the environment lowers it (tests compare the paths).
Isa cpu_isa();

}  // namespace hybridengine

#define HE_DECLARE_IN(isa, name, Params) \
  namespace isa {                        \
  void name(const Params& params);       \
  }

#if defined(__x86_64__)
#define HE_CPU_KERNEL_OF(name, Params, widest, takes) \
  HE_DECLARE_IN(portable, name, Params)               \
  HE_DECLARE_IN(avx2, name, Params)                   \
  HE_DECLARE_IN(avx512, name, Params)                 \
  HE_DECLARE_IN(widest, name, Params)                 \
  inline void name(const Params& params) {            \
    switch (cpu_isa()) {                              \
      case Isa::avx512_bf16:                          \
        if (takes) return widest::name(params);       \
        [[fallthrough]];                              \
      case Isa::avx512:                               \
        return avx512::name(params);                  \
      case Isa::avx2:                                 \
        return avx2::name(params);                    \
      case Isa::portable:                             \
        return portable::name(params);                \
    }                                                 \
  }
#else
#define HE_CPU_KERNEL_OF(name, Params, widest, takes) \
  HE_DECLARE_IN(portable, name, Params)               \
  inline void name(const Params& params) { portable::name(params); }
#endif

#define HE_CPU_KERNEL(name, Params) HE_CPU_KERNEL_OF(name, Params, avx512, true)
#define HE_CPU_KERNEL_BF16(name, Params) \
  HE_CPU_KERNEL_OF(name, Params, avx512_bf16, params.dtype == DType::bf16)
