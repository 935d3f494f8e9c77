// Register tiles of dot products; see params.h.
#include <algorithm>
#include <type_traits>

#include "common/parallel.h"
#include "common/simd.h"
#include "decode_linear/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int kSums = 16;  // sums of a register tile, kRows x kOutputs
#else
constexpr int kSums = 8;
#endif
constexpr int64_t kStep = 2 * kWidth;   // elements of a load
constexpr int64_t kLine = 64;           // bytes of a cache line
constexpr int64_t kCachedRows = 128;    // of x, which stay in the cache while the weight is read
constexpr int64_t kPanelBytes = 16384;  // of the weight, which stay in the cache for all rows

// One load of an operand: 2 * kWidth elements. The order of the elements is that of load_pair.
#if defined(__AVX512BF16__)
template <typename T>
using Step = std::conditional_t<std::is_same_v<T, bf16>, VecU, VecPair>;

// Rounds after each of the two products; subnormal numbers count as zero.
HE_SIMD VecF multiply_add(VecU a, VecU b, VecF sum) {
  return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
template <typename T>
using Step = VecPair;
#endif

HE_SIMD VecF multiply_add(VecPair a, VecPair b, VecF sum) { return a.b * b.b + (a.a * b.a + sum); }

template <typename T>
HE_SIMD Step<T> load_step(const T* p) {
  if constexpr (std::is_same_v<Step<T>, VecPair>) {
    return load_pair(p);
  } else {
    Step<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
}

// The last count < 2 * kWidth elements, followed by zeros.
template <typename T>
Step<T> load_last_step(const T* p, int64_t count) {
  T padded[2 * kWidth] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load_step(padded);
}

// Lane i of the result is the sum of the lanes of sums[i], joined pairwise: neighbours first.
template <int half = 1>
HE_SIMD VecF join_lanes(const VecF* sums) {
  VecI low{}, high{};
  for (int j = 0; j < kWidth; ++j) {
    low[j] = j & half ? kWidth + j - half : j;
    high[j] = j & half ? kWidth + j : j + half;
  }
  VecF joined[kWidth / 2];
  constexpr int count = kWidth / (2 * half);
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    const VecF a = sums[2 * i], b = sums[2 * i + 1];
    joined[i] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
  }
  if constexpr (count == 1) {
    return joined[0];
  } else {
    return join_lanes<2 * half>(joined);
  }
}

// A tile reads up to 4 rows of x and kSums / 4 to kSums rows of the weight, and prefetches the rows
// of the weight that are `ahead` elements further, from element ahead_begin to ahead_end.
template <typename T>
struct Tile {
  const T* x[4];
  const T* weight[kSums];
  int64_t k;
  int64_t ahead, ahead_begin, ahead_end;
};

// sums[r * kOutputs + o] = x[r] . weight[o]
template <int kRows, int kOutputs, typename T>
HE_SIMD void multiply_tile(const Tile<T>& tile, float* result) {
  VecF sums[kSums] = {};
  const auto add = [&](auto load_at) __attribute__((always_inline)) {
    Step<T> w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) w[o] = load_at(tile.weight[o]);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Step<T> x = load_at(tile.x[r]);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        sums[r * kOutputs + o] = multiply_add(x, w[o], sums[r * kOutputs + o]);
      }
    }
  };
  int64_t k = 0;
  for (; k + kStep <= tile.k; k += kStep) {
    if (k >= tile.ahead_begin && k < tile.ahead_end) {
      for (int o = 0; o < kOutputs; ++o) {
        const char* ahead = reinterpret_cast<const char*>(tile.weight[o] + tile.ahead + k);
        for (int64_t i = 0; i < kStep * int64_t{sizeof(T)}; i += kLine) {
          __builtin_prefetch(ahead + i, 0, 2);
        }
      }
    }
    add([k](const T* p) __attribute__((always_inline)) { return load_step(p + k); });
  }
  if (k < tile.k) {
    const int64_t count = tile.k - k;
    add([k, count](const T* p) { return load_last_step(p + k, count); });
  }
