// CUDA log-prob kernels: one block per row, 16-byte loads. The forward reads the logits once; the
// backward reads them once and writes the gradient once. Row offsets are 64-bit.
#include <cuda_runtime.h>

#include <cmath>
#include <type_traits>

#include "logprob/params.h"
#include "logprob/row_math.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 512;
constexpr float kLog2e = 1.44269504f;

template <typename T>
struct alignas(16) Group {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T, bool general>
struct Row {
  const T* logits;
  const uint8_t* mask;
  float softcap, scale_in;
  int64_t vocab;

  __device__ Row(const LogitRows& rows, int64_t row)
      : logits(static_cast<const T*>(rows.logits) + row * rows.row_stride),
        mask(general && rows.vocab_mask ? rows.vocab_mask + row * rows.mask_stride : nullptr),
        softcap(rows.softcap),
        scale_in(rows.softcap > 0 ? rows.logit_scale / rows.softcap : 0),
        vocab(rows.vocab) {}

  // y of the logit x in column i; -inf for an entry that the mask removes.
  __device__ float y(float x, int64_t i) const {
    if constexpr (general) {
      if (mask && !mask[i]) return -INFINITY;
      if (softcap > 0) return softcap * tanhf(scale_in * x);
    }
    return x;
  }
};

// Calls body(first column, values, count) for every group of this thread. `count` is the group
// size, or 1 in the unaligned head and tail of the row.
template <typename T, typename Body>
__device__ __forceinline__ void for_each_group(const T* row, int64_t vocab, const Body& body) {
  constexpr int kSize = Group<T>::kSize;
  const int64_t misaligned = (reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T);
  int64_t head = misaligned ? kSize - misaligned : 0;
  if (head > vocab) head = vocab;
  const int64_t groups = (vocab - head) / kSize;
  const int64_t tail = head + groups * kSize;
  Group<T> one;
  if (threadIdx.x < head) {
    one.values[0] = row[threadIdx.x];
    body(static_cast<int64_t>(threadIdx.x), one, 1);
  }
  if (tail + threadIdx.x < vocab) {
    one.values[0] = row[tail + threadIdx.x];
    body(tail + threadIdx.x, one, 1);
  }
  const auto* aligned = reinterpret_cast<const Group<T>*>(row + head);
  int64_t g = threadIdx.x;
  for (; g + 3 * kThreads < groups; g += 4 * kThreads) {
    Group<T> loaded[4];  // four loads in flight before the first use
#pragma unroll
    for (int u = 0; u < 4; ++u) loaded[u] = aligned[g + u * kThreads];
#pragma unroll
    for (int u = 0; u < 4; ++u) body(head + (g + u * kThreads) * kSize, loaded[u], kSize);
  }
  for (; g < groups; g += kThreads) {
    const Group<T> loaded = aligned[g];
    body(head + g * kSize, loaded, kSize);
  }
}

struct ThreadSums {
  float max = -INFINITY, e = 0, e_d = 0, e_e = 0;  // d in units of log 2
};

template <int size, bool general>
__device__ __forceinline__ void accumulate(ThreadSums& sums, const float* y, int count,
                                           int token_lane, float factor2) {
  float top = y[0];
#pragma unroll
  for (int j = 1; j < size; ++j) top = j < count ? fmaxf(top, y[j]) : top;
  if (top > sums.max) {
    const float shift = fmaxf((sums.max - top) * factor2, -150.0f);
    const float shrink = exp2_fast(shift);
    sums.e_d = (sums.e_d + shift * sums.e) * shrink;
    sums.e *= shrink;
    sums.e_e *= shrink * shrink;
    sums.max = top;
  }
  if (sums.max == -INFINITY) {  // only removed entries so far; propagate a NaN among them
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if (j < count && y[j] != y[j]) sums.e = y[j];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < size; ++j) {
    float d = (y[j] - sums.max) * factor2;
    d = d < -150.0f ? -150.0f : d;  // keeps NaN
    float e = exp2_fast(d);
    if (j >= count || j == token_lane) e = 0, d = 0;
    sums.e += e;
    sums.e_d += e * d;
    if constexpr (general) sums.e_e += e * e;
  }
}

__device__ RowSums shuffle_down(const RowSums& sums, int offset) {
  return {__shfl_down_sync(~0u, sums.max, offset), __shfl_down_sync(~0u, sums.e, offset),
          __shfl_down_sync(~0u, sums.e_d, offset), __shfl_down_sync(~0u, sums.e_e, offset)};
}

// The sums of the row, in thread 0; lanes and warps are joined in a fixed order.
__device__ RowSums reduce_block(const ThreadSums& mine, float factor) {
  __shared__ RowSums warps[kThreads / 32];
  RowSums sums = unbiased({mine.max, mine.e, mine.e_d * 0.6931471805599453, mine.e_e}, factor);
  for (int offset = 16; offset; offset /= 2) sums = join(sums, shuffle_down(sums, offset), factor);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sums = join(sums, warps[w], factor);
  }
  return sums;
}

