// Packing on CUDA: one block per padded row for the layout, one per tile of rows for the copy.
#include <cuda_runtime.h>

#include "common/block_scan.h"
#include "packing/params.h"

namespace hybridengine {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

template <typename Mask>
__device__ bool is_token(const PackLayoutParams& p, int64_t b, int64_t l) {
  return l < p.seqlen && static_cast<const Mask*>(p.mask)[b * p.mask_row_stride + l] != 0;
}

// One block per padded row.
template <typename Mask>
__global__ void __launch_bounds__(kThreads) count_kernel(PackLayoutParams p) {
  const int64_t b = blockIdx.x;
  int64_t count = 0;
  for (int64_t l = threadIdx.x; l < p.seqlen; l += kThreads) count += is_token<Mask>(p, b, l);
  count = block_sum<kThreads>(count);
  if (threadIdx.x == 0) p.counts[b] = count;
}

// The number of tokens in lower threads of the block; `total` is set to the number in all of them.
__device__ int block_rank(bool unmasked, int& total) {
  __shared__ int warp_counts[kWarps];
  const unsigned ballot = __ballot_sync(kFullWarp, unmasked);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) warp_counts[warp] = __popc(ballot);
  __syncthreads();
  int rank = __popc(ballot & ((1u << lane) - 1));
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) rank += warp_counts[w];
    total += warp_counts[w];
  }
  return rank;
}

__device__ int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// One block per padded row; every block adds up the counts before its row itself.
template <typename Mask>
__global__ void __launch_bounds__(kThreads) layout_kernel(PackLayoutParams p) {
  const int64_t b = blockIdx.x;
  int64_t before = 0;
  for (int64_t i = threadIdx.x; i < b; i += kThreads) before += p.counts[i];
  const int64_t first = block_sum<kThreads>(before);
  int64_t position = 0;
  for (int64_t base = 0; base < p.seqlen; base += kThreads) {
    const int64_t l = base + threadIdx.x;
    const bool unmasked = is_token<Mask>(p, b, l);
    int total;
    const int64_t rank = position + block_rank(unmasked, total);
    const int64_t out = first + rank;
    const bool fits = unmasked && out < p.capacity;
    if (fits) {
      p.indices[out] = b * p.seqlen + l;
      p.position_ids[out] = rank;
    }
    if (l < p.seqlen) p.inverse[b * p.seqlen + l] = fits ? out : -1;
    position += total;
  }
  if (threadIdx.x == 0) {
    if (b == 0) p.cu_seqlens[0] = 0;
    p.cu_seqlens[b + 1] = static_cast<int32_t>(min_of(first + position, p.capacity));
  }
  if (b != p.batch - 1) return;
  const int64_t end = first + position;  // the last block also writes the rows past the end
  if (threadIdx.x == 0) *p.num_dropped = end > p.capacity ? end - p.capacity : 0;
  for (int64_t t = end + threadIdx.x; t < p.capacity; t += kThreads) {
    p.indices[t] = -1;
    p.position_ids[t] = 0;
  }
}

// A block moves kTileBytes of one tensor at a time, in units of the widest type its rows allow.
constexpr int kTileBytes = 32768;
constexpr int kBatch = 4;  // units that a thread loads before it stores the first

template <typename Unit>
__device__ Unit fill_unit(uint64_t bits, int element_size) {
  for (int width = element_size * 8; width < 64; width *= 2) bits |= bits << width;
  Unit unit;
  char* bytes = reinterpret_cast<char*>(&unit);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Unit)); ++i) bytes[i] = bits >> (i % 8 * 8);
  return unit;
}

// source / p.source_inner, exact while rows * length stays below 2^64.
__device__ int64_t outer_index(const MoveRowsParams& p, int64_t source) {
  return p.source_inner == 1 ? source : __umul64hi(source, p.inverse_inner);
}

