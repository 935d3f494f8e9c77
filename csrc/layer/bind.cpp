#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "common/binding.h"
#include "layer/params.h"

namespace hybridengine {

namespace {

Rows rows_argument(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  HE_CHECK_VALUE(tensor.dim() == 2 && tensor.sizes() == like.sizes() &&
                     tensor.scalar_type() == like.scalar_type() && tensor.has_unit_inner_stride(),
                 op, ": ", name, " has shape ", tensor.sizes(), ", dtype ", tensor.scalar_type(),
                 " and strides ", tensor.strides(), "; expected ", like.sizes(), " of ",
                 like.scalar_type(), " with inner stride 1");
  return {tensor.data(), tensor.stride(0)};
}

DType layer_dtype(const char* op, const Tensor& x) {
  HE_CHECK_VALUE(x.scalar_type() == kFloat || x.scalar_type() == kBFloat16, op, ": dtype ",
                 x.scalar_type(), "; expected float32 or bfloat16");
  if (!x.device().is_cpu()) no_kernel_for(x.device(), op);
  return float_dtype(x, "x");
}

// The norm of x [rows, width] or [rows, heads, width] and, if wanted, 1 / rms of its rows (else
// empty). A residual becomes the sum of x and itself, which is then normed; x has no heads then.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps,
                                    double offset, bool round_first, bool wants_inverse,
                                    const std::optional<Tensor>& residual) {
  const char* op = "rms_norm";
  check_same_device(op, {{"x", x}, {"weight", weight}, {"residual", residual}});
  RmsNorm p{};
  p.dtype = layer_dtype(op, x);
  const bool with_heads = x.dim() == 3 && !residual;
  if (with_heads) {
    HE_CHECK_VALUE(x.has_unit_inner_stride(), op, ": x has shape ", x.sizes(), " and strides ",
                   x.strides(), "; expected inner stride 1");
    p.x = {x.data(), x.stride(1)};
    p.heads = x.size(1), p.token_stride = x.stride(0);
    p.rows = x.size(0) * p.heads, p.width = x.size(2);
  } else {
    p.x = rows_argument(op, "x", x, x);
    p.heads = 1, p.token_stride = x.stride(0);
    p.rows = x.size(0), p.width = x.size(1);
  }
  check_vector(weight, "weight", x.scalar_type(), p.width);
  Tensor out = empty_like(x);
  Tensor inverse = empty({wants_inverse ? p.rows : 0}, kFloat);
  if (out.numel() == 0) return {out, inverse};
  if (residual) {
    rows_argument(op, "residual", *residual, x);
    HE_CHECK_VALUE(residual->is_contiguous(), op, ": residual is not contiguous");
    p.residual = residual->data();
  }
  p.weight = weight.data();
  p.inverse_rms = wants_inverse ? inverse.data<float>() : nullptr;
  p.out = out.data();
  p.eps = static_cast<float>(eps), p.offset = static_cast<float>(offset);
  p.round_first = round_first;
  p.num_threads = get_num_threads();
  run_rows(op, p, &RmsNorm::rows, rms_norm_cpu);
  return {out, inverse};
}

// The gradients of x and weight (float32).
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const Tensor& x,
                                             const Tensor& weight, const Tensor& inverse_rms,
                                             double offset) {
  const char* op = "rms_norm_backward";
  check_same_device(
      op, {{"x", x}, {"grad_out", grad_out}, {"weight", weight}, {"inverse_rms", inverse_rms}});
  RmsNormBackward p{};
  p.dtype = layer_dtype(op, x);
  p.x = rows_argument(op, "x", x, x);
  p.grad_out = rows_argument(op, "grad_out", grad_out, x);
  p.rows = x.size(0), p.width = x.size(1);
  check_vector(weight, "weight", x.scalar_type(), p.width);
  check_vector(inverse_rms, "inverse_rms", kFloat, p.rows);
  Tensor grad_x = empty({p.rows, p.width}, x.scalar_type());
  Tensor grad_weight = empty({p.width}, kFloat);
  p.weight = weight.data();
  p.inverse_rms = inverse_rms.data<float>();
  p.grad_x = grad_x.data();
  p.grad_weight = grad_weight.data<float>();
  p.offset = static_cast<float>(offset);
  p.num_threads = get_num_threads();
  without_gil([&] { rms_norm_backward_cpu(p); });
  return {grad_x, grad_weight};
}