__device__ void write_row(const LogProbForward& p, int64_t row, const RowSums& sums, float token_y,
                          RowResult result) {
  if (p.partial) {
    float* out = p.partial + row * 5;
    out[0] = sums.max;
    out[1] = static_cast<float>(sums.e);
    out[2] = static_cast<float>(sums.e_d);
    out[3] = token_y;
    out[4] = static_cast<float>(sums.e_e);
    return;
  }
  p.log_probs[row] = result.log_prob;
  p.entropy[row] = result.entropy;
  p.row_max[row] = sums.max;
  p.log_sum[row] = result.log_sum;
  if (p.sum_p_squared) p.sum_p_squared[row] = result.sum_p_squared;
}

template <typename T, bool general>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ LogProbForward p) {
  const int64_t r = blockIdx.x;
  const int64_t label = p.token_ids[r];
  if (label == p.ignore_index) {
    if (threadIdx.x == 0) write_row(p, r, RowSums{0, 0, 0, 0}, -INFINITY, RowResult{0, 0, 0, 0});
    return;
  }
  const bool bad = label_is_bad(p, r);
  const int64_t token = bad ? -1 : local_label(p, r);
  const Row<T, general> row(p, r);
  const float factor = row_factor(p, r);
  const float factor2 = exp2_factor(factor);
  ThreadSums mine;
  for_each_group(row.logits, p.vocab, [&](int64_t first, const Group<T>& group, int count) {
    float y[Group<T>::kSize];
#pragma unroll
    for (int j = 0; j < Group<T>::kSize; ++j) {
      y[j] = j < count ? row.y(to_float(group.values[j]), first + j) : -INFINITY;
    }
    const int64_t lane = token - first;
    accumulate<Group<T>::kSize, general>(mine, y, count, lane >= 0 && lane < count ? lane : -1,
                                         factor2);
  });
  const RowSums sums = reduce_block(mine, factor);
  if (threadIdx.x != 0) return;
  const bool here = token >= 0 && token < p.vocab;
  const float token_y = here ? row.y(to_float(row.logits[token]), token) : -INFINITY;
  RowResult result = finish_row(sums, token_y, factor);
  if (bad) {
    if (p.bad_label) *p.bad_label = 1;
    result = RowResult{NAN, NAN, result.log_sum, result.sum_p_squared};
  }
  write_row(p, r, sums, bad ? NAN : token_y, result);
}

// The difference of the two alignments, in elements.
template <typename T, typename Out>
__device__ __forceinline__ uintptr_t column_offset(const T* logits, const Out* out) {
  return reinterpret_cast<uintptr_t>(logits) / sizeof(T) -
         reinterpret_cast<uintptr_t>(out) / sizeof(Out);
}

