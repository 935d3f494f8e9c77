#include <ATen/ops/empty.h>

#include <optional>

#include "common/binding.h"
#include "decode_linear/params.h"

namespace hybridengine {

namespace {

// x [rows, k] @ weight [n, k].T (+ bias [n]) as a new [rows, n] tensor of `out_dtype`.
at::Tensor decode_linear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias, at::ScalarType out_dtype) {
  const char* op = "decode_linear";
  check_same_device(op, {{"x", x}, {"weight", weight}, {"bias", bias}});
  if (!x.device().is_cpu()) no_kernel_for(x.device(), op);
  for (const NamedTensor& operand : {NamedTensor("x", x), NamedTensor("weight", weight)}) {
    TORCH_CHECK_VALUE(operand.tensor->dim() == 2 &&
                          (operand.tensor->size(1) <= 1 || operand.tensor->stride(1) == 1),
                      op, ": ", operand.name, " has shape ", operand.tensor->sizes(),
                      " and strides ", operand.tensor->strides(),
                      "; expected a matrix with inner stride 1");
  }
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK_VALUE((dtype == at::kFloat || dtype == at::kBFloat16) &&
                        weight.scalar_type() == dtype && weight.size(1) == x.size(1),
                    op, ": x is ", x.sizes(), " ", dtype, ", weight ", weight.sizes(), " ",
                    weight.scalar_type(),
                    "; expected [T, K] and [N, K], both float32 or both bfloat16");
  TORCH_CHECK_VALUE(out_dtype == dtype || out_dtype == at::kFloat, op, ": out_dtype is ", out_dtype,
                    "; expected ", dtype, ", the dtype of x, or float32");
  DecodeLinear p{};
  p.rows = x.size(0), p.n = weight.size(0), p.k = x.size(1);
  if (bias) check_vector(*bias, "bias", dtype, p.n);
  at::Tensor out = at::empty({p.rows, p.n}, x.options().dtype(out_dtype));
  if (out.numel() == 0) return out;
  p.x = x.const_data_ptr(), p.x_stride = x.stride(0);
  p.weight = weight.const_data_ptr(), p.weight_stride = weight.stride(0);
  p.bias = bias ? bias->const_data_ptr() : nullptr;
  p.dtype = float_dtype(x, "x");
  p.out = out.mutable_data_ptr();
  p.out_dtype = float_dtype(out, "out");
  p.num_threads = at::get_num_threads();
  py::gil_scoped_release no_gil;
  decode_linear_cpu(p);
  return out;
}

}  // namespace

void register_decode_linear(py::module_& m) {
  m.def("decode_linear", &decode_linear, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("out_dtype"));
}

}  // namespace hybridengine
