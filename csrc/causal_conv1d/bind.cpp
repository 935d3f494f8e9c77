#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "causal_conv1d/params.h"
#include "common/sequences.h"

namespace hybridengine {

namespace {

const char* const kOp = "causal_conv1d";

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

void fill(CausalConv1d& p, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
          const std::optional<Tensor>& initial_state, const std::vector<ConvSegment>& segments,
          bool silu) {
  const Arguments given(kOp, "x", x);
  if (!x.device().is_cpu()) no_kernel_for(x.device(), kOp);
  p.dtype = float_dtype(x, "x");
  HE_CHECK_VALUE(p.dtype != DType::f64, kOp, ": x has dtype float64; use the reference");
  p.tokens = x.size(0), p.channels = x.size(1), p.width = weight.size(0);
  HE_CHECK_VALUE(x.has_unit_inner_stride(), kOp, ": x has strides ", x.strides(),
                 "; expected inner stride 1");
  p.weight = given.data<float>("weight", weight, {p.width, p.channels});
  p.bias = given.data<float>("bias", bias, {p.channels});
  if (initial_state) {
    p.initial = given.data("initial_state", *initial_state, x.scalar_type(),
                           {std::ssize(segments), p.width - 1, p.channels});
  }
  p.x = x.data(), p.x_stride = x.stride(0);
  p.segments = &segments;
  p.silu = silu;
  p.num_threads = get_num_threads();
}

int64_t width_of(const Tensor& x, const Tensor& weight) {
  HE_CHECK_VALUE(
      x.dim() == 2 && weight.dim() == 2 && weight.size(0) >= 2 && weight.size(0) <= kMaxConvWidth,
      kOp, ": x is ", x.sizes(), " and weight ", weight.sizes(),
      "; expected [T, C] and [width, C], width from 2 to ", kMaxConvWidth);
  return weight.size(0);
}

Tensor forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
               const Tensor& cu_seqlens, const std::optional<Tensor>& parents,
               const std::optional<Tensor>& initial_state, bool silu) {
  const int64_t width = width_of(x, weight);
  const auto segments = plan_segments(check_segments(kOp, cu_seqlens, parents, x.size(0)), width,
                                      initial_state.has_value());
  CausalConv1dForward p{};
  fill(p, x, weight, bias, initial_state, segments, silu);
  Tensor out = empty({p.tokens, p.channels}, x.scalar_type());
  p.out = out.data();
  without_gil([&] { causal_conv1d_cpu(p); });
  return out;
}

using Gradient = std::optional<Tensor>;

// The gradients of x, weight [width, C], bias and initial_state, the last three float32: those that
// are `wanted`, in this order.
std::tuple<Gradient, Gradient, Gradient, Gradient> backward(
    const Tensor& grad_out, const Tensor& x, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& cu_seqlens,
    const std::optional<Tensor>& parents, const std::optional<Tensor>& initial_state, bool silu,
    const std::array<bool, 4>& wanted) {
  const int64_t width = width_of(x, weight);
  auto segments = plan_segments(check_segments(kOp, cu_seqlens, parents, x.size(0)), width,
                                initial_state.has_value());
  int64_t slots = 0;
  for (const ConvSegment& segment : segments) {
    if (segment.parent < 0) continue;
    int64_t& slot = segments[segment.parent].tail_slot;
    if (slot < 0) slot = slots++;
  }
  CausalConv1dBackward p{};
  fill(p, x, weight, bias, initial_state, segments, silu);
  HE_CHECK_VALUE(grad_out.sizes() == x.sizes() && grad_out.scalar_type() == x.scalar_type() &&
                     grad_out.device() == x.device() && grad_out.has_unit_inner_stride(),
                 kOp, ": grad_out is ", grad_out.sizes(), " of ", grad_out.scalar_type(),
                 "; expected ", x.sizes(), " of ", x.scalar_type(), " with inner stride 1");
  p.grad_out = grad_out.data(), p.grad_stride = grad_out.stride(0);
  Tensor tails = zeros({slots, width - 1, p.channels}, kFloat);
  Gradient grad_x, grad_weight, grad_bias, grad_initial;
  if (wanted[0]) {
    grad_x = empty({p.tokens, p.channels}, x.scalar_type());
    p.grad_x = grad_x->data();
  }
  if (wanted[1]) {
    grad_weight = empty({width, p.channels}, kFloat);
    p.grad_weight = grad_weight->data<float>();
  }
  if (wanted[2] && bias) {
    grad_bias = empty({p.channels}, kFloat);
    p.grad_bias = grad_bias->data<float>();
  }
  if (wanted[3] && initial_state) {
    grad_initial = zeros(initial_state->sizes(), kFloat);
    p.grad_initial = grad_initial->data<float>();
  }
  p.tails = tails.data<float>();
  without_gil([&] { causal_conv1d_backward_cpu(p); });
  return {grad_x, grad_weight, grad_bias, grad_initial};
}

}  // namespace

void register_causal_conv1d(py::module_& m) {
  m.def("causal_conv1d", &forward, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("cu_seqlens"), py::arg("parents"), py::arg("initial_state"), py::arg("silu"));
  m.def("causal_conv1d_backward", &backward, py::arg("grad_out"), py::arg("x"), py::arg("weight"),
        py::arg("bias"), py::arg("cu_seqlens"), py::arg("parents"), py::arg("initial_state"),
        py::arg("silu"), py::arg("wanted"));
}

}  // namespace hybridengine
