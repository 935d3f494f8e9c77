// The backward; see params.h. Segments come in reverse, children before their parents: what a row
// receives from children, or from a gradient of the last rows, is in the tail of its segment.
#include "causal_conv1d/window.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// Channels [begin, end) of all tokens.
template <typename T, int width>
class Strip {
 public:
  Strip(const CausalConv1dBackward& p, int64_t begin, int64_t end, const T* zeros)
      : p_(p), begin_(begin), end_(end), zeros_(zeros) {
    streamed_ = is_streamed(p.grad_x, p.channels * sizeof(T), p.tokens);
    taps_.load_strip(p, begin, end);
    sums_.fill_zeros();
  }

  void run() {
    for (auto s = p_.segments->rbegin(); s != p_.segments->rend(); ++s) {
      grads_.fill_zeros();
      int64_t t = s->end;
      while (t - kGroup >= s->begin) run_rows<kGroup>(*s, t -= kGroup);
      while (t > s->begin) run_rows<1>(*s, --t);
      leave(*s);
    }
    for_channels<T>(begin_, end_, [&](const auto& channels) {
      VecF sum[2];
      for (int j = 0; j <= width; ++j) {
        sums_.load_from(j, channels.at, sum);
        float* to = j < width ? p_.grad_weight + j * p_.channels : p_.grad_bias;
        if (j < width ? p_.grad_weight : p_.grad_bias) channels.store_floats(to, sum);
      }
    });
  }

 private:
  // Rows [t, t + count) of a segment, whose later rows have run.
  template <int count>
  void run_rows(const ConvSegment& s, int64_t t) {
    const T* from[width - 1 + count];
    for (int j = 0; j < width - 1 + count; ++j) {
      from[j] = row_before(p_, s, t, width - 1 - j, zeros_);
    }
    const T* grad_out = static_cast<const T*>(p_.grad_out) + t * p_.grad_stride;
    T* grad_x = static_cast<T*>(p_.grad_x) + t * p_.channels;
    for_channels<T>(begin_, end_, [&](const auto& channels) __attribute__((always_inline)) {
      const int64_t at = channels.at;
      VecF weights[width][2], bias[2], rows[width - 1 + count][2], sums[count][2], gates[count][2];
      taps_.load_weights(at, weights);
      taps_.load_bias(at, bias);
#pragma GCC unroll 8
      for (int j = 0; j < width - 1 + count; ++j) channels.load_from(from[j], rows[j]);
      // Of the sums of tokens t, t + 1, ...
      VecF grads[count + width - 1][2];
#pragma GCC unroll 8
      for (int i = 0; i < count; ++i) channels.load_from(grad_out + i * p_.grad_stride, grads[i]);
#pragma GCC unroll 4
      for (int j = 0; j < width - 1; ++j) grads_.load_from(j, at, grads[count + j]);
      if (p_.silu) {
        run_windows<width, count>(weights, bias, rows, true, sums, gates);
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) {
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            grads[i][h] *= gates[i][h] * (1.0f + sums[i][h] * (1.0f - gates[i][h]));
          }
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < width - 1; ++j) grads_.store_to(j, at, grads[j]);
#pragma GCC unroll 8
      for (int j = 0; j <= width; ++j) {
        VecF sum[2];
        sums_.load_from(j, at, sum);
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) {
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) {
            sum[h] += j < width ? grads[i][h] * rows[i + j][h] : grads[i][h];
          }
        }
        sums_.store_to(j, at, sum);
      }
      if (!p_.grad_x) return;
#pragma GCC unroll 8
      for (int i = 0; i < count; ++i) {
        VecF total[2];
        load_tail(s, s.end - t - i, channels, total);
#pragma GCC unroll 4
        for (int j = 0; j < width; ++j) {
#pragma GCC unroll 2
          for (int h = 0; h < 2; ++h) total[h] += weights[width - 1 - j][h] * grads[i + j][h];
        }
        channels.store_to(grad_x + i * p_.channels, total, streamed_);
      }
    });
  }

  // Hands the gradients of the rows before a segment, which has run, to those that have them.
  void leave(const ConvSegment& s) {
    if (s.parent < 0 && !p_.grad_initial) return;
    const int64_t size = s.end - s.begin, index = &s - p_.segments->data();
    const int64_t slot = s.parent >= 0 ? (*p_.segments)[s.parent].tail_slot : 0;
    for_channels<T>(begin_, end_, [&](const auto& channels) {
      VecF weights[width][2], grad[2], total[2], other[2];
      taps_.load_weights(channels.at, weights);
      for (int distance = 1; distance < width; ++distance) {
        load_tail(s, size + distance, channels, total);
        for (int j = distance; j < width; ++j) {
          grads_.load_from(j - distance, channels.at, grad);
          for (int h = 0; h < 2; ++h) total[h] += weights[width - 1 - j][h] * grad[h];
        }
        if (s.parent >= 0) {
          float* to = tail_row(slot, distance);
          channels.load_floats(to, other);
          channels.store_floats(to, {other[0] + total[0], other[1] + total[1]});
        } else {
          const int64_t row = index * (width - 1) + width - 1 - distance;
          channels.store_floats(p_.grad_initial + row * p_.channels, total);
        }
      }
    });
  }

  float* tail_row(int64_t slot, int64_t distance) const {
    return p_.tails + (slot * (width - 1) + distance - 1) * p_.channels;
  }

  // What the row that is `distance` before the segment's end receives from elsewhere.
  template <typename Channels>
  HE_INLINE void load_tail(const ConvSegment& s, int64_t distance, const Channels& channels,
                           VecF (&to)[2]) const {
    if (s.tail_slot >= 0 && distance < width) {
      channels.load_floats(tail_row(s.tail_slot, distance), to);
    } else {
      to[0] = to[1] = VecF{};
    }
  }

  const CausalConv1dBackward& p_;
  const int64_t begin_, end_;
  const T* zeros_;
  bool streamed_;
  Taps<T, width> taps_;
  StripRows grads_{width - 1};  // of the sums of the tokens after those that run
  StripRows sums_{width + 1};   // gradients of the weights and the bias
};

template <typename T, int width>
void backward(const CausalConv1dBackward& p) {
  const std::vector<T> zeros(p.channels);
  // Narrower strips for many threads change no bit.
  const int64_t share = (p.channels + p.num_threads - 1) / p.num_threads;
  const int64_t size = std::min(kTileChannels, (share + 63) / 64 * 64);
  parallel_for((p.channels + size - 1) / size, 1, p.num_threads, [&](int64_t first, int64_t last) {
    for (int64_t strip = first; strip < last; ++strip) {
      const int64_t end = std::min(p.channels, (strip + 1) * size);
      Strip<T, width>(p, strip * size, end, zeros.data()).run();
    }
    stream_fence();
  });
}

}  // namespace

void causal_conv1d_backward_cpu(const CausalConv1dBackward& p) {
  with_width(p.width, [&](auto width) {
    if (p.dtype == DType::f32) return backward<float, width>(p);
    if (p.dtype == DType::bf16) return backward<bf16, width>(p);
    backward<f16, width>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
