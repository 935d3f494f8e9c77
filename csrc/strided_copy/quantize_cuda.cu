// Block quantization on CUDA: a block of threads per chunk of a slice, or per block of a matrix,
// whose values stay in registers between the two steps.
#include <cuda_runtime.h>

#include "common/words.h"
#include "strided_copy/quantize.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
template <typename S>
constexpr int kWidth = 16 / sizeof(S);  // values that a thread accesses together, where they fit
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

HE_HOST_DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

__device__ uint32_t warp_max(uint32_t value) {
  HE_UNROLL
  for (int lanes = 16; lanes; lanes /= 2)
    value = larger(value, __shfl_xor_sync(kFullWarp, value, lanes));
  return value;
}

// Writes value(0), value(1), ..., float32.
template <int width, typename Value>
HE_HOST_DEVICE void store_e4m3(uint8_t* to, const Value& value) {
  if constexpr (width == 1) {
    *to = static_cast<uint8_t>(to_e4m3x2(value(0), 0.0f));
  } else {
    CopyGroup<uint32_t, width / 4> words;
    HE_UNROLL
    for (int i = 0; i < width / 4; ++i)
      words.values[i] = to_e4m3x2(value(4 * i), value(4 * i + 1)) |
                        uint32_t{to_e4m3x2(value(4 * i + 2), value(4 * i + 3))} << 16;
    stream_store(to, words);
  }
}

template <typename S, typename E, int width>
HE_HOST_DEVICE uint32_t absmax_of(const CopyChunk& chunk, const S* src) {
  using Group = CopyGroup<S, width>;
  uint32_t most = 0;
  for_each_group<Group, width>(chunk, src, threadIdx.x, kThreads, [&](const Group& group, int64_t) {
    HE_UNROLL
    for (const S value : group.values)
      most = larger(most, magnitude_bits(engine_value<S, E>(value)));
  });
  return most;
}

template <typename S, typename E, int width>
HE_HOST_DEVICE void quantize(const CopyChunk& chunk, const S* src, uint8_t* dst, float factor) {
  using Group = CopyGroup<S, width>;
  for_each_group<Group, width>(
      chunk, src, threadIdx.x, kThreads, [&](const Group& group, int64_t to) {
        store_e4m3<width>(dst + to,
                          [&](int i) { return engine_value<S, E>(group.values[i]) * factor; });
      });
}

template <typename S, typename E>
__global__ void __launch_bounds__(kThreads)
    absmax_chunks(const __grid_constant__ QuantizeParams p) {
  const CopyChunk chunk = p.chunks[blockIdx.x];
  const S* src = reinterpret_cast<const S*>(p.sources[chunk.src]) + chunk.src_offset;
  const bool grouped = groups_fit<S, kWidth<S>>(chunk, src, chunk.src_step, chunk.src_pitch);
  const uint32_t most =
      warp_max(grouped ? absmax_of<S, E, kWidth<S>>(chunk, src) : absmax_of<S, E, 1>(chunk, src));
  if (threadIdx.x % 32 == 0) atomicMax(p.absmax + chunk.block, static_cast<int32_t>(most));
}

template <typename S, typename E>
__global__ void __launch_bounds__(kThreads)
    quantize_chunks(const __grid_constant__ QuantizeParams p) {
  const CopyChunk chunk = p.chunks[blockIdx.x];
  const S* src = reinterpret_cast<const S*>(p.sources[chunk.src]) + chunk.src_offset;
  auto* dst = reinterpret_cast<uint8_t*>(p.destinations[chunk.dst]) + chunk.dst_offset;
  const float factor = 1.0f / p.scale[chunk.block];
  if (groups_fit<S, kWidth<S>>(chunk, src, chunk.src_step, chunk.src_pitch) &&
      groups_fit<uint8_t, kWidth<S>>(chunk, dst, chunk.dst_step, chunk.dst_pitch)) {
    quantize<S, E, kWidth<S>>(chunk, src, dst, factor);
  } else {
    quantize<S, E, 1>(chunk, src, dst, factor);
  }
}

constexpr int kValues = kQuantizeBlock * kQuantizeBlock / kThreads;  // of a thread, in registers

