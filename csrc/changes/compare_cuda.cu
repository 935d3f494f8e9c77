// mark_changed on CUDA: compares, updates what was sent, and adds to a mask of one bit per element.
#include <cuda_runtime.h>

#include "changes/params.h"
#include "strided_copy/copy_chunk.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 4;   // adjacent elements of a thread; 8 threads fill a word of the mask
constexpr int kRounds = 4;  // whose loads are in flight together
constexpr int kStep = kThreads * kGroup;
constexpr int64_t kBlockElements = int64_t{kStep} * kRounds;

template <typename T, bool aligned>
__device__ CopyGroup<T, kGroup> load_group(const T* from, int64_t left) {
  if (aligned && left >= kGroup) return *reinterpret_cast<const CopyGroup<T, kGroup>*>(from);
  CopyGroup<T, kGroup> group{};
  HE_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if (i < left) group.values[i] = from[i];
  }
  return group;
}

template <typename S, typename D, bool aligned>
__global__ void __launch_bounds__(kThreads) mark_kernel(const __grid_constant__ CompareParams p) {
  const int64_t first = blockIdx.x * kBlockElements + threadIdx.x * kGroup;
  const S* current = static_cast<const S*>(p.current);
  D* sent = static_cast<D*>(p.sent);
  CopyGroup<S, kGroup> now[kRounds];
  CopyGroup<D, kGroup> then[kRounds];
  HE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    const int64_t at = first + round * kStep;
    now[round] = load_group<S, aligned>(current + at, p.numel - at);
    then[round] = load_group<D, aligned>(sent + at, p.numel - at);
  }
  HE_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    const int64_t at = first + round * kStep;
    uint32_t word = 0;
    HE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const D value = convert<S, D>(now[round].values[i]);
      if (at + i < p.numel && value.bits != then[round].values[i].bits) {
        sent[at + i] = value;
        word |= 1u << (threadIdx.x * kGroup + i) % 32;
      }
    }
    HE_UNROLL
    for (int lanes = 1; lanes < 32 / kGroup; lanes *= 2)
      word |= __shfl_xor_sync(0xFFFFFFFFu, word, lanes);
    if (threadIdx.x % (32 / kGroup) == 0 && word) p.mask[at / 32] |= word;
  }
}

template <typename S, typename D>
int launch(const CompareParams& params, void* stream) {
  const auto blocks = static_cast<unsigned>((params.numel + kBlockElements - 1) / kBlockElements);
  const auto addresses =
      reinterpret_cast<uintptr_t>(params.current) | reinterpret_cast<uintptr_t>(params.sent);
  const auto s = static_cast<cudaStream_t>(stream);
  if (addresses % 16 == 0) {
    mark_kernel<S, D, true><<<blocks, kThreads, 0, s>>>(params);
  } else {
    mark_kernel<S, D, false><<<blocks, kThreads, 0, s>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace

int mark_changed_cuda(const CompareParams& params, void* stream) {
  return with_float64(params.current_dtype, [&](auto current) {
    using S = decltype(current);
    return params.sent_dtype == DType::bf16 ? launch<S, bf16>(params, stream)
                                            : launch<S, f16>(params, stream);
  });
}

}  // namespace hybridengine
