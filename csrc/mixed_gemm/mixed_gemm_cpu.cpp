// Packing and tiling around oneDNN's 16-bit GEMM; see params.h.
#include <algorithm>
#include <cstring>
#include <memory>

#include "common/parallel.h"
#include "common/simd.h"
#include "common/streaming.h"
#include "common/transpose.h"
#include "mixed_gemm/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// out[j, i] = in[i, j] for i < rows, j < columns, 32-bit elements at any 16-bit address.
void transpose(const uint16_t* in, int64_t in_stride, int64_t rows, int64_t columns, uint16_t* out,
               int64_t out_stride) {
  const auto move = [&](int64_t i, int64_t j) {
    std::memcpy(out + j * out_stride + 2 * i, in + i * in_stride + 2 * j, 4);
  };
  int64_t i = 0;
  for (; i + kWidth <= rows; i += kWidth) {
    int64_t j = 0;
    for (; j + kWidth <= columns; j += kWidth) {
      VecU block[kWidth];
      for (int r = 0; r < kWidth; ++r) {
        std::memcpy(&block[r], in + (i + r) * in_stride + 2 * j, sizeof(VecU));
      }
      swap_blocks<1>(block);
      for (int r = 0; r < kWidth; ++r) {
        std::memcpy(out + (j + r) * out_stride + 2 * i, &block[r], sizeof(VecU));
      }
    }
    for (; j < columns; ++j)
      for (int r = 0; r < kWidth; ++r) move(i + r, j);
  }
  for (; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) move(i, j);
}

// out[k / 2, i, k % 2] = in[k, i]: two neighbours along k side by side.
void interleave(const uint16_t* in, int64_t in_stride, int64_t depth, int64_t count, uint16_t* out,
                int64_t out_stride) {
  for (int64_t k = 0; k + 1 < depth; k += 2) {
    const uint16_t *even = in + k * in_stride, *odd = even + in_stride;
    uint16_t* pairs = out + k / 2 * out_stride;
    for (int64_t i = 0; i < count; ++i) {
      pairs[2 * i] = even[i];
      pairs[2 * i + 1] = odd[i];
    }
  }
  if (depth % 2) {
    const uint16_t* even = in + (depth - 1) * in_stride;
    uint16_t* pairs = out + depth / 2 * out_stride;
    for (int64_t i = 0; i < count; ++i) pairs[2 * i] = even[i];
  }
}

// Rows [begin, begin + count) of `x` as [kTileRows, depth], padded with zeros.
void pack_rows(const Operand& x, int64_t begin, int64_t count, int64_t k, uint16_t* out) {
  const int64_t depth = padded_depth(k);
  if (x.k_stride == 1) {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(out + i * depth, x.data + (begin + i) * x.stride, 2 * k);
      std::memset(out + i * depth + k, 0, 2 * (depth - k));
    }
  } else {
    uint16_t pairs[64 * kTileRows];  // of 64 steps of k
    for (int64_t from = 0; from < depth; from += 64) {
      const int64_t steps = std::min<int64_t>(64, depth - from);
      std::memset(pairs, 0, sizeof pairs);
      interleave(x.data + begin + from * x.k_stride, x.k_stride,
                 std::min(steps, std::max<int64_t>(0, k - from)), count, pairs, 2 * kTileRows);
      transpose(pairs, 2 * kTileRows, steps / 2, count, out + from, depth);
    }
  }
  std::memset(out + count * depth, 0, 2 * (kTileRows - count) * depth);
}

// Rows [begin, begin + count) of `x` as [depth / 2, kTileColumns, 2], padded with zeros.
void pack_columns(const Operand& x, int64_t begin, int64_t count, int64_t k, uint16_t* out) {
  const int64_t depth = padded_depth(k);
  if (count < kTileColumns) std::memset(out, 0, 2 * depth * kTileColumns);
  std::memset(out + k / 2 * 2 * kTileColumns, 0, 2 * (depth - k / 2 * 2) * kTileColumns);
  if (x.k_stride == 1) {
    const uint16_t* first = x.data + begin * x.stride;
    transpose(first, x.stride, count, k / 2, out, 2 * kTileColumns);
    if (k % 2) {
      uint16_t* last = out + k / 2 * 2 * kTileColumns;
      for (int64_t i = 0; i < count; ++i) last[2 * i] = first[i * x.stride + k - 1];
    }
  } else {
    interleave(x.data + begin, x.k_stride, k, count, out, 2 * kTileColumns);
  }
}

constexpr int64_t kCachedBytes = 16 << 20;  // a larger result leaves the cache before it is read

void write_tile(const MixedGemm& p, int64_t row, int64_t column, const float* tile) {
  const bool around_cache = p.m * p.n * static_cast<int64_t>(sizeof(float)) > kCachedBytes;
  const int64_t rows = std::min(kTileRows, p.m - row);
  const int64_t columns = std::min(kTileColumns, p.n - column);
  for (int64_t i = 0; i < rows; ++i, tile += kTileColumns) {
    float* out = p.out + (row + i) * p.out_stride + column;
    if (p.accumulate) {
      for (int64_t j = 0; j < columns; ++j) out[j] += tile[j];
    } else if (p.bias) {
      for (int64_t j = 0; j < columns; ++j) out[j] = tile[j] + p.bias[column + j];
    } else if (around_cache && columns == kTileColumns &&
               bytes_to_line(reinterpret_cast<char*>(out)) == 0) {
      stream_copy(reinterpret_cast<char*>(out), reinterpret_cast<const char*>(tile),
                  kTileColumns * sizeof(float));
    } else {
      std::memcpy(out, tile, columns * sizeof(float));
    }
  }
}

}  // namespace

void mixed_gemm_cpu(const MixedGemm& p) {
  const int64_t depth = padded_depth(p.k);
  const auto pack = [&](bool as_rows, int64_t index, uint16_t* out) {
    const int64_t tile = as_rows ? kTileRows : kTileColumns, begin = index * tile;
    const int64_t count = std::min(tile, (as_rows ? p.m : p.n) - begin);
    (as_rows ? pack_rows : pack_columns)(as_rows ? p.a : p.b, begin, count, p.k, out);
  };
  const int64_t row_tiles = (p.m + kTileRows - 1) / kTileRows;
  const int64_t column_tiles = (p.n + kTileColumns - 1) / kTileColumns;
  const int64_t shared_tiles = p.share_a ? row_tiles : column_tiles;
  const int64_t shared_size = (p.share_a ? kTileRows : kTileColumns) * depth;
  parallel_for(shared_tiles, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) pack(p.share_a, i, p.shared + i * shared_size);
  });
  const int64_t own_tiles = p.share_a ? column_tiles : row_tiles;
  parallel_for(own_tiles, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<uint16_t[]> own(new uint16_t[kTileColumns * depth]);
    alignas(64) float tile[kTileRows * kTileColumns];
    for (int64_t i = begin; i < end; ++i) {
      pack(!p.share_a, i, own.get());
      for (int64_t j = 0; j < shared_tiles; ++j) {
        const uint16_t* other = p.shared + j * shared_size;
        const uint16_t* rows = p.share_a ? other : own.get();
        const uint16_t* columns = p.share_a ? own.get() : other;
        for (int64_t k = 0; k < depth; k += kTileDepth) {
          p.multiply_tile(std::min(kTileDepth, depth - k), depth, k > 0, rows + k,
                          columns + k * kTileColumns, tile);
        }
        write_tile(p, (p.share_a ? j : i) * kTileRows, (p.share_a ? i : j) * kTileColumns, tile);
      }
    }
    stream_fence();
    p.release();
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