// Adjacent values: words, which hold one or two each, or a single value.
template <typename S, int width>
struct Values {
  using Group = typename Conversion<S, S, width>::Source;

  static HE_HOST_DEVICE float value(const Group& group, int i) {
    if constexpr (width == 1)
      return to_float(group.values[0]);
    else
      return Word<S>::value(group.values[i / Word<S>::kValues], i % Word<S>::kValues);
  }

  // Bits of the largest magnitude.
  template <int count>
  static HE_HOST_DEVICE uint32_t absmax(const Group (&groups)[count]) {
    uint32_t most = 0;
    HE_UNROLL
    for (const Group& group : groups) {
      if constexpr (width == 1) {
        most = larger(most, magnitude_bits(to_float(group.values[0])));
      } else {
        constexpr uint32_t kMagnitudes = Word<S>::kValues == 1 ? 0x7FFFFFFFu : 0x7FFF7FFFu;
        HE_UNROLL
        for (const uint32_t word : group.values) most = Word<S>::max(most, word & kMagnitudes);
      }
    }
    if constexpr (width == 1) return most;
    const float first = Word<S>::value(most, 0), last = Word<S>::value(most, Word<S>::kValues - 1);
    return magnitude_bits(max_nan(first, last));
  }
};

// Threads go through the rows of a block, `width` adjacent values each.
template <typename S, int width>
__global__ void __launch_bounds__(kThreads, sizeof(S) == 2 && width > 1 ? 4 : 2)
    quantize_matrix_blocks(const __grid_constant__ QuantizeMatricesParams p) {
  constexpr int kAcross = kQuantizeBlock / width, kDown = kThreads / kAcross;
  using Of = Values<S, width>;
  const MatrixBlock block = matrix_block(p, blockIdx.x);
  const int column = threadIdx.x % kAcross * width, first = threadIdx.x / kAcross;
  const int rows = column < block.columns ? block.rows : 0;  // in which this thread has values
  const int64_t start = block.offset + first * p.columns + column, step = kDown * p.columns;
  const S* in = static_cast<const S*>(p.weight) + start;
  typename Of::Group groups[kValues / width] = {};
  HE_UNROLL
  for (int i = 0; i < kValues / width; ++i) {
    if (first + i * kDown < rows) groups[i] = stream_load<typename Of::Group>(in + i * step);
  }
  __shared__ uint32_t of_warps[kThreads / 32];
  const uint32_t of_warp = warp_max(Of::absmax(groups));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  uint32_t absmax = 0;
  HE_UNROLL
  for (const uint32_t other : of_warps) absmax = larger(absmax, other);
  const float scale = block_scale(absmax), factor = 1.0f / scale;
  if (threadIdx.x == 0) p.scale[blockIdx.x] = scale;
  uint8_t* out = p.quantized + start;
  HE_UNROLL
  for (int i = 0; i < kValues / width; ++i) {
    if (first + i * kDown < rows)
      store_e4m3<width>(out + i * step, [&](int j) { return Of::value(groups[i], j) * factor; });
  }
}

}  // namespace

int quantize_matrices_cuda(const QuantizeMatricesParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto blocks = static_cast<unsigned>(num_blocks(params));
  with_float(params.dtype, [&](auto type) {
    using S = decltype(type);
    if (params.columns % kWidth<S> == 0 && reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 &&
        reinterpret_cast<uintptr_t>(params.quantized) % kWidth<S> == 0) {
      quantize_matrix_blocks<S, kWidth<S>><<<blocks, kThreads, 0, s>>>(params);
    } else {
      quantize_matrix_blocks<S, 1><<<blocks, kThreads, 0, s>>>(params);
    }
  });
  return cudaGetLastError();
}

int block_absmax_cuda(const QuantizeParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto chunks = static_cast<unsigned>(params.num_chunks);
  by_dtypes(params, [&](auto source, auto engine) {
    absmax_chunks<decltype(source), decltype(engine)><<<chunks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

int block_quantize_cuda(const QuantizeParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto chunks = static_cast<unsigned>(params.num_chunks);
  by_dtypes(params, [&](auto source, auto engine) {
    quantize_chunks<decltype(source), decltype(engine)><<<chunks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace hybridengine