#pragma GCC unroll 4
  for (int i = 0; i < kSums; i += kWidth) store(result + i, join_lanes(sums + i));
}

// Rows of x and outputs that share one pass over a panel of the weight.
template <typename T, typename Out>
struct Panel {
  const DecodeLinear& p;
  int64_t first_row, last_row;
  int64_t begin, end;  // outputs
  int64_t ahead;       // distance of the next panel, in rows of the weight

  // The rows from `row` on. Rows and outputs past the end are computed from the last ones and not
  // stored. Each group of rows prefetches an equal part of the next panel.
  template <int kRows>
  void multiply_rows(int64_t row) const {
    constexpr int kOutputs = kSums / kRows;
    const int64_t group = (row - first_row) / 4, groups = (last_row - first_row + 3) / 4;
    Tile<T> tile;
    for (int r = 0; r < kRows; ++r) {
      tile.x[r] = static_cast<const T*>(p.x) + std::min(row + r, p.rows - 1) * p.x_stride;
    }
    tile.k = p.k;
    tile.ahead = ahead * p.weight_stride;
    tile.ahead_begin = p.k * group / groups;
    tile.ahead_end = p.k * (group + 1) / groups;
    const auto* weight = static_cast<const T*>(p.weight);
    for (int64_t n = begin; n < end; n += kOutputs) {
      for (int o = 0; o < kOutputs; ++o) {
        tile.weight[o] = weight + std::min(n + o, p.n - 1) * p.weight_stride;
      }
      float sums[kSums];
      multiply_tile<kRows, kOutputs>(tile, sums);
      store_tile<kOutputs>(row, std::min<int64_t>(kRows, p.rows - row), n, sums);
    }
  }

  template <int kOutputs>
  void store_tile(int64_t row, int64_t rows, int64_t n, float* sums) const {
    if (p.bias) {
      for (int i = 0; i < kSums; ++i) {
        sums[i] += to_float(static_cast<const T*>(p.bias)[std::min(n + i % kOutputs, p.n - 1)]);
      }
    }
    Out rounded[kSums];
    for (int i = 0; i < kSums; i += kWidth) store(rounded + i, load(sums + i));
    Out* out = static_cast<Out*>(p.out) + row * p.n + n;
    const int64_t outputs = std::min<int64_t>(kOutputs, p.n - n);
    for (int64_t r = 0; r < rows; ++r, out += p.n) {
      const Out* from = rounded + r * kOutputs;
      if (outputs == kOutputs) {
        std::memcpy(out, from, kOutputs * sizeof(Out));
      } else {
        std::memcpy(out, from, outputs * sizeof(Out));
      }
    }
  }
};

template <typename T, typename Out>
void multiply(const DecodeLinear& p) {
  const int64_t fitting = kPanelBytes / (p.k * static_cast<int64_t>(sizeof(T)) + 1);
  const int64_t panel_size = std::max<int64_t>(1, fitting / kSums) * kSums;
  const int64_t panels = (p.n + panel_size - 1) / panel_size;
  parallel_for(panels, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t first = 0; first < p.rows; first += kCachedRows) {
      const int64_t last = std::min(first + kCachedRows, p.rows);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t n = i * panel_size;
        const Panel<T, Out> panel{p, first, last, n, std::min(n + panel_size, p.n), panel_size};
        for (int64_t row = first; row < last; row += 4) {
          if (last - row >= 3) {
            panel.template multiply_rows<4>(row);
          } else if (last - row == 2) {
            panel.template multiply_rows<2>(row);
          } else {
            panel.template multiply_rows<1>(row);
          }
        }
      }
    }
  });
}

}  // namespace

void decode_linear_cpu(const DecodeLinear& p) {
  if (p.dtype == DType::f32) {
    multiply<float, float>(p);
  } else if (p.out_dtype == DType::f32) {
    multiply<bf16, float>(p);
  } else {
    multiply<bf16, bf16>(p);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
