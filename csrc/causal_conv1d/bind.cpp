#include <optional>
#include <tuple>
#include <vector>

#include "causal_conv1d/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

const char* const kOp = "causal_conv1d";

// A row of a segment's path: `distance` >= 1 before its end, as ConvSegment::before has it.
int64_t row_from_end(const ConvSegment& segment, int64_t distance) {
  const int64_t row = segment.end - distance;
  return row >= segment.begin ? row : segment.before[segment.begin - row - 1];
}

std::vector<ConvSegment> plan_segments(const Tensor& cu_seqlens,
                                       const std::optional<Tensor>& parents, int64_t tokens,
                                       int64_t width, bool has_initial) {
  const int64_t count = cu_seqlens.numel() - 1;
  HE_CHECK_VALUE(count >= 0, kOp, ": cu_seqlens is empty; expected 0 and the end of every segment");
  check_vector(cu_seqlens, "cu_seqlens", kInt, count + 1);
  const int32_t* ends = cu_seqlens.data<int32_t>();
  HE_CHECK_VALUE(ends[0] == 0 && ends[count] == tokens, kOp, ": cu_seqlens goes from ", ends[0],
                 " to ", ends[count], "; expected 0 to ", tokens);
  if (parents) check_vector(*parents, "parents", kInt, count);
  std::vector<ConvSegment> segments(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = parents ? parents->data<int32_t>()[i] : -1;
    HE_CHECK_VALUE(ends[i] <= ends[i + 1], kOp, ": cu_seqlens[", i + 1, "] is ", ends[i + 1],
                   ", less than cu_seqlens[", i, "], ", ends[i]);
    HE_CHECK_VALUE(-1 <= parent && parent < i, kOp, ": parents[", i, "] is ", parent,
                   "; expected -1 or an earlier segment");
    segments[i] = {ends[i], ends[i + 1], parent, -1, {}};
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
  check_same_device(
      kOp, {{"x", x}, {"weight", weight}, {"bias", bias}, {"initial_state", initial_state}});
  if (!x.device().is_cpu()) no_kernel_for(x.device(), kOp);
  p.dtype = float_dtype(x, "x");
  HE_CHECK_VALUE(p.dtype != DType::f64, kOp, ": x has dtype float64; use the reference");
  p.tokens = x.size(0), p.channels = x.size(1), p.width = weight.size(0);
  HE_CHECK_VALUE(x.numel() == 0 || p.channels == 1 || x.stride(1) == 1, kOp, ": x has strides ",
                 x.strides(), "; expected inner stride 1");
  HE_CHECK_VALUE(weight.dim() == 2 && weight.size(1) == p.channels && weight.is_contiguous() &&
                     weight.scalar_type() == kFloat,
                 kOp, ": weight is ", weight.sizes(), "; expected contiguous [width, ", p.channels,
                 "] of float32");
  if (bias) {
    check_vector(*bias, "bias", kFloat, p.channels);
    p.bias = bias->data<float>();
  }
  if (initial_state) {
    HE_CHECK_VALUE(
        initial_state->sizes() == Sizes({std::ssize(segments), p.width - 1, p.channels}) &&
            initial_state->scalar_type() == x.scalar_type() && initial_state->is_contiguous(),
        kOp, ": initial_state is ", initial_state->sizes(), "; expected contiguous [",
        segments.size(), ", ", p.width - 1, ", ", p.channels, "] of ", x.scalar_type());
    p.initial = initial_state->data();
  }
  p.x = x.data(), p.x_stride = x.stride(0);
  p.weight = weight.data<float>();
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
  const auto segments =
      plan_segments(cu_seqlens, parents, x.size(0), width_of(x, weight), initial_state.has_value());
  CausalConv1dForward p{};
  fill(p, x, weight, bias, initial_state, segments, silu);
  Tensor out = empty({p.tokens, p.channels}, x.scalar_type());
  p.out = out.data();
  without_gil([&] { causal_conv1d_cpu(p); });
  return out;
}

// The gradients of x, weight [width, C], bias and initial_state, the last three float32.
std::tuple<Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>> backward(
    const Tensor& grad_out, const Tensor& x, const Tensor& weight,
    const std::optional<Tensor>& bias, const Tensor& cu_seqlens,
    const std::optional<Tensor>& parents, const std::optional<Tensor>& initial_state, bool silu) {
  const int64_t width = width_of(x, weight);
  auto segments = plan_segments(cu_seqlens, parents, x.size(0), width, initial_state.has_value());
  int64_t slots = 0;
  for (const ConvSegment& segment : segments) {
    if (segment.parent < 0) continue;
    int64_t& slot = segments[segment.parent].tail_slot;
    if (slot < 0) slot = slots++;
  }
  CausalConv1dBackward p{};
  fill(p, x, weight, bias, initial_state, segments, silu);
  HE_CHECK_VALUE(grad_out.sizes() == x.sizes() && grad_out.scalar_type() == x.scalar_type() &&
                     (x.numel() == 0 || p.channels == 1 || grad_out.stride(1) == 1),
                 kOp, ": grad_out is ", grad_out.sizes(), " of ", grad_out.scalar_type(),
                 "; expected ", x.sizes(), " of ", x.scalar_type(), " with inner stride 1");
  p.grad_out = grad_out.data(), p.grad_stride = grad_out.stride(0);
  Tensor grad_x = empty({p.tokens, p.channels}, x.scalar_type());
  Tensor grad_weight = empty({width, p.channels}, kFloat);
  Tensor tails = zeros({slots, width - 1, p.channels}, kFloat);
  std::optional<Tensor> grad_bias, grad_initial;
  if (bias) grad_bias = empty({p.channels}, kFloat), p.grad_bias = grad_bias->data<float>();
  if (initial_state) {
    grad_initial = zeros(initial_state->sizes(), kFloat);
    p.grad_initial = grad_initial->data<float>();
  }
  p.grad_x = grad_x.data();
  p.grad_weight = grad_weight.data<float>();
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
        py::arg("silu"));
}

}  // namespace hybridengine
