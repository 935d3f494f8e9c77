// The forward; see params.h.
#include "causal_conv1d/window.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T, int width>
void run_rows(const CausalConv1dForward& p, const ConvSegment& s, int64_t begin, int64_t end,
              const Channels& channels) {
  const Taps<width> taps(p, channels);
  VecF rows[width];
  for (int j = 1; j < width; ++j) rows[j - 1] = row_before<T>(p, s, begin, j, channels);
  for (int64_t t = begin; t < end; ++t) {
    for (int j = width - 1; j > 0; --j) rows[j] = rows[j - 1];
    rows[0] = channels.load_from(static_cast<const T*>(p.x) + t * p.x_stride);
    VecF value = taps.sum(rows);
    if (p.silu) value *= sigmoid(value);
    channels.store_to(static_cast<T*>(p.out) + t * p.channels, value);
  }
}

template <typename T, int width>
void forward(const CausalConv1dForward& p) {
  const int64_t blocks = (p.tokens + kTileRows - 1) / kTileRows;
  parallel_for(blocks, 1, p.num_threads, [&](int64_t first, int64_t last) {
    const int64_t end = std::min(p.tokens, last * kTileRows);
    auto segment = std::partition_point(p.segments->begin(), p.segments->end(),
                                        [&](const auto& s) { return s.end <= first * kTileRows; });
    for (int64_t t = first * kTileRows; t < end;) {
      while (segment->end <= t) ++segment;
      const int64_t stop = std::min({end, segment->end, t + kTileRows});
      for (int64_t c = 0; c < p.channels; c += kTileChannels) {
        for_channels(c, std::min(p.channels, c + kTileChannels), [&](const Channels& channels) {
          run_rows<T, width>(p, *segment, t, stop, channels);
        });
      }
      t = stop;
    }
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
