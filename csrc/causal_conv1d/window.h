// Rows of a path, a pair of vectors of channels at a time. Included only by *_cpu.cpp files.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "causal_conv1d/params.h"
#include "common/aligned_buffer.h"
#include "common/parallel.h"
#include "common/simd.h"
#include "common/streaming.h"

namespace hybridengine::HYBRIDENGINE_ISA {

#define HE_INLINE inline __attribute__((always_inline))

constexpr int64_t kPair = 2 * kWidth;
constexpr int64_t kTileChannels = 1024;  // of a strip; what is kept for them fits the caches
constexpr int kGroup = 4;  // rows that run together: a row before them is read once for all

// Two vectors of channels in the order in which load_pair<T> has them; the last ones of a row may
// be fewer. `at` is their place in the rows of a strip, which are padded and in that order.
template <typename T, bool full>
struct Channels {
  int64_t begin, count, at;

  void load_from(const T* row, VecF (&to)[2]) const { put(load_elements(row), to); }

  void load_floats(const float* row, VecF (&to)[2]) const {
    const VecPair v = load_elements(row);
    put(v, to);
    if constexpr (std::is_same_v<T, bf16>) {
      VecI even{};
      for (int i = 0; i < kWidth; ++i) even[i] = 2 * i;
      to[0] = __builtin_shuffle(v.a, v.b, even);
      to[1] = __builtin_shuffle(v.a, v.b, even + 1);
    }
  }

  void store_to(T* row, const VecF (&of)[2], bool streamed) const {
    if (full && streamed) {
      alignas(kCacheLine) char elements[kPair * sizeof(T)];
      store_pair(reinterpret_cast<T*>(elements), {of[0], of[1]});
      char* to = reinterpret_cast<char*>(row + begin);
      for (size_t i = 0; i < sizeof elements; i += sizeof(Line)) {
        Line line;
        std::memcpy(&line, elements + i, sizeof line);
        stream(to + i, line);
      }
    } else {
      store_elements(row, {of[0], of[1]});
    }
  }

  void store_floats(float* row, const VecF (&of)[2]) const {
    VecPair v{of[0], of[1]};
    if constexpr (std::is_same_v<T, bf16>) {
      VecI low{};
      for (int i = 0; i < kWidth; ++i) low[i] = i / 2 + i % 2 * kWidth;
      v = {__builtin_shuffle(of[0], of[1], low), __builtin_shuffle(of[0], of[1], low + kWidth / 2)};
    }
    store_elements(row, v);
  }

 private:
  static void put(VecPair v, VecF (&to)[2]) { to[0] = v.a, to[1] = v.b; }

  template <typename E>
  VecPair load_elements(const E* row) const {
    if (full) return load_pair(row + begin);
    E elements[kPair] = {};
    std::memcpy(elements, row + begin, count * sizeof(E));
    return load_pair(elements);
  }

  template <typename E>
  void store_elements(E* row, VecPair v) const {
    if (full) return store_pair(row + begin, v);
    E elements[kPair];
    store_pair(elements, v);
    std::memcpy(row + begin, elements, count * sizeof(E));
  }
};

template <typename T, typename Body>
HE_SIMD void for_channels(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kPair <= end; i += kPair) body(Channels<T, true>{i, kPair, i - begin});
  if (i < end) body(Channels<T, false>{i, end - i, i - begin});
}

// Rows of floats of a strip.
class StripRows {
 public:
  explicit StripRows(int64_t rows) : rows_(rows), data_(rows * kTileChannels) {}
  void fill_zeros() { std::fill_n(&data_[0], rows_ * kTileChannels, 0.0f); }
  void load_from(int64_t i, int64_t at, VecF (&to)[2]) const {
    const float* from = &data_[i * kTileChannels + at];
    to[0] = load(from), to[1] = load(from + kWidth);
  }
  void store_to(int64_t i, int64_t at, const VecF (&of)[2]) {
    float* to = &data_[i * kTileChannels + at];
    store(to, of[0]), store(to + kWidth, of[1]);
  }

 private:
  int64_t rows_;
  Buffer<float> data_;
};

// Row `distance` before token t of a segment.
template <typename T>
const T* row_before(const CausalConv1d& p, const ConvSegment& s, int64_t t, int64_t distance,
                    const T* zeros) {
  int64_t row = t - distance;
  if (row < s.begin) row = s.before[s.begin - row - 1];
  if (row == -1) return zeros;
  return row >= 0 ? static_cast<const T*>(p.x) + row * p.x_stride
                  : static_cast<const T*>(p.initial) + (-2 - row) * p.channels;
}

