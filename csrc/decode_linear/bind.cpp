
#include <optional>

#include "common/binding.h"
#include "decode_linear/params.h"

namespace hybridengine {

namespace {

// x [rows, k] @ weight [n, k].T (+ bias [n]) as a [rows, n] tensor of `out_dtype`: a new one, or
// `result`, which is contiguous.
Tensor decode_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     ScalarType out_dtype, const std::optional<Tensor>& result) {
  const char* op = "decode_linear";
  check_same_device(op, {{"x", x}, {"weight", weight}, {"bias", bias}, {"out", result}});
  if (!x.device().is_cpu()) no_kernel_for(x.device(), op);
  for (const NamedTensor& operand : {NamedTensor("x", x), NamedTensor("weight", weight)}) {
    HE_CHECK_VALUE(operand.tensor->dim() == 2 && operand.tensor->has_unit_inner_stride(), op, ": ",
                   operand.name, " has shape ", operand.tensor->sizes(), " and strides ",
                   operand.tensor->strides(), "; expected a matrix with inner stride 1");
  }
  const ScalarType dtype = x.scalar_type();
  HE_CHECK_VALUE((dtype == kFloat || dtype == kBFloat16) && weight.scalar_type() == dtype &&
                     weight.size(1) == x.size(1),
                 op, ": x is ", x.sizes(), " ", dtype, ", weight ", weight.sizes(), " ",
                 weight.scalar_type(),
                 "; expected [T, K] and [N, K], both float32 or both bfloat16");
  HE_CHECK_VALUE(out_dtype == dtype || out_dtype == kFloat, op, ": out_dtype is ", out_dtype,
                 "; expected ", dtype, ", the dtype of x, or float32");
  DecodeLinear p{};
  p.rows = x.size(0), p.n = weight.size(0), p.k = x.size(1);
  if (bias) check_vector(*bias, "bias", dtype, p.n);
  if (result) {
    HE_CHECK_VALUE(result->dim() == 2 && result->size(0) == p.rows && result->size(1) == p.n &&
                       result->is_contiguous() && result->scalar_type() == out_dtype,
                   op, ": out has shape ", result->sizes(), " and dtype ", result->scalar_type(),
                   "; expected a contiguous [", p.rows, ", ", p.n, "] tensor of ", out_dtype);
  }
  Tensor out = result ? *result : empty({p.rows, p.n}, out_dtype);
  if (out.numel() == 0) return out;
  p.x = x.data(), p.x_stride = x.stride(0);
  p.weight = weight.data(), p.weight_stride = weight.stride(0);
  p.bias = bias ? bias->data() : nullptr;
  p.dtype = float_dtype(x, "x");
  p.out = out.data();
  p.out_dtype = float_dtype(out, "out");
  p.num_threads = get_num_threads();
  run_rows(op, p, &DecodeLinear::rows, decode_linear_cpu);
  return out;
}

}  // namespace

void register_decode_linear(py::module_& m) {
  m.def("decode_linear", &decode_linear, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("out_dtype"), py::arg("out") = py::none());
}

}  // namespace hybridengine
