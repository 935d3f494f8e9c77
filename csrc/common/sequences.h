// The checks of cu_seqlens and parents that all operators over packed sequences share.
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

// Segments that continue earlier ones: a forest.
struct SegmentBounds {
  int64_t begin(int64_t i) const { return ends[i]; }
  int64_t end(int64_t i) const { return ends[i + 1]; }
  int64_t parent(int64_t i) const { return parents ? parents[i] : -1; }

  int64_t count;
  const int32_t* ends;     // [count + 1]
  const int32_t* parents;  // [count], an earlier segment or -1; null: -1
};

// Of all tokens, on the CPU.
inline SegmentBounds check_segments(const char* op, const Tensor& cu_seqlens,
                                    const std::optional<Tensor>& parents, int64_t num_tokens) {
  check_same_device(op, {{"cu_seqlens", cu_seqlens}, {"parents", parents}});
  if (!cu_seqlens.is_cpu()) no_kernel_for(cu_seqlens.device(), op);
  check_cu_seqlens(cu_seqlens, num_tokens, op);
  const int64_t count = cu_seqlens.numel() - 1;
  if (parents) check_vector(*parents, "parents", kInt, count);
  const SegmentBounds bounds{count, cu_seqlens.data<int32_t>(),
                             parents ? parents->data<int32_t>() : nullptr};
  HE_CHECK_VALUE(bounds.ends[count] == num_tokens, op, ": cu_seqlens ends at ", bounds.ends[count],
                 "; expected ", num_tokens);
  for (int64_t i = 0; i < count; ++i) {
    HE_CHECK_VALUE(-1 <= bounds.parent(i) && bounds.parent(i) < i, op, ": parents[", i, "] is ",
                   bounds.parent(i), "; expected -1 or an earlier segment");
  }
  return bounds;
}

}  // namespace hybridengine
