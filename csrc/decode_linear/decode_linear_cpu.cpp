// Register tiles of dot products; see params.h.
#include <algorithm>
#include <type_traits>

#include "common/parallel.h"
#include "common/simd.h"
#include "decode_linear/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// A register tile has kRows x kOutputs sums; as many tiles are joined at a time as fill vectors.
template <int kRows, typename T>
struct Shape {
#if defined(__AVX512F__)
  static constexpr int kOutputs = 16 / kRows, kTiles = 1;
#elif defined(__AVX2__)
  // 12 sums, 3 outputs and 1 row: 16 registers. A conversion from bfloat16 needs one for a mask.
  static constexpr bool kFull = kRows == 4 && std::is_same_v<T, float>;
  static constexpr int kOutputs = kFull ? 3 : 8 / kRows, kTiles = kFull ? 2 : 1;
#else
  static constexpr int kOutputs = 8 / kRows, kTiles = 1;
#endif
  static constexpr int kSums = kRows * kOutputs;
  static_assert(kTiles * kSums % kWidth == 0);
};
constexpr int kMostOutputs = 16, kMostSums = 24;
constexpr int64_t kStep = 2 * kWidth;   // elements of a load
constexpr int64_t kLine = 64;           // bytes of a cache line
constexpr int64_t kCachedRows = 128;    // of x, which stay in the cache while the weight is read
constexpr int64_t kPanelBytes = 18432;  // of the weight, which stay in the cache for all rows

// One load of an operand: 2 * kWidth elements. The order of the elements is that of load_pair.
// It is multiplied in kParts<T> parts: its two halves, or all of it as pairs.
#if defined(__AVX512BF16__)
template <typename T>
constexpr int kParts = std::is_same_v<T, bf16> ? 1 : 2;

// Rounds after each of the two products; subnormal numbers count as zero.
HE_SIMD VecF multiply_add(VecU a, VecU b, VecF sum) {
  return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
template <typename T>
constexpr int kParts = 2;
#endif

HE_SIMD VecF multiply_add(VecF a, VecF b, VecF sum) { return a * b + sum; }

template <int part, typename T>
HE_SIMD auto load_part_of_step(const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    return load(p + part * kWidth);
  } else {
    VecU bits;
    std::memcpy(&bits, p, sizeof bits);
    if constexpr (kParts<T> == 1) {
      return bits;
    } else {
      return (VecF)(part == 0 ? bits << 16 : bits & 0xFFFF0000u);
    }
  }
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

// A tile reads up to 4 rows of x and kOutputs rows of the weight, and prefetches the rows of the
// weight that are `ahead` elements further, from element ahead_begin to ahead_end.
template <typename T>
struct Tile {
  const T* x[4];
  const T* weight[kMostOutputs];
  int64_t k;
  int64_t ahead, ahead_begin, ahead_end;
};

// result[r * kOutputs + o] (+)= the lanes of x[r] . weight[o].
template <int kRows, int kOutputs, typename T>
HE_SIMD void multiply_tile(const Tile<T>& tile, VecF* result, bool accumulate) {
  VecF sums[kRows * kOutputs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kOutputs; ++i) sums[i] = accumulate ? result[i] : VecF{};
  const auto add_part = [&](auto part, const Tile<T>& from,
                            int64_t k) __attribute__((always_inline)) {
    decltype(load_part_of_step<0>(from.x[0])) w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) w[o] = load_part_of_step<part>(from.weight[o] + k);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto x = load_part_of_step<part>(from.x[r] + k);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        sums[r * kOutputs + o] = multiply_add(x, w[o], sums[r * kOutputs + o]);
      }
    }
  };
  const auto add_step = [&](const Tile<T>& from, int64_t k) __attribute__((always_inline)) {
    add_part(std::integral_constant<int, 0>{}, from, k);
    if constexpr (kParts<T> == 2) add_part(std::integral_constant<int, 1>{}, from, k);
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
    add_step(tile, k);
  }
  if (k < tile.k) {
    T padded[kRows + kOutputs][kStep] = {};
    Tile<T> last;
    const auto pad = [&](int i, const T* from) {
      std::memcpy(padded[i], from + k, (tile.k - k) * sizeof(T));
      return padded[i];
    };
    for (int r = 0; r < kRows; ++r) last.x[r] = pad(r, tile.x[r]);
    for (int o = 0; o < kOutputs; ++o) last.weight[o] = pad(kRows + o, tile.weight[o]);
    add_step(last, 0);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kOutputs; ++i) result[i] = sums[i];
}

// Rows of x and outputs that share one pass over a panel of the weight.
template <typename T, typename Out>
struct Panel {
  const DecodeLinear& p;
  int64_t first_row, last_row;
  int64_t begin, end;          // outputs
  int64_t ahead;               // distance of the next panel, in rows of the weight
  int64_t first_k, last_k;     // multiples of kStep but for the end of k
  VecF (*carried)[kMostSums];  // lanes of each group of rows, between parts of k