// All loads of a batch are issued before the first is used: indices, then rows.
template <typename Unit>
__device__ void move_tile(const MoveRowsParams& p, const RowTensor& t, int64_t first, int rows) {
  const unsigned units = static_cast<unsigned>(t.row_bytes / sizeof(Unit)), end = rows * units;
  const Unit fill = fill_unit<Unit>(t.fill, t.element_size);
  const int64_t outer_skip = t.outer_stride - p.source_inner * t.inner_stride;
  Unit* destination = reinterpret_cast<Unit*>(t.destination + first * t.row_bytes);
  for (unsigned begin = threadIdx.x; begin < end; begin += kThreads * kBatch) {
    int64_t row[kBatch], source[kBatch], position[kBatch];
    unsigned unit[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const unsigned u = begin + i * kThreads, local = u / units;
      unit[i] = u - local * units;
      row[i] = first + local + t.shift;
      const bool inside = u < end && row[i] < p.rows;
      source[i] = inside ? __ldg(p.index + row[i]) : -1;
      position[i] = inside && t.shift ? __ldg(p.position_ids + row[i]) : 1;
    }
    Unit values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool copied = source[i] >= 0 && source[i] < p.source_rows && position[i] != 0;
      const char* at =
          t.source + source[i] * t.inner_stride + outer_index(p, source[i]) * outer_skip;
      values[i] = fill;
      if (copied) values[i] = __ldcs(reinterpret_cast<const Unit*>(at) + unit[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (begin + i * kThreads < end) destination[begin + i * kThreads] = values[i];
  }
}

__device__ int rows_per_tile(int64_t row_bytes) {
  return row_bytes >= kTileBytes ? 1 : static_cast<int>(kTileBytes / row_bytes);
}

__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveRowsParams p) {
  const RowTensor& t = p.tensors[blockIdx.y];
  const int64_t per_tile = rows_per_tile(t.row_bytes);
  const uint64_t common = reinterpret_cast<uint64_t>(t.source) |
                          reinterpret_cast<uint64_t>(t.destination) | t.row_bytes | t.outer_stride |
                          t.inner_stride;
  for (int64_t first = blockIdx.x * per_tile; first < p.rows; first += gridDim.x * per_tile) {
    const int rows = static_cast<int>(min_of(per_tile, p.rows - first));
    if (common % 16 == 0)
      move_tile<uint4>(p, t, first, rows);
    else if (common % 8 == 0)
      move_tile<uint2>(p, t, first, rows);
    else if (common % 4 == 0)
      move_tile<unsigned int>(p, t, first, rows);
    else if (common % 2 == 0)
      move_tile<unsigned short>(p, t, first, rows);
    else
      move_tile<unsigned char>(p, t, first, rows);
  }
}

}  // namespace

int pack_count_cuda(const PackLayoutParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_mask_type(
      p, [&](auto element) { count_kernel<decltype(element)><<<p.batch, kThreads, 0, s>>>(p); });
  return cudaGetLastError();
}

int pack_layout_cuda(const PackLayoutParams& p, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  with_mask_type(
      p, [&](auto element) { layout_kernel<decltype(element)><<<p.batch, kThreads, 0, s>>>(p); });
  return cudaGetLastError();
}

int move_rows_cuda(const MoveRowsParams& p, void* stream) {
  MoveRowsParams params = p;
  params.inverse_inner = ~uint64_t{0} / p.source_inner + 1;
  int64_t tiles = 1;  // of the widest tensor; surplus blocks of the others return at once
  for (int i = 0; i < p.num_tensors; ++i) {
    const int64_t per_tile =
        p.tensors[i].row_bytes >= kTileBytes ? 1 : kTileBytes / p.tensors[i].row_bytes;
    const int64_t needed = (p.rows + per_tile - 1) / per_tile;
    tiles = needed > tiles ? needed : tiles;
  }
  const dim3 grid(static_cast<unsigned>(tiles < 65536 ? tiles : 65536), p.num_tensors);
  move_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}

}  // namespace hybridengine
