// The last rows of a path in registers, a vector of channels at a time. Included only by *_cpu.cpp
// files.
#pragma once

#include <algorithm>

#include "causal_conv1d/params.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int64_t kTileRows = 32;  // that stay in the first-level cache with kTileChannels
constexpr int64_t kTileChannels = 256;

// A vector of channels; the last one of a row may be shorter.
struct Channels {
  int64_t begin, count;

  template <typename T>
  VecF load_from(const T* row) const {
    return count == kWidth ? load(row + begin) : load_part(row + begin, count, 0.0f);
  }
  template <typename T>
  void store_to(T* row, VecF v) const {
    if (count == kWidth) {
      store(row + begin, v);
    } else {
      store_part(row + begin, v, count);
    }
  }
};

template <typename Body>
HE_SIMD void for_channels(int64_t begin, int64_t end, const Body& body) {
  for (int64_t i = begin; i < end; i += kWidth) {
    body(Channels{i, std::min<int64_t>(kWidth, end - i)});
  }
}

// Row `distance` >= 1 before token t of a segment.
template <typename T>
HE_SIMD VecF row_before(const CausalConv1d& p, const ConvSegment& s, int64_t t, int64_t distance,
                        const Channels& channels) {
  int64_t row = t - distance;
  if (row < s.begin) row = s.before[s.begin - row - 1];
  if (row == -1) return VecF{};
  const T* from = row >= 0 ? static_cast<const T*>(p.x) + row * p.x_stride
                           : static_cast<const T*>(p.initial) + (-2 - row) * p.channels;
  return channels.load_from(from);
}

// weight[width - 1 - j] meets the row that is j before a token's.
template <int width>
struct Taps {
  Taps(const CausalConv1d& p, const Channels& channels) {
    for (int j = 0; j < width; ++j) {
      of[j] = channels.load_from(p.weight + (width - 1 - j) * p.channels);
    }
    bias = p.bias ? channels.load_from(p.bias) : VecF{};
  }

  VecF sum(const VecF (&rows)[width]) const {
    VecF total = bias;
    for (int j = width - 1; j >= 0; --j) total += of[j] * rows[j];
    return total;
  }

  VecF of[width], bias;
};

HE_SIMD VecF sigmoid(VecF x) {
  const VecF e = exp((VecF)((VecI)x | (int32_t)0x80000000));  // of -|x|
  return select(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

// Calls run(width) with the width as a constant.
template <typename Run>
void with_width(int64_t width, const Run& run) {
  if (width == 2) return run(std::integral_constant<int, 2>{});
  if (width == 3) return run(std::integral_constant<int, 3>{});
  run(std::integral_constant<int, 4>{});
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