  // The rows from `row` on. Rows and outputs past the end are computed from the last ones and not
  // stored. Each group of rows prefetches an equal part of the next panel.
  template <int kRows>
  void multiply_rows(int64_t row) const {
    using S = Shape<kRows, T>;
    const int64_t group = (row - first_row) / 4, groups = (last_row - first_row + 3) / 4;
    Tile<T> tile;
    for (int r = 0; r < kRows; ++r) {
      tile.x[r] = p.x.row<T>(std::min(row + r, p.rows - 1)) + first_k;
    }
    tile.k = last_k - first_k;
    tile.ahead = ahead * p.weight.stride;
    tile.ahead_begin = tile.k * group / groups;
    tile.ahead_end = tile.k * (group + 1) / groups;
    const bool is_whole = first_k == 0 && last_k == p.k;
    for (int64_t n = begin; n < end; n += S::kTiles * S::kOutputs) {
      VecF* lanes = carried[group] + (is_whole ? 0 : (n - begin) * kRows);
      for (int t = 0; t < S::kTiles; ++t) {
        for (int o = 0; o < S::kOutputs; ++o) {
          tile.weight[o] = p.weight.row<T>(std::min(n + t * S::kOutputs + o, end - 1)) + first_k;
        }
        multiply_tile<kRows, S::kOutputs>(tile, lanes + t * S::kSums, first_k > 0);
      }
      if (last_k < p.k) continue;
      float sums[S::kTiles * S::kSums];
#pragma GCC unroll 4
      for (int i = 0; i < S::kTiles * S::kSums; i += kWidth) store(sums + i, join_lanes(lanes + i));
      for (int t = 0; t < S::kTiles && n + t * S::kOutputs < end; ++t) {
        store_tile<S::kOutputs>(row, std::min<int64_t>(kRows, p.rows - row), n + t * S::kOutputs,
                                sums + t * S::kSums);
      }
    }
  }

  void multiply_all() const {
    for (int64_t row = first_row; row < last_row; row += 4) {
      if (last_row - row >= 3) {
        multiply_rows<4>(row);
      } else if (last_row - row == 2) {
        multiply_rows<2>(row);
      } else {
        multiply_rows<1>(row);
      }
    }
  }

  template <int kOutputs>
  void store_tile(int64_t row, int64_t rows, int64_t n, const float* sums) const {
    Out* out = static_cast<Out*>(p.out) + row * p.n + n;
    const auto* bias = static_cast<const T*>(p.bias);
    const int64_t outputs = std::min<int64_t>(kOutputs, end - n);
    for (int64_t r = 0; r < rows; ++r, out += p.n, sums += kOutputs) {
      if (outputs == kOutputs && !bias) {
        for (int o = 0; o < kOutputs; ++o) out[o] = convert<float, Out>(sums[o]);
      } else {
        for (int o = 0; o < outputs; ++o) {
          out[o] = convert<float, Out>(bias ? sums[o] + to_float(bias[n + o]) : sums[o]);
        }
      }
    }
  }
};

template <typename T, typename Out>
void multiply(const DecodeLinear& p) {
  constexpr int64_t kItem = sizeof(T);
  const int64_t fitting = kPanelBytes / (p.k * kItem + 1);
  const int64_t unit =
      p.rows > 2 ? Shape<4, T>::kTiles * Shape<4, T>::kOutputs : Shape<1, T>::kOutputs;
  const int64_t panel_size = std::max<int64_t>(1, fitting / unit) * unit;
  const int64_t panels = (p.n + panel_size - 1) / panel_size;
  // A panel that does not fit, which has `unit` outputs then, is multiplied part by part of k.
  const bool splits = fitting < unit && p.rows > 4;
  const int64_t parts = splits ? (p.k * kItem * unit + kPanelBytes - 1) / kPanelBytes : 1;
  const int64_t part = std::max<int64_t>(1, (p.k + parts * kStep - 1) / (parts * kStep)) * kStep;
  parallel_for(panels, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    VecF carried[kCachedRows / 4][kMostSums];
    Panel<T, Out> panel{p, 0, 0, 0, 0, panel_size, 0, 0, carried};
    for (int64_t first = 0; first < p.rows; first += kCachedRows) {
      panel.first_row = first, panel.last_row = std::min(first + kCachedRows, p.rows);
      for (int64_t i = begin; i < end; ++i) {
        panel.begin = i * panel_size, panel.end = std::min(panel.begin + panel_size, p.n);
        for (int64_t k = 0; k == 0 || k < p.k; k += part) {
          panel.first_k = k, panel.last_k = std::min(k + part, p.k);
          panel.multiply_all();
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
