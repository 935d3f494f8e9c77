// Block quantization on CUDA: a block of threads per slice.
#include <cuda_runtime.h>

#include "strided_copy/copy_chunk.h"
#include "strided_copy/quantize.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 8;  // elements that a thread accesses together, where they are aligned
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// Calls body(source element, offset of the destination, count) for every group of a thread.
template <int width, typename S, typename Body>
HE_HOST_DEVICE void for_each_group(const CopyRow& row, const S* src, uint32_t thread,
                                   const Body& body) {
  const CopyPlace start = locate(row, 0);
  const auto count = static_cast<uint32_t>(num_elements(row));
  for (uint32_t at = thread * width; at < count; at += kThreads * width) {
    const CopyOffsets offsets = advance(row, start, at);
    body(*reinterpret_cast<const CopyGroup<S, width>*>(src + offsets.src), offsets.dst);
  }
}

template <typename S, typename E, int width>
HE_HOST_DEVICE uint32_t absmax_of(const CopyRow& row, const S* src, uint32_t thread) {
  uint32_t most = 0;
  for_each_group<width>(row, src, thread, [&](const CopyGroup<S, width>& group, int64_t) {
    HE_UNROLL
    for (int i = 0; i < width; ++i) {
      const uint32_t bits = magnitude_bits(engine_value<S, E>(group.values[i]));
      most = bits > most ? bits : most;
    }
  });
  return most;
}

template <typename S, typename E, int width>
HE_HOST_DEVICE void quantize_row(const CopyRow& row, const S* src, uint8_t* dst, float factor,
                                 uint32_t thread) {
  for_each_group<width>(row, src, thread, [&](const CopyGroup<S, width>& group, int64_t to) {
    CopyGroup<uint8_t, width> out;
    HE_UNROLL
    for (int i = 0; i < width; ++i)
      out.values[i] = to_e4m3(engine_value<S, E>(group.values[i]) * factor);
    *reinterpret_cast<CopyGroup<uint8_t, width>*>(dst + to) = out;
  });
}

template <typename S, typename E>
__global__ void __launch_bounds__(kThreads) absmax_rows(const __grid_constant__ QuantizeParams p) {
  const CopyRow& row = p.rows[blockIdx.x];
  const S* src = reinterpret_cast<const S*>(p.sources[row.src]) + row.src_offset;
  const bool grouped =
      row.size[kCopyDims - 1] % kGroup == 0 &&
      groups_fit(reinterpret_cast<const char*>(src), row.src_align, kGroup, sizeof(S));
  uint32_t most = grouped ? absmax_of<S, E, kGroup>(row, src, threadIdx.x)
                          : absmax_of<S, E, 1>(row, src, threadIdx.x);
  HE_UNROLL
  for (int lanes = 16; lanes; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, most, lanes);
    most = other > most ? other : most;
  }
  if (threadIdx.x % 32 == 0) atomicMax(p.absmax + row.block, static_cast<int32_t>(most));
}

template <typename S, typename E>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(const __grid_constant__ QuantizeParams p) {
  const CopyRow& row = p.rows[blockIdx.x];
  const S* src = reinterpret_cast<const S*>(p.sources[row.src]) + row.src_offset;
  auto* dst = reinterpret_cast<uint8_t*>(p.destinations[row.dst]) + row.dst_offset;
  const float factor = 1.0f / p.scale[row.block];
  if (vectors_fit(row, reinterpret_cast<const char*>(src), reinterpret_cast<const char*>(dst),
                  kGroup, sizeof(S), 1)) {
    quantize_row<S, E, kGroup>(row, src, dst, factor, threadIdx.x);
  } else {
    quantize_row<S, E, 1>(row, src, dst, factor, threadIdx.x);
  }
}

}  // namespace

int block_absmax_cuda(const QuantizeParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto rows = static_cast<unsigned>(params.num_rows);
  by_dtypes(params, [&](auto source, auto engine) {
    absmax_rows<decltype(source), decltype(engine)><<<rows, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

int block_quantize_cuda(const QuantizeParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto rows = static_cast<unsigned>(params.num_rows);
  by_dtypes(params, [&](auto source, auto engine) {
    quantize_rows<decltype(source), decltype(engine)><<<rows, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace hybridengine
