// The forward; see params.h.
#include "causal_conv1d/window.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kTileRows = 64;

// `count` rows of a strip from token t of a segment.
template <typename T, int width, int count>
void run_rows(const CausalConv1dForward& p, const ConvSegment& s, int64_t t, int64_t begin,
              int64_t end, const Taps<T, width>& taps, const T* zeros, bool streamed) {
  const T* from[width - 1 + count];
  for (int j = 0; j < width - 1 + count; ++j) {
    from[j] = row_before(p, s, t, width - 1 - j, zeros);
  }
  T* out = static_cast<T*>(p.out) + t * p.channels;
  for_channels<T>(begin, end, [&](const auto& channels) __attribute__((always_inline)) {
    VecF weights[width][2], bias[2], rows[width - 1 + count][2], sums[count][2], gates[count][2];
    taps.load_weights(channels.at, weights);
    taps.load_bias(channels.at, bias);
    for (int j = 0; j < width - 1 + count; ++j) channels.load_from(from[j], rows[j]);
    run_windows<width, count>(weights, bias, rows, p.silu, sums, gates);
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      if (p.silu) {
        sums[i][0] *= gates[i][0];
        sums[i][1] *= gates[i][1];
      }
      channels.store_to(out + i * p.channels, sums[i], streamed);
    }
  });
}

template <typename T, int width>
void forward(const CausalConv1dForward& p) {
  const std::vector<T> zeros(p.channels);
  const bool streamed = is_streamed(p.out, p.channels * sizeof(T), p.tokens);
  const int64_t blocks = (p.tokens + kTileRows - 1) / kTileRows;
  parallel_for(blocks, 1, p.num_threads, [&](int64_t first, int64_t last) {
    Taps<T, width> taps;
    const int64_t end = std::min(p.tokens, last * kTileRows);
    auto segment = std::partition_point(p.segments->begin(), p.segments->end(),
                                        [&](const auto& s) { return s.end <= first * kTileRows; });
    for (int64_t t = first * kTileRows; t < end;) {
      while (segment->end <= t) ++segment;
      const int64_t stop = std::min({end, segment->end, t + kTileRows});
      for (int64_t c = 0; c < p.channels; c += kTileChannels) {
        const int64_t c_end = std::min(p.channels, c + kTileChannels);
        taps.load_strip(p, c, c_end);
        int64_t row = t;
        for (; row + kGroup <= stop; row += kGroup) {
          run_rows<T, width, kGroup>(p, *segment, row, c, c_end, taps, zeros.data(), streamed);
        }
        for (; row < stop; ++row) {
          run_rows<T, width, 1>(p, *segment, row, c, c_end, taps, zeros.data(), streamed);
        }
      }
      t = stop;
    }
    stream_fence();
  });
}

}  // namespace

void causal_conv1d_cpu(const CausalConv1dForward& p) {
  with_width(p.width, [&](auto width) {
    if (p.dtype == DType::f32) return forward<float, width>(p);
    if (p.dtype == DType::bf16) return forward<bf16, width>(p);
    forward<f16, width>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
