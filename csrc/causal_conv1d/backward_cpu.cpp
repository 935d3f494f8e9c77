// The backward; see params.h. Segments come in reverse, children before their parents: what a row
// receives from children, or from a gradient of the last rows, is in the tail of its segment.
#include <vector>

#include "causal_conv1d/window.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// A vector of channels of all tokens.
template <typename T, int width>
class Column {
 public:
  Column(const CausalConv1dBackward& p, const Channels& channels)
      : p_(p), channels_(channels), taps_(p, channels) {}

  // Rows [begin, end) of a segment, whose later rows have run.
  void run_rows(const ConvSegment& s, int64_t begin, int64_t end) {
    if (end == s.end) {
      for (VecF& grad : grads_) grad = VecF{};
    }
    VecF rows[width], sums[width] = {}, bias{};
    for (int j = 0; j < width; ++j) rows[j] = load_row(s, end - 1, j);
    for (int64_t t = end; t-- > begin;) {
      VecF grad = channels_.load_from(static_cast<const T*>(p_.grad_out) + t * p_.grad_stride);
      if (p_.silu) {
        const VecF x = taps_.sum(rows), gate = sigmoid(x);
        grad *= gate * (1.0f + x * (1.0f - gate));
      }
      if (p_.grad_weight) {
        for (int j = 0; j < width; ++j) sums[j] += grad * rows[j];
      }
      bias += grad;
      for (int j = width - 1; j > 0; --j) grads_[j] = grads_[j - 1];
      grads_[0] = grad;
      if (p_.grad_x) {
        VecF total = tail(s, s.end - t);
        for (int j = 0; j < width; ++j) total += taps_.of[j] * grads_[j];
        channels_.store_to(static_cast<T*>(p_.grad_x) + t * p_.channels, total);
      }
      for (int j = 0; j + 1 < width; ++j) rows[j] = rows[j + 1];
      if (t > begin) rows[width - 1] = load_row(s, t - 1, width - 1);
    }
    for (int j = 0; p_.grad_weight && j < width; ++j) {
      add(p_.grad_weight + (width - 1 - j) * p_.channels, sums[j]);
    }
    if (p_.grad_bias) add(p_.grad_bias, bias);
  }

  // Hands the gradients of the rows before a segment, which has run, to those that have them.
  void leave(const ConvSegment& s) {
    const int64_t size = s.end - s.begin;
    if (size == 0) {
      for (VecF& grad : grads_) grad = VecF{};
    }
    for (int64_t distance = 1; distance < width; ++distance) {
      VecF total = tail(s, size + distance);
      for (int64_t j = distance; j < width; ++j) {
        total += taps_.of[j] * grads_[j - distance];
      }
      if (s.parent >= 0) {
        const int64_t slot = (*p_.segments)[s.parent].tail_slot;
        add(p_.tails + (slot * (width - 1) + distance - 1) * p_.channels, total);
      } else if (p_.grad_initial) {
        const int64_t index = &s - p_.segments->data();
        const int64_t row = index * (width - 1) + width - 1 - distance;
        channels_.store_to(p_.grad_initial + row * p_.channels, total);
      }
    }
  }

 private:
  VecF load_row(const ConvSegment& s, int64_t t, int64_t distance) const {
    if (distance > 0) return row_before<T>(p_, s, t, distance, channels_);
    return channels_.load_from(static_cast<const T*>(p_.x) + t * p_.x_stride);
  }

  // What the row that is `distance` before the segment's end receives from elsewhere.
  VecF tail(const ConvSegment& s, int64_t distance) const {
    if (s.tail_slot < 0 || distance >= width) return VecF{};
    return channels_.load_from(p_.tails + (s.tail_slot * (width - 1) + distance - 1) * p_.channels);
  }

  void add(float* to, VecF v) const { channels_.store_to(to, channels_.load_from(to) + v); }

  const CausalConv1dBackward& p_;
  const Channels channels_;
  const Taps<width> taps_;
  VecF grads_[width] = {};  // of the sums of tokens t, t + 1, ..., where t has run last
};

template <typename T, int width>
void backward(const CausalConv1dBackward& p) {
  const int64_t strips = (p.channels + kTileChannels - 1) / kTileChannels;
  if (p.grad_weight) std::fill_n(p.grad_weight, width * p.channels, 0.0f);
  if (p.grad_bias) std::fill_n(p.grad_bias, p.channels, 0.0f);
  parallel_for(strips, 1, p.num_threads, [&](int64_t first, int64_t last) {
    for (int64_t strip = first; strip < last; ++strip) {
      std::vector<Column<T, width>> columns;
      const int64_t begin = strip * kTileChannels;
      for_channels(begin, std::min(p.channels, begin + kTileChannels),
                   [&](const Channels& channels) { columns.emplace_back(p, channels); });
      for (auto s = p.segments->rbegin(); s != p.segments->rend(); ++s) {
        for (int64_t end = s->end; end > s->begin;) {
          const int64_t start = std::max(s->begin, end - kTileRows);
          for (auto& column : columns) column.run_rows(*s, start, end);
          end = start;
        }
        for (auto& column : columns) column.leave(*s);
      }
    }
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
