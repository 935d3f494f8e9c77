// CUDA log-prob kernels. Forward: warps reduce slices of rows (slices.h), then one warp per row
// joins them, so that few rows of a large vocabulary use the whole GPU. Backward: warps take
// slices, too. Both read the logits once; the backward writes the gradient once. Row offsets are
// 64-bit.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "logprob/params.h"
#include "logprob/row_math.h"
#include "logprob/slices.h"

namespace hybridengine {

namespace {

constexpr int kWarps = 4;           // of a block that works on slices of one row
constexpr int kFinishRows = 32;     // rows of a block that joins slices: a warp each
constexpr int64_t kBlocks = 32768;  // many times those that run at once: an even end

// Blocks of a multiprocessor on Blackwell, compared with older GPUs: the compiler needs more
// registers there, and would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFewerBlocks = 2;
#else
constexpr int kFewerBlocks = 0;
#endif

template <typename V>
__device__ __forceinline__ V shuffled(V value, int lanes) {
  return __shfl_xor_sync(~0u, value, lanes);
}

__device__ __forceinline__ float warp_max(float value) {
  for (int lanes = kLanes / 2; lanes; lanes /= 2) value = max_nan(value, shuffled(value, lanes));
  return value;
}

// The sums of all lanes, in every lane.
template <typename Sums>
__device__ __forceinline__ Sums warp_sum(Sums sums) {
  for (int lanes = kLanes / 2; lanes; lanes /= 2) {
    sums.e += shuffled(sums.e, lanes);
    sums.e_d += shuffled(sums.e_d, lanes);
    sums.e_e += shuffled(sums.e_e, lanes);
  }
  return sums;
}

// Calls body(slice, lane) for the slices of row blockIdx.x that this warp works on.
template <typename Body>
__device__ __forceinline__ void for_each_slice(int64_t vocab, const Body& body) {
  const int warp = threadIdx.x / kLanes;
  const int64_t slices = num_slices(vocab);
  for (int64_t slice = blockIdx.y * kWarps + warp; slice < slices; slice += gridDim.y * kWarps) {
    body(slice, static_cast<int>(threadIdx.x) % kLanes);
  }
}

template <typename T, bool general>
__global__ void __launch_bounds__(kWarps* kLanes, (general ? 6 : 10) - kFewerBlocks)
    forward_slices(const __grid_constant__ LogProbForward p) {
  const int64_t r = blockIdx.x;
  if (p.token_ids[r] == p.ignore_index) return;
  const RowView<T, general> row(p, r);
  const float factor2 = exp2_factor(row_factor(p, r));
  const int64_t token = local_label(p, r);
  auto* out = reinterpret_cast<float4*>(p.slice_sums) + r * num_slices(p.vocab);
  for_each_slice(p.vocab, [&](int64_t slice, int lane) {
    PartSums sums = lane_sums(row, slice, token, factor2, lane);
    sums.raise(warp_max(sums.max), factor2);
    sums = warp_sum(sums);
    if (lane == 0) out[slice] = make_float4(sums.max, sums.e, sums.e_d, sums.e_e);
  });
}

// The sums of row r from those of its slices, in every lane.
__device__ RowSums join_slices(const LogProbForward& p, int64_t r, int lane) {
  const int64_t slices = num_slices(p.vocab);
  const auto* parts = reinterpret_cast<const float4*>(p.slice_sums) + r * slices;
  const float factor = row_factor(p, r);
  float top = kRemoved;
  for (int64_t i = lane; i < slices; i += kLanes) top = max_nan(top, parts[i].x);
  RowSums sums{warp_max(top), 0, 0, 0};
  for (int64_t i = lane; i < slices; i += kLanes) {
    const float4 part = parts[i];
    const RowSums slice = row_sums({part.x, part.y, part.z, part.w}, factor);
    const RowSums same = raised(slice, sums.max, factor);
    sums.e += same.e;
    sums.e_d += same.e_d;
    sums.e_e += same.e_e;
  }
  return warp_sum(sums);
}

template <typename T, bool general>
__device__ void finish(const LogProbForward& p, int64_t r, const RowSums& others) {
  if (p.token_ids[r] == p.ignore_index) {
    return write_row(p, r, RowSums{0, 0, 0, 0}, kRemoved, RowResult{0, 0, 0, 0});
  }
  const bool bad = label_is_bad(p, r);
  const int64_t token = bad ? -1 : local_label(p, r);
  const bool here = token >= 0 && token < p.vocab;
  const RowView<T, general> row(p, r);
  const float token_y = here ? row.y(to_float(row.logits[token]), token) : kRemoved;
  const float factor = row_factor(p, r);
  const RowSums sums = raised(others, max_nan(others.max, token_y), factor);
  RowResult result = finish_row(sums, token_y, factor);
  if (bad) {
    if (p.bad_label) *p.bad_label = 1;
    result.log_prob = result.entropy = NAN;
  }
  write_row(p, r, sums, bad ? NAN : token_y, result);
}

// A warp joins the slices of a row; then the lanes of one warp compute the results of 32 rows.
template <typename T, bool general>
__global__ void __launch_bounds__(kFinishRows* kLanes)
    finish_rows(const __grid_constant__ LogProbForward p) {
  __shared__ RowSums sums[kFinishRows];
  const int64_t first = int64_t{blockIdx.x} * kFinishRows;
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (first + warp < p.rows && p.token_ids[first + warp] != p.ignore_index) {
    const RowSums joined = join_slices(p, first + warp, lane);
    if (lane == 0) sums[warp] = joined;
  }
  __syncthreads();
  if (warp == 0 && first + lane < p.rows) finish<T, general>(p, first + lane, sums[lane]);
}

// As store_chunk, for a full chunk of a row that begins `offset` bytes after an address that vector
// stores can use. The vector before a lane's columns has the last ones of the lane before and the
// first ones of its own; the ends of the chunk, less than a vector each, are stored by element.
template <typename T, typename Out, int count>
__device__ __forceinline__ void store_unaligned(Out* row, int offset, int64_t first, int lane,
                                                const uint32_t (&words)[count]) {
  constexpr int kBytes = kGroup<T> * sizeof(Out), kWords = kBytes / 4, kLast = kLanes - 1;
  Out* chunk = row + first;
  auto* to = reinterpret_cast<Access<kBytes>*>(reinterpret_cast<char*>(chunk) - offset) + lane;
  const auto store_value = [&](int i, bool wanted) {
    if (wanted) {
      chunk[lane * kGroup<T> + column_of<T>(i)] = FromFloat<Out>::of(
          Word<Out>::value(words[i / Word<Out>::kValues], i % Word<Out>::kValues));
    }
  };
  const int own = (kBytes - offset) / static_cast<int>(sizeof(Out));  // columns before a boundary
  HE_UNROLL
  for (int load = 0; load < kLoads; ++load) {
    uint32_t pair[2 * kWords];
    HE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const uint32_t before = words[(load ? load - 1 : 0) * kWords + w];
      const uint32_t here = words[load * kWords + w];
      pair[w] = __shfl_sync(~0u, lane == kLast ? before : here, (lane + kLast) % kLanes);
      pair[kWords + w] = here;
    }
    Access<kBytes> access;
    shift_words<kWords>(pair, kBytes - offset, access.words);
    if (load || lane) to[load * kLanes] = access;
  }
  HE_UNROLL
  for (int i = 0; i < kGroup<T>; ++i) {
    store_value(i, lane == 0 && i < own);
    store_value(kLaneValues<T> - kGroup<T> + i, lane == kLast && i >= own);
  }
}

template <typename T, typename Out, bool general>
__global__ void __launch_bounds__(kWarps* kLanes, (general ? 5 : 7) - kFewerBlocks)
    backward_slices(const __grid_constant__ LogProbBackward p) {
  const int64_t r = blockIdx.x;
  const int64_t out_row = grad_row(p, r);
  if (out_row < 0) return;
  Out* out = static_cast<Out*>(p.grad_logits) + out_row * p.grad_stride;
  const auto offset =
      static_cast<int>(reinterpret_cast<uintptr_t>(out) % (kGroup<T> * sizeof(Out)));
  const float factor = row_factor(p, r);
  const RowGradient gradient = row_gradient(p, r, factor);
  const GradientTerms terms(p, r, factor, gradient);
  const RowView<T, general> row(p, r);
  const int64_t token = local_label(p, r);
  for_each_slice(p.vocab, [&](int64_t slice, int lane) {
    const int64_t begin = slice * kSliceColumns;
    const int64_t end = begin + kSliceColumns < p.vocab ? begin + kSliceColumns : p.vocab;
    for (int64_t first = begin; first < end; first += kChunk<T>) {
      uint32_t grad[kLaneValues<T> / Word<Out>::kValues] = {};
      if (!gradient.zero) {  // a masked row is not read: it may hold NaN
        uint32_t words[kChunkWords];
        load_chunk(row.logits, p.vocab, row.offset, first, lane, words);
        chunk_gradient<T, Out>(row, terms, token, gradient.token, first, lane, words, grad);
      }
      if (offset && first + kChunk<T> <= p.vocab) {
        store_unaligned<T>(out, offset, first, lane, grad);
      } else {
        store_chunk<T>(out, p.vocab, offset == 0, first, lane, grad);
      }
    }
  });
}

// One row per blockIdx.x, split over blockIdx.y if there are too few rows to fill the GPU evenly.
dim3 slice_blocks(const LogitRows& p) {
  const int64_t most = (num_slices(p.vocab) + kWarps - 1) / kWarps;
  const int64_t split = std::min(most, (kBlocks + p.rows - 1) / p.rows);
  return dim3(static_cast<unsigned>(p.rows), static_cast<unsigned>(std::max<int64_t>(split, 1)));
}

template <template <typename, bool> class Launch, typename Params>
int dispatch(const Params& p, bool general, void* stream) {
  if (p.rows == 0) return cudaSuccess;
  const auto s = static_cast<cudaStream_t>(stream);
  with_float(p.dtype, [&](auto logit) {
    using T = decltype(logit);
    general ? Launch<T, true>::run(p, s) : Launch<T, false>::run(p, s);
  });
  return cudaGetLastError();
}

template <typename T, bool general>
struct Forward {
  static void run(const LogProbForward& p, cudaStream_t s) {
    forward_slices<T, general><<<slice_blocks(p), kWarps * kLanes, 0, s>>>(p);
    const int64_t blocks = (p.rows + kFinishRows - 1) / kFinishRows;
    finish_rows<T, general><<<static_cast<unsigned>(blocks), kFinishRows * kLanes, 0, s>>>(p);
  }
};

template <typename T, bool general>
struct Backward {
  static void run(const LogProbBackward& p, cudaStream_t s) {
    const auto launch = [&](auto out) {
      backward_slices<T, decltype(out), general><<<slice_blocks(p), kWarps * kLanes, 0, s>>>(p);
    };
    if (p.grad_dtype == p.dtype) return launch(T{});
    if constexpr (std::is_same_v<T, float>)
      p.grad_dtype == DType::bf16 ? launch(bf16{}) : launch(f16{});
  }
};

}  // namespace

int log_prob_forward_cuda(const LogProbForward& p, void* stream) {
  return dispatch<Forward>(p, p.softcap > 0 || p.vocab_mask || p.stats_width > 2 || p.partial,
                           stream);
}

int log_prob_backward_cuda(const LogProbBackward& p, void* stream) {
  return dispatch<Backward>(p, p.softcap > 0 || p.vocab_mask, stream);
}

}  // namespace hybridengine
