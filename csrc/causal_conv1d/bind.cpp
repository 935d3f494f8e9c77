#include <array>
#include <tuple>
#include <vector>

#include "causal_conv1d/params.h"
#include "common/segments.h"

namespace hybridengine {

namespace {

const char* const kConv = "causal_conv1d";

// A row of a segment's path: `distance` >= 1 before its end, as ConvSegment::before has it.
int64_t row_from_end(const ConvSegment& segment, int64_t distance) {
  const int64_t row = segment.end - distance;
  return row >= segment.begin ? row : segment.before[segment.begin - row - 1];
}

std::vector<ConvSegment> plan_segments(const SegmentBounds& bounds, int64_t width,
                                       bool has_initial) {
  std::vector<ConvSegment> segments(bounds.count);
  for (int64_t i = 0; i < bounds.count; ++i) {
    const int64_t parent = bounds.parent(i);
    segments[i] = {bounds.begin(i), bounds.end(i), parent, -1, {}};
    for (int64_t distance = 1; distance < width; ++distance) {
      const int64_t initial = has_initial ? -2 - (i * (width - 1) + width - 1 - distance) : -1;
      segments[i].before[distance - 1] =
          parent >= 0 ? row_from_end(segments[parent], distance) : initial;
    }
  }
  return segments;
}

Arguments fill(CausalConv1d& p, std::vector<ConvSegment>& segments, In x, In weight,
               OptionalIn bias, In cu_seqlens, OptionalIn parents, OptionalIn initial_state,
               bool silu) {
  const Arguments given(kConv, "x", x);
  given.on_cpu();
  p.dtype = given.dtype("x", x.scalar_type());
  p.x = given.data("x", x, kFloats, {&p.tokens, &p.channels}, &p.x_stride);
  p.weight = given.data<float>("weight", weight, {&p.width, p.channels});
  given.number("the width of weight", p.width, 2, kMaxConvWidth);
  p.bias = given.data<float>("bias", bias, {p.channels});
  const SegmentBounds bounds = check_segments(given, cu_seqlens, parents, p.tokens);
  p.initial = given.data("initial_state", initial_state, x.scalar_type(),
                         {bounds.count, p.width - 1, p.channels});
  segments = plan_segments(bounds, p.width, initial_state.has_value());
  p.segments = &segments;
  p.silu = silu;
  return given;
}

Tensor conv_forward(In x, In weight, OptionalIn bias, In cu_seqlens, OptionalIn parents,
                    OptionalIn initial_state, bool silu) {
  CausalConv1dForward p{};
  std::vector<ConvSegment> segments;
  const Arguments given =
      fill(p, segments, x, weight, bias, cu_seqlens, parents, initial_state, silu);
  Tensor out = given.make(p.out, {p.tokens, p.channels}, x.scalar_type());
  if (p.channels > 0) given.run(p, causal_conv1d_cpu);
  return out;
}

// One token of each of T sequences, whose last rows are rows `slots` of the cache [N, width - 1,
// C], which it updates.
Tensor conv_update(In x, In weight, In cache, In slots, bool silu) {
  CausalConv1dUpdate p{};
  const Arguments given("causal_conv1d_update", "x", x);
  given.on_cpu();
  const ScalarType type = x.scalar_type();
  p.dtype = given.dtype("x", type);
  p.x = given.data("x", x, type, {&p.tokens, &p.channels}, &p.x_stride);
  p.weight = given.data("weight", weight, type, {p.channels, &p.width});
  given.number("the width of weight", p.width, 2, kMaxConvWidth);
  given.same_device("cache", cache);
  const int64_t before = p.width - 1;
  given.expect(cache.scalar_type() == type && cache.dim() == 3 &&
                   cache.sizes() == Sizes{cache.size(0), before, p.channels} &&
                   cache.strides() == Sizes{cache.stride(0), p.channels, 1} &&
                   cache.stride(0) >= before * p.channels,
               "cache is a ", cache.scalar_type(), " of shape ", cache.sizes(), " and strides ",
               cache.strides(), "; expected ", type, " [N, ", before, ", ", p.channels,
               "] with contiguous rows");
  p.cache = cache.data(), p.cache_stride = cache.stride(0);
  p.slots = given.data<int32_t>("slots", slots, {p.tokens});
  p.silu = silu;
  Tensor out = given.make(p.out, {p.tokens, p.channels}, type);
  if (p.channels > 0) {
    given.run_rows(p, &CausalConv1dUpdate::tokens,
                   [op = given.op(), count = cache.size(0)](const CausalConv1dUpdate& p) {
                     check_values(op, "slots", p.slots, p.tokens, 0, count - 1);
                     causal_conv1d_update_cpu(p);
                   });
  }
  return out;
}

using Gradient = std::optional<Tensor>;

// The gradients of x, weight [width, C], bias and initial_state, the last three float32: those that
// are `wanted`, in this order.
std::tuple<Gradient, Gradient, Gradient, Gradient> conv_backward(
    In grad_out, In x, In weight, OptionalIn bias, In cu_seqlens, OptionalIn parents,
    OptionalIn initial_state, bool silu, const std::array<bool, 4>& wanted) {
  CausalConv1dBackward p{};
  std::vector<ConvSegment> segments;
  const Arguments given =
      fill(p, segments, x, weight, bias, cu_seqlens, parents, initial_state, silu);
  p.grad_out =
      given.data("grad_out", grad_out, x.scalar_type(), {p.tokens, p.channels}, &p.grad_stride);
  int64_t slots = 0;
  for (const ConvSegment& segment : segments) {
    if (segment.parent < 0) continue;
    int64_t& slot = segments[segment.parent].tail_slot;
    if (slot < 0) slot = slots++;
  }
  const Tensor tails = zeros({slots, p.width - 1, p.channels}, kFloat);
  p.tails = tails.data<float>();
  Gradient grad_x, grad_weight, grad_bias, grad_initial;
  if (wanted[0]) grad_x = given.make(p.grad_x, {p.tokens, p.channels}, x.scalar_type());
  if (wanted[1]) grad_weight = given.make(p.grad_weight, {p.width, p.channels});
  if (wanted[2] && bias) grad_bias = given.make(p.grad_bias, {p.channels});
  if (wanted[3] && initial_state) {
    grad_initial = zeros(initial_state->sizes(), kFloat);
    p.grad_initial = grad_initial->data<float>();
  }
  if (p.channels > 0) given.run(p, causal_conv1d_backward_cpu);
  return {grad_x, grad_weight, grad_bias, grad_initial};
}

}  // namespace

void register_causal_conv1d(py::module_& m) {
  def(m, "causal_conv1d", &conv_forward, "x weight bias cu_seqlens parents initial_state silu");
  def(m, "causal_conv1d_update", &conv_update, "x weight cache slots silu");
  def(m, "causal_conv1d_backward", &conv_backward,
      "grad_out x weight bias cu_seqlens parents initial_state silu wanted");
}

}  // namespace hybridengine