template <typename T, typename Out, bool general>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ LogProbBackward p) {
  const int64_t r = blockIdx.x;
  constexpr int kSize = Group<T>::kSize;
  struct alignas(kSize * sizeof(Out)) Gradients {
    Out values[kSize];
  };
  const int64_t out_row = grad_row(p, r);
  if (out_row < 0) return;
  Out* out = static_cast<Out*>(p.grad_logits) + out_row * p.grad_stride;
  const float factor = row_factor(p, r);
  const RowGradient gradient = row_gradient(p, r, factor);
  if (gradient.zero) {  // a masked row is not read: it may hold NaN
    for (int64_t i = threadIdx.x; i < p.vocab; i += kThreads) out[i] = FromFloat<Out>::of(0.0f);
    return;
  }
  const Row<T, general> row(p, r);
  const int64_t token = local_label(p, r);
  const float shift = p.row_max[r], log_sum = p.log_sum[r];
  const bool same_alignment = column_offset(row.logits, out) % kSize == 0;
  const auto emit = [&](int64_t first, const Group<T>& group, int count) {
    Gradients result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j >= count) break;
      const float x = to_float(group.values[j]);
      const float y = row.y(x, first + j);
      float log_p = (y - shift) * factor - log_sum;
      log_p = log_p < -104.0f ? -104.0f : log_p;
      float grad = exp2_fast(log_p * kLog2e) * (gradient.constant + gradient.slope * log_p);
      if (log_p == -104.0f) grad = 0;
      if (first + j == token) grad = gradient.token;
      if constexpr (general) {
        if (row.softcap > 0) {
          const float t = y / row.softcap;
          grad *= (1.0f - t * t) * (row.scale_in * row.softcap);
        }
        if (y == -INFINITY) grad = 0;
      }
      result.values[j] = FromFloat<Out>::of(grad);
    }
    if (count == kSize && same_alignment) {
      *reinterpret_cast<Gradients*>(out + first) = result;
    } else {
      for (int j = 0; j < count; ++j) out[first + j] = result.values[j];
    }
  };
  for_each_group(row.logits, p.vocab, emit);
}

template <template <typename, bool> class Launch, typename Params>
int dispatch(const Params& p, bool general, void* stream) {
  if (p.rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  switch (p.dtype) {
    case DType::bf16:
      general ? Launch<bf16, true>::run(p, s) : Launch<bf16, false>::run(p, s);
      break;
    case DType::f16:
      general ? Launch<f16, true>::run(p, s) : Launch<f16, false>::run(p, s);
      break;
    default:
      general ? Launch<float, true>::run(p, s) : Launch<float, false>::run(p, s);
  }
  return cudaGetLastError();
}

template <typename T, bool general>
struct Forward {
  static void run(const LogProbForward& p, cudaStream_t s) {
    forward_kernel<T, general><<<static_cast<unsigned>(p.rows), kThreads, 0, s>>>(p);
  }
};

template <typename T, bool general>
struct Backward {
  static void run(const LogProbBackward& p, cudaStream_t s) {
    const auto launch = [&](auto out) {
      backward_kernel<T, decltype(out), general>
          <<<static_cast<unsigned>(p.rows), kThreads, 0, s>>>(p);
    };
    if (p.grad_dtype == p.dtype) return launch(T{});
    if constexpr (std::is_same_v<T, float>)
      p.grad_dtype == DType::bf16 ? launch(bf16{}) : launch(f16{});
  }
};

}  // namespace

int log_prob_forward_cuda(const LogProbForward& p, void* stream) {
  return dispatch<Forward>(p, p.softcap > 0 || p.vocab_mask || p.sum_p_squared || p.partial,
                           stream);
}

int log_prob_backward_cuda(const LogProbBackward& p, void* stream) {
  return dispatch<Backward>(p, p.softcap > 0 || p.vocab_mask, stream);
}

}  // namespace hybridengine
