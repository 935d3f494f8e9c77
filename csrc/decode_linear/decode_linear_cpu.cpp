// Panels of register tiles; see params.h.
#include <algorithm>

#include "common/parallel.h"
#include "decode_linear/params.h"
#include "decode_linear/tile.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int kMostSums = 72;
constexpr int64_t kCachedRows = 128;    // of x, which stay in the cache while the weight is read
constexpr int64_t kPanelBytes = 18432;  // of the weight, which stay in the cache for all rows
// A group of 4 rows of x stays in the first cache for a panel. One that does not is multiplied part
// by part of k, by panels of more outputs; the lanes of their sums are kept between the parts.
constexpr int64_t kGroupBytes = 12288, kPartBytes = 9216;

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
  template <int kRows, bool kFew = false>
  void multiply_rows(int64_t row) const {
    using S = Shape<kRows, T, kFew>;
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
      store_tiles<S>(row, n, lanes);
    }
  }

  void multiply_all() const {
    for (int64_t row = first_row; row < last_row; row += 4) {
      if (last_row - row >= 3) {
        p.rows > 4 ? multiply_rows<4>(row) : multiply_rows<4, true>(row);
      } else if (last_row - row == 2) {
        multiply_rows<2>(row);
      } else {
        multiply_rows<1>(row);
      }
    }
  }

  // Joins the lanes of the sums from output n on, adds the bias, rounds and stores.
  template <typename S>
  void store_tiles(int64_t row, int64_t n, const VecF* lanes) const {
    constexpr int kRows = S::kSums / S::kOutputs;
    const auto* bias = static_cast<const T*>(p.bias);
    Out rounded[S::kTiles][kRows][S::kOutputs];
    float added[S::kTiles][kRows][S::kOutputs];
    for (int t = 0; bias && t < S::kTiles; ++t) {
      for (int o = 0; o < S::kOutputs; ++o) {
        const float value = to_float(bias[std::min(n + t * S::kOutputs + o, end - 1)]);
        for (int r = 0; r < kRows; ++r) added[t][r][o] = value;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < S::kTiles * S::kSums; i += kWidth) {
      const VecF sums = join_lanes(lanes + i);
      store(&rounded[0][0][0] + i, bias ? sums + load(&added[0][0][0] + i) : sums);
    }
    const int64_t rows = std::min<int64_t>(kRows, p.rows - row);
    for (int t = 0; t < S::kTiles && n < end; ++t, n += S::kOutputs) {
      Out* out = static_cast<Out*>(p.out) + row * p.n + n;
      const int64_t outputs = std::min<int64_t>(S::kOutputs, end - n);
      for (int64_t r = 0; r < rows; ++r, out += p.n) {
        if (outputs == S::kOutputs) {
          std::memcpy(out, rounded[t][r], sizeof rounded[t][r]);
        } else {
          std::memcpy(out, rounded[t][r], outputs * sizeof(Out));
        }
      }
    }
  }
};

template <typename T, typename Out>
void multiply(const DecodeLinear& p) {
  constexpr int64_t kItem = sizeof(T);
  const int64_t group = p.rows > 2 ? 4 : p.rows, bytes = group * p.k * kItem;  // of rows
  const int64_t parts = bytes > kGroupBytes ? (bytes + kPartBytes - 1) / kPartBytes : 1;
  const int64_t part = std::max<int64_t>(1, (p.k + parts * kStep - 1) / (parts * kStep)) * kStep;
  const int64_t fitting = parts > 1 ? std::min(kMostSums / group, 2 * kPanelBytes / (part * kItem))
                                    : kPanelBytes / (p.k * kItem + 1);
  const auto outputs = [](auto shape) {
    return decltype(shape)::kTiles * decltype(shape)::kOutputs;
  };
  const int64_t unit = p.rows > 4   ? outputs(Shape<4, T>{})
                       : p.rows > 2 ? outputs(Shape<4, T, true>{})
                                    : outputs(Shape<1, T>{});
  const int64_t panel_size = std::max<int64_t>(1, fitting / unit) * unit;
  const int64_t panels = (p.n + panel_size - 1) / panel_size;
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
  with_factor<float, bf16>(p.dtype, [&](auto type) {
    using T = decltype(type);
    p.out_dtype == DType::f32 ? multiply<T, float>(p) : multiply<T, T>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