// The weights, and the bias, of a strip. weight[j] meets row j of a token's window, whose last row
// is its own.
template <typename T, int width>
class Taps {
 public:
  Taps() : rows_(width + 1) {}

  void load_strip(const CausalConv1d& p, int64_t begin, int64_t end) {
    for_channels<T>(begin, end, [&](const auto& channels) {
      for (int j = 0; j <= width; ++j) {
        VecF v[2] = {};
        const float* from = j < width ? p.weight + j * p.channels : p.bias;
        if (from) channels.load_floats(from, v);
        rows_.store_to(j, channels.at, v);
      }
    });
  }

  void load_weights(int64_t at, VecF (&of)[width][2]) const {
    for (int j = 0; j < width; ++j) rows_.load_from(j, at, of[j]);
  }
  void load_bias(int64_t at, VecF (&to)[2]) const { rows_.load_from(width, at, to); }

 private:
  StripRows rows_;
};

// sums[i] = bias + the window of row i times the weights; with `silu` gates[i] = sigmoid(sums[i]),
// which is 0 below -87 and undefined for NaN: sums[i] * gates[i] is NaN. All vectors take each step
// together: one after another they would wait for their own results.
template <int width, int count>
HE_SIMD void run_windows(const VecF (&weights)[width][2], const VecF (&bias)[2],
                         const VecF (&rows)[width - 1 + count][2], bool silu,
                         VecF (&sums)[count][2], VecF (&gates)[count][2]) {
#define HE_EACH                                           \
  _Pragma("GCC unroll 8") for (int i = 0; i < count; ++i) \
      _Pragma("GCC unroll 2") for (int h = 0; h < 2; ++h)
  HE_EACH sums[i][h] = bias[h];
#pragma GCC unroll 4
  for (int j = 0; j < width; ++j) {
    HE_EACH sums[i][h] += weights[j][h] * rows[i + j][h];
  }
  if (!silu) return;
  VecF t[count][2], r[count][2], e[count][2];
  HE_EACH t[i][h] = sums[i][h] * -1.44269504f;
#if defined(__AVX512F__)
  HE_EACH r[i][h] = (VecF)_mm512_reduce_ps((__m512)t[i][h], 0x09);
#else
  HE_EACH r[i][h] = at_least(-125.0f, t[i][h]);
  HE_EACH e[i][h] = floor(r[i][h]);
  HE_EACH r[i][h] = r[i][h] - e[i][h];
#endif
  VecF p[count][2];
  HE_EACH p[i][h] = 2.161291914e-4f * r[i][h] + 1.246784534e-3f;
  HE_EACH p[i][h] = p[i][h] * r[i][h] + 9.675451674e-3f;
  HE_EACH p[i][h] = p[i][h] * r[i][h] + 5.548528057e-2f;
  HE_EACH p[i][h] = p[i][h] * r[i][h] + 2.402293056e-1f;
  HE_EACH p[i][h] = p[i][h] * r[i][h] + 6.931470444e-1f;
  HE_EACH p[i][h] = p[i][h] * r[i][h] + 1.0f;
#if defined(__AVX512F__)
  HE_EACH e[i][h] = (VecF)_mm512_scalef_ps((__m512)p[i][h], (__m512)t[i][h]);
  HE_EACH e[i][h] = 1.0f + e[i][h];
  HE_EACH r[i][h] = (VecF)_mm512_rcp14_ps((__m512)e[i][h]);
  HE_EACH e[i][h] = 1.0f - e[i][h] * r[i][h];
  HE_EACH r[i][h] = r[i][h] + e[i][h] * r[i][h];
  HE_EACH gates[i][h] = select(t[i][h] > 126.0f, VecF{}, r[i][h]);
#else
  HE_EACH e[i][h] = (VecF)((VecI)p[i][h] + ((VecI)(e[i][h] + 12582912.0f) << 23));
  HE_EACH gates[i][h] = select(t[i][h] > 126.0f, VecF{}, 1.0f / (1.0f + e[i][h]));
#endif
#undef HE_EACH
}

// Whether rows of a result are written past the caches, in full lines.
inline bool is_streamed(const void* rows, int64_t row_bytes, int64_t count) {
  const bool aligned = (reinterpret_cast<uintptr_t>(rows) | row_bytes) % kCacheLine == 0;
  return aligned && row_bytes * count >= kStreamedBytes;
}

// Calls run(width) with the width as a constant.
template <typename Run>
void with_width(int64_t width, const Run& run) {
  if (width == 2) return run(std::integral_constant<int, 2>{});
  if (width == 3) return run(std::integral_constant<int, 3>{});
  run(std::integral_constant<int, 4>{});
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
