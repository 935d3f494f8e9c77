// Matrix products of groups of rows, each group with its own weight (the experts of a mixture).
//
// All three products of a grouped linear layer are
//   out[m, n] = sum_k a[m, k] * b[n, k]   of every group,
// where one of m, n and k is the dimension of the groups' rows. No group is padded in memory.
//
// An element is summed in float32: blocks of kDepth numbers along k, each in ascending order from
// zero, are added in ascending order. So its bits depend on its row of `a` and its row of `b`
// alone.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

// Group g, whose rows begin at row `begin`, starts at data + g * group_stride + begin * row_stride.
struct GroupedMatrix {
  int64_t stride;    // of m or n
  int64_t k_stride;  // of k (in `out`: of n); one of the two is 1
  int64_t group_stride;
  int64_t row_stride;
};

enum class GroupedDim { m, n, k };

struct GroupedGemm {
  const void *a, *b;
  void* out;
  DType dtype;  // of all three: f32 or bf16
  GroupedMatrix a_layout, b_layout, out_layout;
  GroupedDim grouped;
  int64_t m, n, k;  // that of `grouped` is not used
  int64_t groups;
  const int32_t* ends;  // [groups + 1]
  int num_threads;
};

HE_CPU_KERNEL_BF16(grouped_gemm_cpu, GroupedGemm)

}  // namespace hybridengine