// Rotates the heads of x [rows, heads, dim] in place, by rows `positions` of the tables.
void rotary_(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin) {
  const char* op = "rotary_";
  check_same_device(op, {{"x", x}, {"positions", positions}, {"cos", cos}, {"sin", sin}});
  HE_CHECK_VALUE(x.dim() == 3 && x.size(2) % 2 == 0 &&
                     (x.numel() == 0 || (x.stride(2) == 1 && x.stride(1) == x.size(2))),
                 op, ": x has shape ", x.sizes(), " and strides ", x.strides(),
                 "; expected [rows, heads, dim], dim even, with contiguous heads");
  Rotary p{};
  p.dtype = layer_dtype(op, x);
  p.x = x.data();
  p.row_stride = x.stride(0);
  p.rows = x.size(0), p.heads = x.size(1), p.half = x.size(2) / 2;
  check_vector(positions, "positions", kLong, p.rows);
  p.positions = positions.data<int64_t>();
  const std::pair<const char*, const Tensor*> tables[] = {{"cos", &cos}, {"sin", &sin}};
  for (const auto& [name, table] : tables) {
    HE_CHECK_VALUE(table->dim() == 2 && table->sizes() == cos.sizes() && table->size(1) == p.half &&
                       table->is_contiguous() && table->scalar_type() == x.scalar_type(),
                   op, ": ", name, " has shape ", table->sizes(), " and dtype ",
                   table->scalar_type(), "; expected contiguous [positions, ", p.half, "] of ",
                   x.scalar_type(), ", as many positions in both");
  }
  p.cos = cos.data(), p.sin = sin.data();
  p.num_threads = get_num_threads();
  run_rows(op, p, &Rotary::rows, [op, count = cos.size(0)](const Rotary& p) {
    for (int64_t i = 0; i < p.rows; ++i) {
      HE_CHECK_VALUE(0 <= p.positions[i] && p.positions[i] < count, op, ": positions[", i, "] is ",
                     p.positions[i], "; expected 0 to ", count - 1);
    }
    rotary_cpu(p);
  });
}

void add_scaled_(const Tensor& out, const Tensor& update, double scale) {
  const char* op = "add_scaled_";
  check_same_device(op, {{"out", out}, {"update", update}});
  AddScaled p{};
  p.dtype = layer_dtype(op, out);
  p.out_stride = rows_argument(op, "out", out, out).stride;
  p.update = rows_argument(op, "update", update, out);
  p.out = out.data();
  p.rows = out.size(0), p.width = out.size(1);
  p.scale = static_cast<float>(scale);
  p.num_threads = get_num_threads();
  if (out.numel() > 0) run_rows(op, p, &AddScaled::rows, add_scaled_cpu);
}

Gate gate_of(const std::string& name) {
  constexpr std::pair<const char*, Gate> kGates[] = {{"silu", Gate::silu},
                                                     {"gelu_tanh", Gate::gelu_tanh},
                                                     {"sigmoid", Gate::sigmoid},
                                                     {"softplus", Gate::softplus}};
  for (const auto& [known, gate] : kGates) {
    if (name == known) return gate;
  }
  HE_CHECK_VALUE(false, "gated_activation: activation is '", name,
                 "'; expected 'silu', 'gelu_tanh', 'sigmoid' or 'softplus'");
  return {};
}

Tensor gated_activation(const Tensor& gate, const Tensor& up, const std::string& activation) {
  const char* op = "gated_activation";
  check_same_device(op, {{"gate", gate}, {"up", up}});
  GatedActivation p{};
  p.activation = gate_of(activation);
  p.dtype = layer_dtype(op, gate);
  p.gate = rows_argument(op, "gate", gate, gate), p.up = rows_argument(op, "up", up, gate);
  p.rows = gate.size(0), p.width = gate.size(1);
  Tensor out = empty({p.rows, p.width}, gate.scalar_type());
  if (out.numel() == 0) return out;
  p.out = out.data();
  p.num_threads = get_num_threads();
  run_rows(op, p, &GatedActivation::rows, gated_activation_cpu);
  return out;
}

// The gradients of gate and up.
std::tuple<Tensor, Tensor> gated_activation_backward(const Tensor& grad_out, const Tensor& gate,
                                                     const Tensor& up,
                                                     const std::string& activation) {
  const char* op = "gated_activation_backward";
  check_same_device(op, {{"gate", gate}, {"up", up}, {"grad_out", grad_out}});
  GatedActivationBackward p{};
  p.activation = gate_of(activation);
  p.dtype = layer_dtype(op, gate);
  p.gate = rows_argument(op, "gate", gate, gate), p.up = rows_argument(op, "up", up, gate);
  p.grad_out = rows_argument(op, "grad_out", grad_out, gate);
  p.rows = gate.size(0), p.width = gate.size(1);
  Tensor grad_gate = empty({p.rows, p.width}, gate.scalar_type());
  Tensor grad_up = empty({p.rows, p.width}, gate.scalar_type());
  if (grad_up.numel() == 0) return {grad_gate, grad_up};
  p.grad_gate = grad_gate.data(), p.grad_up = grad_up.data();
  p.num_threads = get_num_threads();
  without_gil([&] { gated_activation_backward_cpu(p); });
  return {grad_gate, grad_up};
}

}  // namespace

void register_layer(py::module_& m) {
  m.def("rms_norm", &rms_norm, py::arg("x"), py::arg("weight"), py::arg("eps"), py::arg("offset"),
        py::arg("round_first"), py::arg("wants_inverse"), py::arg("residual") = py::none());
  m.def("rms_norm_backward", &rms_norm_backward, py::arg("grad_out"), py::arg("x"),
        py::arg("weight"), py::arg("inverse_rms"), py::arg("offset"));
  m.def("rotary_", &rotary_, py::arg("x"), py::arg("positions"), py::arg("cos"), py::arg("sin"));
  m.def("add_scaled_", &add_scaled_, py::arg("out"), py::arg("update"), py::arg("scale"));
  m.def("gated_activation", &gated_activation, py::arg("gate"), py::arg("up"),
        py::arg("activation"));
  m.def("gated_activation_backward", &gated_activation_backward, py::arg("grad_out"),
        py::arg("gate"), py::arg("up"), py::arg("activation"));
}

}  // namespace hybridengine
