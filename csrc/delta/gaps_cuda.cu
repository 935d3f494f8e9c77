// encode_gaps and decode_gaps on CUDA: a pass that sums per chunk, and one that writes.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/block_scan.h"
#include "delta/gaps.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;

__device__ int64_t gap_at(const EncodeGapsParams& p, int64_t i) {
  return p.positions[i] - (i ? p.positions[i - 1] + 1 : p.start);
}

// Calls body(i) for the elements of this block's chunk, in rounds; i >= count where there is none.
template <typename Body>
__device__ void for_each_round(const Body& body) {
  const int64_t begin = blockIdx.x * kGapChunk;
  for (int64_t i = begin + threadIdx.x; i < begin + kGapChunk; i += kThreads) body(i);
}

__global__ void __launch_bounds__(kThreads)
    count_escapes_kernel(const __grid_constant__ EncodeGapsParams p) {
  int64_t escapes[kMaxGapWidth] = {};
  for_each_round([&](int64_t i) {
    const int64_t gap = i < p.count ? gap_at(p, i) : 0;
    if (gap < 255) return;
    HE_UNROLL
    for (int width = 1; width <= kMaxGapWidth; ++width)
      escapes[width - 1] += gap / gap_escape(width);
  });
  HE_UNROLL
  for (int w = 0; w < kMaxGapWidth; ++w) {
    const int64_t total = block_sum<kThreads>(escapes[w]);
    if (threadIdx.x == 0) p.sums[blockIdx.x * kMaxGapWidth + w] = total;
  }
}

template <int width>
__global__ void __launch_bounds__(kThreads)
    write_gaps_kernel(const __grid_constant__ EncodeGapsParams p) {
  constexpr int64_t escape = (int64_t{1} << 8 * width) - 1;
  int64_t before = blockIdx.x ? p.sums[(int64_t{blockIdx.x} - 1) * kMaxGapWidth + width - 1] : 0;
  for_each_round([&](int64_t i) {
    const int64_t gap = i < p.count ? gap_at(p, i) : 0;
    const int64_t escapes = gap / escape;
    int64_t total;
    const int64_t field = i + before + block_offset<kThreads>(escapes, total) + escapes;
    before += total;
    if (i >= p.count) return;
    HE_UNROLL
    for (int byte = 0; byte < width; ++byte)
      p.bytes[field * width + byte] = static_cast<uint8_t>((gap - escapes * escape) >> (8 * byte));
  });
}

template <int width>
__device__ int64_t field_at(const DecodeGapsParams& p, int64_t i) {
  int64_t field = 0;
  HE_UNROLL
  for (int byte = 0; byte < width; ++byte)
    field |= int64_t{p.bytes[i * width + byte]} << (8 * byte);
  return field;
}

// Of each chunk: the positions that its fields skip or name, and the fields that name one.
template <int width>
__global__ void __launch_bounds__(kThreads)
    count_fields_kernel(const __grid_constant__ DecodeGapsParams p) {
  constexpr int64_t escape = (int64_t{1} << 8 * width) - 1;
  int64_t advance = 0, named = 0;
  for_each_round([&](int64_t i) {
    if (i >= p.num_fields) return;
    const int64_t field = field_at<width>(p, i);
    named += field != escape;
    advance += field + (field != escape);
  });
  advance = block_sum<kThreads>(advance);
  named = block_sum<kThreads>(named);
  if (threadIdx.x) return;
  p.sums[2 * int64_t{blockIdx.x}] = advance;
  p.sums[2 * int64_t{blockIdx.x} + 1] = named;
}

template <int width>
__global__ void __launch_bounds__(kThreads)
    read_gaps_kernel(const __grid_constant__ DecodeGapsParams p) {
  constexpr int64_t escape = (int64_t{1} << 8 * width) - 1;
  const int64_t* sums = p.sums + 2 * (int64_t{blockIdx.x} - 1);
  int64_t next = p.start + (blockIdx.x ? sums[0] : 0), found = blockIdx.x ? sums[1] : 0;
  for_each_round([&](int64_t i) {
    const int64_t field = i < p.num_fields ? field_at<width>(p, i) : escape;
    const int64_t named = field != escape, advance = i < p.num_fields ? field + named : 0;
    int64_t all_advance, all_named;
    const int64_t position = next + block_offset<kThreads>(advance, all_advance) + field;
    const int64_t at = found + block_offset<kThreads>(named, all_named);
    next += all_advance;
    found += all_named;
    if (named && at < p.count) p.positions[at] = position;
  });
}

unsigned chunks_of(int64_t size) {
  return static_cast<unsigned>((size + kGapChunk - 1) / kGapChunk);
}

// Calls body(integral_constant<int, width>) for a field of 1 to 3 bytes.
template <typename Body>
void with_width(int width, const Body& body) {
  if (width == 1) return body(std::integral_constant<int, 1>{});
  if (width == 2) return body(std::integral_constant<int, 2>{});
  body(std::integral_constant<int, 3>{});
}

}  // namespace

int count_escapes_cuda(const EncodeGapsParams& params, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  count_escapes_kernel<<<chunks_of(params.count), kThreads, 0, s>>>(params);
  return cudaGetLastError();
}

int write_gaps_cuda(const EncodeGapsParams& params, int width, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned chunks = chunks_of(params.count);
  with_width(width, [&](auto bytes) {
    write_gaps_kernel<decltype(bytes)::value><<<chunks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

int count_fields_cuda(const DecodeGapsParams& params, int width, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned chunks = chunks_of(params.num_fields);
  with_width(width, [&](auto bytes) {
    count_fields_kernel<decltype(bytes)::value><<<chunks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

int read_gaps_cuda(const DecodeGapsParams& params, int width, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const unsigned chunks = chunks_of(params.num_fields);
  with_width(width, [&](auto bytes) {
    read_gaps_kernel<decltype(bytes)::value><<<chunks, kThreads, 0, s>>>(params);
  });
  return cudaGetLastError();
}

}  // namespace hybridengine
