// AdamW on CUDA: a block per chunk; the table of tensors is an argument of the launch, so nothing
// is uploaded and a launch can be captured in a graph.
#include <cuda_runtime.h>

#include "adamw/params.h"
#include "adamw/update.h"
#include "changes/change_mask.h"
#include "common/dtype.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxTensors = 56;  // of a launch, whose arguments have at most 4 KiB
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

struct AdamwLaunch {
  AdamwTensor tensors[kMaxTensors];
  AdamwOptions options;
  int32_t num_tensors;
};
static_assert(sizeof(AdamwLaunch) <= 4096);

struct DeviceMath {
  static __device__ float root(float x) { return sqrtf(x); }
  static __device__ float select(bool condition, float yes, float no) {
    return condition ? yes : no;
  }
  static __device__ float product(float a, float b) { return __fmul_rn(a, b); }
};

struct Unmarked {};  // as the engine's type: changes are not marked

__device__ bool differ(float a, float b, bf16) { return to_bf16(a).bits != to_bf16(b).bits; }
__device__ bool differ(float a, float b, f16) { return to_f16(a).bits != to_f16(b).bits; }

template <typename T, int width>
struct alignas(sizeof(T) * width) Group {
  T values[width];
};

template <int width>
__device__ void store_group(float* p, const Group<float, width>& group) {
  const float* v = group.values;
#ifdef __CUDA_ARCH__
  if constexpr (width == 4) {  // the compiler would make four stores of it
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
                 "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
    return;
  }
#endif
  for (int j = 0; j < width; ++j) p[j] = v[j];
}

// Adds the bits of a warp's groups of `width` elements, the first of them element `first`, to the
// mask. Each word belongs to 32 / width adjacent threads.
template <int width>
__device__ void mark(uint32_t* changed, int64_t i, uint32_t bits) {
  constexpr int kThreadsPerWord = kMaskBits / width;
  const int place = threadIdx.x % kThreadsPerWord;
  bits <<= width * place;
  HE_UNROLL
  for (int lanes = 1; lanes < kThreadsPerWord; lanes *= 2)
    bits |= __shfl_xor_sync(kFullWarp, bits, lanes);
  if (place == 0 && bits) changed[i / kMaskBits] |= bits;
}

// One group of each array in registers.
template <typename Grad, int width>
struct Groups {
  Group<float, width> param, exp_avg, exp_avg_sq;
  Group<Grad, width> grad;

  __device__ void load(const AdamwTensor& tensor, int64_t i) {
    param = *reinterpret_cast<const Group<float, width>*>(tensor.param + i);
    grad = *reinterpret_cast<const Group<Grad, width>*>(static_cast<const Grad*>(tensor.grad) + i);
    exp_avg = *reinterpret_cast<const Group<float, width>*>(tensor.exp_avg + i);
    exp_avg_sq = *reinterpret_cast<const Group<float, width>*>(tensor.exp_avg_sq + i);
  }

  __device__ void store(const AdamwTensor& tensor, int64_t i) const {
    store_group(tensor.param + i, param);
    store_group(tensor.exp_avg + i, exp_avg);
    store_group(tensor.exp_avg_sq + i, exp_avg_sq);
  }

  template <typename Engine>
  __device__ uint32_t update(const AdamwScalars& scalars) {
    uint32_t changed = 0;
    HE_UNROLL
    for (int j = 0; j < width; ++j) {
      const float before = param.values[j];
      adamw_update<DeviceMath>(scalars, to_float(grad.values[j]), param.values[j],
                               exp_avg.values[j], exp_avg_sq.values[j]);
      if constexpr (!__is_same(Engine, Unmarked))
        changed |= uint32_t{differ(before, param.values[j], Engine{})} << j;
    }
    return changed;
  }
};

// The elements [begin, end) of a chunk in groups of `width`. Every thread takes part in every step,
// for the shuffles; the loads of kSteps groups are in flight at a time.
template <typename Grad, typename Engine, int width>
__device__ void update_range(const AdamwTensor& tensor, const AdamwScalars& scalars, int64_t begin,
                             int64_t end) {
  constexpr int kSteps = 2;
  constexpr int64_t kStride = int64_t{kThreads} * width;
  for (int64_t base = begin - begin % kMaskBits; base < end; base += kSteps * kStride) {
    Groups<Grad, width> groups[kSteps];
    HE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      const int64_t i = base + k * kStride + threadIdx.x * width;
      if (i >= begin && i < end) groups[k].load(tensor, i);
    }
    HE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      const int64_t i = base + k * kStride + threadIdx.x * width;
      uint32_t changed = 0;
      if (i >= begin && i < end) {
        changed = groups[k].template update<Engine>(scalars);
        groups[k].store(tensor, i);
      }
      if constexpr (!__is_same(Engine, Unmarked)) mark<width>(tensor.changed, i, changed);
    }
  }
}

__device__ bool is_aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

template <typename Grad, typename Engine>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ AdamwLaunch launch) {
  const TensorChunk at = locate_chunk(launch.tensors, launch.num_tensors, blockIdx.x);
  const AdamwTensor& tensor = launch.tensors[at.tensor];
  const AdamwScalars scalars = adamw_scalars(launch.options, tensor.step);
  constexpr int kWidth = 4;
  const bool aligned = is_aligned(tensor.param, 16) && is_aligned(tensor.exp_avg, 16) &&
                       is_aligned(tensor.exp_avg_sq, 16) &&
                       is_aligned(tensor.grad, kWidth * sizeof(Grad));
  const int64_t split = aligned ? at.end - at.end % kWidth : at.begin;
  update_range<Grad, Engine, kWidth>(tensor, scalars, at.begin, split);
  if (split == at.end) return;
  __syncthreads();  // the last elements share a word of the mask with others
  update_range<Grad, Engine, 1>(tensor, scalars, split, at.end);
}

template <typename Grad, typename Engine>
int launch(const AdamwParams& params, void* stream) {
  for (int64_t first = 0; first < params.num_tensors; first += kMaxTensors) {
    AdamwLaunch table;
    const int64_t left = params.num_tensors - first;
    table.num_tensors = static_cast<int32_t>(left < kMaxTensors ? left : kMaxTensors);
    table.options = params.options;
    const int64_t first_chunk = params.tensors[first].first_chunk;
    for (int32_t i = 0; i < table.num_tensors; ++i) {
      table.tensors[i] = params.tensors[first + i];
      table.tensors[i].first_chunk -= first_chunk;
    }
    const int64_t chunks =
        (left > kMaxTensors ? params.tensors[first + kMaxTensors].first_chunk : params.num_chunks) -
        first_chunk;
    if (chunks == 0) continue;
    adamw_kernel<Grad, Engine>
        <<<static_cast<unsigned>(chunks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(table);
    if (const int error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

template <typename Grad>
int by_engine_dtype(const AdamwParams& params, void* stream) {
  if (!params.marks_changes) return launch<Grad, Unmarked>(params, stream);
  if (params.engine_dtype == DType::bf16) return launch<Grad, bf16>(params, stream);
  return launch<Grad, f16>(params, stream);
}

}  // namespace

int adamw_cuda(const AdamwParams& params, void* stream) {
  switch (params.grad_dtype) {
    case DType::bf16:
      return by_engine_dtype<bf16>(params, stream);
    case DType::f16:
      return by_engine_dtype<f16>(params, stream);
    default:
      return by_engine_dtype<float>(params, stream);
  }
}

}  // namespace hybridengine
