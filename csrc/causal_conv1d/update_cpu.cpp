// A token of each sequence; see params.h.
#include "causal_conv1d/window.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T, int width>
void update(const CausalConv1dUpdate& p) {
  std::vector<float> weight(width * p.channels);  // as Taps reads it: [width, channels]
  for (int64_t c = 0; c < p.channels; ++c) {
    for (int j = 0; j < width; ++j) {
      weight[j * p.channels + c] = to_float(static_cast<const T*>(p.weight)[c * width + j]);
    }
  }
  CausalConv1d of_taps{};
  of_taps.weight = weight.data(), of_taps.channels = p.channels;
  parallel_for(p.tokens, 1, p.num_threads, [&](int64_t first, int64_t last) {
    const auto rows_of = [&](int64_t t) {
      return static_cast<T*>(p.cache) + p.slots[t] * p.cache_stride;
    };
    const auto token_of = [&](int64_t t) { return static_cast<const T*>(p.x) + t * p.x_stride; };
    Taps<T, width> taps;
    for (int64_t begin = 0; begin < p.channels; begin += kTileChannels) {
      const int64_t end = std::min(p.channels, begin + kTileChannels);
      taps.load_strip(of_taps, begin, end);
      for (int64_t t = first; t < last; ++t) {
        const T *before = rows_of(t), *token = token_of(t);
        T* out = static_cast<T*>(p.out) + t * p.channels;
        for_channels<T>(begin, end, [&](const auto& channels) __attribute__((always_inline)) {
          VecF weights[width][2], bias[2], rows[width][2], sums[1][2], gates[1][2];
          taps.load_weights(channels.at, weights);
          taps.load_bias(channels.at, bias);
          for (int j = 0; j < width - 1; ++j) {
            channels.load_from(before + j * p.channels, rows[j]);
          }
          channels.load_from(token, rows[width - 1]);
          run_windows<width, 1>(weights, bias, rows, p.silu, sums, gates);
          if (p.silu) {
            sums[0][0] *= gates[0][0];
            sums[0][1] *= gates[0][1];
          }
          channels.store_to(out, sums[0], false);
        });
      }
    }
    for (int64_t t = first; t < last; ++t) {
      T* rows = rows_of(t);
      T* newest = rows + (width - 2) * p.channels;
      std::copy(rows + p.channels, newest + p.channels, rows);
      std::copy_n(token_of(t), p.channels, newest);
    }
  });
}

}  // namespace

void causal_conv1d_update_cpu(const CausalConv1dUpdate& p) {
  with_width(p.width, [&](auto width) {
    if (p.dtype == DType::f32) return update<float, width>(p);
    if (p.dtype == DType::bf16) return update<bf16, width>(p);
    update<f16, width>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
