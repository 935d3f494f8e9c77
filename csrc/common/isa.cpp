#include "common/isa.h"

#include <cstdlib>
#include <cstring>

namespace hybridengine {

namespace {

Isa detect() {
#if defined(__x86_64__)
  const char* limit = std::getenv("HYBRIDENGINE_ISA");
  const auto limited_to = [&](const char* name) { return limit && !std::strcmp(limit, name); };
  if (limited_to("portable")) return Isa::portable;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && !limited_to("avx2")) {
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && !limited_to("avx512");
    return bf16 ? Isa::avx512_bf16 : Isa::avx512;
  }
  if (avx2) return Isa::avx2;
#endif
  return Isa::portable;
}

}  // namespace

Isa cpu_isa() {
  static const Isa isa = detect();
  return isa;
}

}  // namespace hybridengine
