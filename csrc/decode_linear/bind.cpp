#include "common/binding.h"
#include "decode_linear/params.h"

namespace hybridengine {

namespace {

// x [rows, k] @ weight [n, k].T (+ bias [n]) as a [rows, n] tensor of `out_dtype`: a new one, or
// `result`, which is contiguous.
Tensor decode_linear(In x, In weight, OptionalIn bias, ScalarType out_dtype, OptionalIn result) {
  const Arguments given("decode_linear", "x", x);
  given.on_cpu();
  const ScalarType dtype = x.scalar_type(), out_dtypes[] = {dtype, kFloat};
  DecodeLinear p{};
  p.dtype = given.dtype("x", dtype, kWideFloats);
  p.out_dtype = given.dtype("out_dtype", out_dtype, out_dtypes);
  p.x = given.rows("x", x, dtype, {&p.rows, &p.k});
  p.weight = given.rows("weight", weight, dtype, {&p.n, p.k});
  p.bias = given.data("bias", bias, dtype, {p.n});
  p.out = given.data("out", result, out_dtype, {p.rows, p.n});
  Tensor out = result ? *result : given.make(p.out, {p.rows, p.n}, out_dtype);
  if (out.numel() > 0) given.run_rows(p, &DecodeLinear::rows, decode_linear_cpu);
  return out;
}

}  // namespace

void register_decode_linear(py::module_& m) {
  def(m, "decode_linear", &decode_linear, "x weight bias out_dtype", py::arg("out") = py::none());
}

}  // namespace hybridengine
