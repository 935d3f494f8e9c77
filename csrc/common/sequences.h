// The check of cu_seqlens that all operators over packed sequences share.
#pragma once

#include "common/binding.h"

namespace hybridengine {

// The values are checked on the CPU only: reading them from a GPU would synchronize. The CUDA
// kernels clamp them (sequence_bounds.h).
inline void check_cu_seqlens(const Tensor& cu_seqlens, int64_t num_tokens, const char* op,
                             const char* name = "cu_seqlens", const char* tokens = "tokens") {
  check_vector(cu_seqlens, name, kInt, cu_seqlens.numel());
  HE_CHECK_VALUE(cu_seqlens.numel() > 0, op, ": ", name, " is empty; expected [N + 1] values");
  if (!cu_seqlens.device().is_cpu()) return;
  const int32_t* ends = cu_seqlens.data<int32_t>();
  const int64_t count = cu_seqlens.numel();
  HE_CHECK_VALUE(ends[0] == 0, op, ": ", name, "[0] is ", ends[0], "; expected 0");
  for (int64_t n = 1; n < count; ++n)
    HE_CHECK_VALUE(ends[n] >= ends[n - 1], op, ": ", name, "[", n, "] is ", ends[n],
                   ", less than the one before it; expected ends in ascending order");
  HE_CHECK_VALUE(ends[count - 1] <= num_tokens, op, ": ", name, " ends at ", ends[count - 1],
                 ", but there are ", num_tokens, " ", tokens);
}

}  // namespace hybridengine
