#include <string>
#include <tuple>

#include "common/binding.h"
#include "layer/params.h"

namespace hybridengine {

namespace {

// The arguments of an operator on the rows of x; `dtype` becomes that of x.
Arguments arguments_of(const char* op, const char* name, In x, DType& dtype) {
  const Arguments given(op, name, x);
  dtype = given.on_cpu().dtype(name, x.scalar_type(), kWideFloats);
  return given;
}

// Fills the operands of a norm of x [rows, width] or [rows, heads, width], and runs it. Returns the
// result and, if wanted, the inverse divisor of its rows (else empty).
std::tuple<Tensor, Tensor> run_norm(const char* op, Norm& p, In x, In weight, OptionalIn bias,
                                    double eps, bool wants_inverse, OptionalIn residual) {
  const Arguments given = arguments_of(op, "x", x, p.dtype);
  const ScalarType type = x.scalar_type();
  if (x.dim() == 3 && !residual) {
    const HeadRows rows = given.heads("x", x, type, {&p.rows, &p.heads, &p.width});
    p.x = {rows.data, rows.head_stride};
    p.token_stride = rows.token_stride;
    p.rows *= p.heads;
  } else {
    p.x = given.rows("x", x, type, {&p.rows, &p.width});
    p.heads = 1, p.token_stride = p.x.stride;
  }
  p.weight = given.data("weight", weight, type, {p.width});
  p.bias = given.data("bias", bias, type, {p.width});
  p.residual = given.data("residual", residual, type, {p.rows, p.width});
  Tensor out = given.make(p.out, x.sizes(), type);
  Tensor inverse = given.make_if(wants_inverse, p.inverse_rms, p.rows);
  p.eps = static_cast<float>(eps);
  if (out.numel() > 0) given.run_rows(p, &Norm::rows, norm_cpu);
  return {out, inverse};
}

// The norm of x and, if wanted, 1 / rms of its rows. A residual becomes the sum of x and itself,
// which is then normed; x has no heads then.
std::tuple<Tensor, Tensor> rms_norm(In x, In weight, double eps, double offset, bool round_first,
                                    bool wants_inverse, OptionalIn residual) {
  Norm p{};
  p.offset = static_cast<float>(offset);
  p.round_first = round_first;
  return run_norm("rms_norm", p, x, weight, std::nullopt, eps, wants_inverse, residual);
}

// The norm of x and, if wanted, 1 / (standard deviation) of its rows.
std::tuple<Tensor, Tensor> layer_norm(In x, In weight, OptionalIn bias, double eps,
                                      bool wants_inverse) {
  Norm p{};
  p.centered = true;
  return run_norm("layer_norm", p, x, weight, bias, eps, wants_inverse, std::nullopt);
}

// The gradients of x, weight and bias (float32), the last one empty unless `centered`.
std::tuple<Tensor, Tensor, Tensor> norm_backward(const char* op, NormBackward& p, In grad_out, In x,
                                                 In weight, In inverse) {
  const Arguments given = arguments_of(op, "x", x, p.dtype);
  const ScalarType type = x.scalar_type();
  p.x = given.rows("x", x, type, {&p.rows, &p.width});
  p.grad_out = given.rows("grad_out", grad_out, type, {p.rows, p.width});
  p.weight = given.data("weight", weight, type, {p.width});
  p.inverse_rms = given.data<float>("inverse_rms", inverse, {p.rows});
  Tensor grad_x = given.make(p.grad_x, {p.rows, p.width}, type);
  Tensor grad_weight = given.make(p.grad_weight, {p.width});
  Tensor grad_bias = given.make_if(p.centered, p.grad_bias, p.width);
  given.run(p, norm_backward_cpu);
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor> rms_norm_backward(In grad_out, In x, In weight, In inverse_rms,
                                             double offset) {
  NormBackward p{};
  p.offset = static_cast<float>(offset);
  auto [grad_x, grad_weight, _] =
      norm_backward("rms_norm_backward", p, grad_out, x, weight, inverse_rms);
  return {grad_x, grad_weight};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(In grad_out, In x, In weight,
                                                       In inverse_rms) {
  NormBackward p{};
  p.centered = true;
  return norm_backward("layer_norm_backward", p, grad_out, x, weight, inverse_rms);
}

// Rotates the first elements of the heads of x [rows, heads, dim] in place, twice as many as the
// tables have columns, by rows `positions` of the tables: their halves, or neighbours.
void rotary_(In x, In positions, In cos, In sin, bool neighbours) {
  Rotary p{};
  const Arguments given = arguments_of("rotary_", "x", x, p.dtype);
  const ScalarType type = x.scalar_type();
  int64_t count = 0;
  const HeadRows rows = given.heads("x", x, type, {&p.rows, &p.heads, &p.dim});
  p.x = x.data();
  p.row_stride = rows.token_stride;
  p.positions = given.data<int64_t>("positions", positions, {p.rows});
  const ScalarType table_type = cos.scalar_type();
  p.cos = given.data("cos", cos, table_type == kFloat ? kFloat : type, {&count, &p.half});
  p.table_dtype = dtype_of(table_type);
  p.neighbours = neighbours;
  given.expect(2 * p.half <= p.dim && (x.numel() == 0 || p.heads == 1 || rows.head_stride == p.dim),
               "x has shape ", x.sizes(), " and strides ", x.strides(), ", and cos ", cos.sizes(),
               "; expected contiguous heads of at least twice as many elements as cos has columns");
  p.sin = given.data("sin", sin, table_type, {count, p.half});
  given.run_rows(p, &Rotary::rows, [op = given.op(), count](const Rotary& p) {
    check_values(op, "positions", p.positions, p.rows, 0, count - 1);
    rotary_cpu(p);
  });
}

void add_scaled_(In out, In update, double scale) {
  AddScaled p{};
  const Arguments given = arguments_of("add_scaled_", "out", out, p.dtype);
  const ScalarType type = out.scalar_type();
  p.out = given.data("out", out, type, {&p.rows, &p.width}, &p.out_stride);
  p.update = given.rows("update", update, type, {p.rows, p.width});
  p.scale = static_cast<float>(scale);
  if (out.numel() > 0) given.run_rows(p, &AddScaled::rows, add_scaled_cpu);
}

Gate gate_of(const std::string& name) {
  constexpr std::pair<const char*, Gate> kGates[] = {{"silu", Gate::silu},
                                                     {"gelu", Gate::gelu},
                                                     {"gelu_tanh", Gate::gelu_tanh},
                                                     {"sigmoid", Gate::sigmoid},
                                                     {"softplus", Gate::softplus}};
  for (const auto& [known, gate] : kGates) {
    if (name == known) return gate;
  }
  HE_CHECK_VALUE(false, "gated_activation: activation is '", name,
                 "'; expected 'silu', 'gelu', 'gelu_tanh', 'sigmoid' or 'softplus'");
  return {};
}

template <typename Params>
Arguments fill_gated(const char* op, Params& p, In gate, In up, const std::string& activation) {
  const Arguments given = arguments_of(op, "gate", gate, p.dtype);
  p.activation = gate_of(activation);
  return given;
}

// gate, up: [rows, width] or [rows, heads, width].
Tensor gated_activation(In gate, In up, const std::string& activation) {
  GatedActivation p{};
  const Arguments given = fill_gated("gated_activation", p, gate, up, activation);
  const ScalarType type = gate.scalar_type();
  if (gate.dim() == 3) {
    p.gate = given.heads("gate", gate, type, {&p.rows, &p.heads, &p.width});
    p.up = given.heads("up", up, type, {p.rows, p.heads, p.width});
    p.rows *= p.heads;
  } else {
    const Rows gates = given.rows("gate", gate, type, {&p.rows, &p.width});
    const Rows ups = given.rows("up", up, type, {p.rows, p.width});
    p.gate = {gates.data, gates.stride, 0}, p.up = {ups.data, ups.stride, 0};
    p.heads = 1;
  }
  Tensor out = given.make(p.out, gate.sizes(), type);
  if (out.numel() > 0) given.run_rows(p, &GatedActivation::rows, gated_activation_cpu);
  return out;
}

// The gradients of gate and up.
std::tuple<Tensor, Tensor> gated_activation_backward(In grad_out, In gate, In up,
                                                     const std::string& activation) {
  GatedActivationBackward p{};
  const Arguments given = fill_gated("gated_activation_backward", p, gate, up, activation);
  const ScalarType type = gate.scalar_type();
  p.gate = given.rows("gate", gate, type, {&p.rows, &p.width});
  p.up = given.rows("up", up, type, {p.rows, p.width});
  p.grad_out = given.rows("grad_out", grad_out, type, {p.rows, p.width});
  Tensor grad_gate = given.make(p.grad_gate, {p.rows, p.width}, type);
  Tensor grad_up = given.make(p.grad_up, {p.rows, p.width}, type);
  if (grad_up.numel() > 0) given.run(p, gated_activation_backward_cpu);
  return {grad_gate, grad_up};
}

// g and beta of Gated DeltaNet, float32 [rows, heads].
std::tuple<Tensor, Tensor> delta_gates(In a, In b, In log_rate, In bias) {
  DeltaGates p{};
  const Arguments given = arguments_of("delta_gates", "a", a, p.dtype);
  const ScalarType type = a.scalar_type();
  p.a = given.rows("a", a, type, {&p.rows, &p.heads});
  p.b = given.rows("b", b, type, {p.rows, p.heads});
  p.log_rate = given.data<float>("log_rate", log_rate, {p.heads});
  p.bias = given.data("bias", bias, type, {p.heads});
  Tensor g = given.make(p.g, {p.rows, p.heads}), beta = given.make(p.beta, {p.rows, p.heads});
  if (g.numel() > 0) given.run_rows(p, &DeltaGates::rows, delta_gates_cpu);
  return {g, beta};
}

}  // namespace

void register_layer(py::module_& m) {
  def(m, "rms_norm", &rms_norm, "x weight eps offset round_first wants_inverse",
      py::arg("residual") = py::none());
  def(m, "rms_norm_backward", &rms_norm_backward, "grad_out x weight inverse_rms offset");
  def(m, "layer_norm", &layer_norm, "x weight bias eps wants_inverse");
  def(m, "layer_norm_backward", &layer_norm_backward, "grad_out x weight inverse_rms");
  def(m, "rotary_", &rotary_, "x positions cos sin neighbours");
  def(m, "add_scaled_", &add_scaled_, "out update scale");
  def(m, "gated_activation", &gated_activation, "gate up activation");
  def(m, "delta_gates", &delta_gates, "a b log_rate bias");
  def(m, "gated_activation_backward", &gated_activation_backward, "grad_out gate up activation");
}

}  // namespace hybridengine
