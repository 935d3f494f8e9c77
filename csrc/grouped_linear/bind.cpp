#include "common/binding.h"
#include "common/sequences.h"
#include "grouped_linear/params.h"

namespace hybridengine {

namespace {

constexpr const char* kOp = "grouped_linear";

// Fills what all products share from `rows` [T, *] and `out`.
GroupedGemm problem(const Tensor& rows, const Tensor& ends, const Tensor& other,
                    const Tensor& out) {
  check_same_device(kOp, {{"x", rows}, {"cu_counts", ends}, {"weight", other}, {"out", out}});
  if (!rows.device().is_cpu()) no_kernel_for(rows.device(), kOp);
  for (const NamedTensor& t :
       {NamedTensor("x", rows), NamedTensor("weight", other), NamedTensor("out", out)}) {
    const ScalarType dtype = t.tensor->scalar_type();
    HE_CHECK_VALUE((dtype == kFloat || dtype == kBFloat16) && dtype == out.scalar_type(), kOp, ": ",
                   t.name, " is ", dtype, ", out ", out.scalar_type(),
                   "; expected all float32 or all bfloat16");
  }
  HE_CHECK_VALUE(rows.dim() == 2, kOp, ": x has shape ", rows.sizes(), "; expected [T, K]");
  check_vector(ends, "cu_counts", kInt, ends.numel());
  check_cu_seqlens(ends, rows.size(0), kOp, "cu_counts", "rows");
  GroupedGemm p{};
  p.ends = ends.data<int32_t>();
  p.groups = ends.size(0) - 1;
  HE_CHECK_VALUE(p.ends[p.groups] == rows.size(0), kOp, ": cu_counts ends at ", p.ends[p.groups],
                 ", but there are ", rows.size(0), " rows");
  p.dtype = float_dtype(out, "out");
  p.num_threads = get_num_threads();
  return p;
}

// The matrix of rows [T, C] as an operand, with the sums along C or along T.
GroupedMatrix of_rows(const Tensor& rows, const char* name, bool along_rows) {
  HE_CHECK_VALUE(rows.dim() == 2 && rows.has_unit_inner_stride(), kOp, ": ", name, " has shape ",
                 rows.sizes(), " and strides ", rows.strides(),
                 "; expected a matrix with inner stride 1");
  const int64_t stride = rows.stride(0);
  return along_rows ? GroupedMatrix{1, stride, 0, stride} : GroupedMatrix{stride, 1, 0, stride};
}

GroupedMatrix transposed(GroupedMatrix x) {
  return {x.k_stride, x.stride, x.group_stride, x.row_stride};
}

// The matrices [E, N, K], whose two inner dimensions may be transposed in memory.
GroupedMatrix of_groups(const Tensor& weight, int64_t groups, int64_t n, int64_t k) {
  HE_CHECK_VALUE(weight.dim() == 3 && weight.size(0) == groups && weight.size(1) == n &&
                     weight.size(2) == k && (weight.stride(2) == 1 || weight.stride(1) == 1),
                 kOp, ": weight has shape ", weight.sizes(), " and strides ", weight.strides(),
                 "; expected [", groups, ", ", n, ", ", k,
                 "] with stride 1 along one of the last two dimensions");
  return {weight.stride(1), weight.stride(2), weight.stride(0), 0};
}

// out [T, N] = x [T, K] @ weight [E, N, K].T of the group of every row.
void grouped_linear(const Tensor& x, const Tensor& weight, const Tensor& ends, const Tensor& out) {
  GroupedGemm p = problem(x, ends, weight, out);
  HE_CHECK_VALUE(out.dim() == 2 && out.size(0) == x.size(0), kOp, ": out has shape ", out.sizes(),
                 "; expected ", x.size(0), " rows");
  const GroupedMatrix x_layout = of_rows(x, "x", false), out_layout = of_rows(out, "out", false);
  const GroupedMatrix w_layout = of_groups(weight, p.groups, out.size(1), x.size(1));
  p.k = x.size(1);
  p.out = out.data();
  if (w_layout.k_stride == 1) {  // the rows are packed, whose columns are few
    p.a = weight.data(), p.a_layout = w_layout, p.m = out.size(1);
    p.b = x.data(), p.b_layout = x_layout;
    p.out_layout = transposed(out_layout);
    p.grouped = GroupedDim::n;
  } else {
    p.a = x.data(), p.a_layout = x_layout;
    p.b = weight.data(), p.b_layout = w_layout, p.n = out.size(1);
    p.out_layout = out_layout;
    p.grouped = GroupedDim::m;
  }
  without_gil([&] { grouped_gemm_cpu(p); });
}

// out [E, N, K] = grad [T, N].T @ x [T, K] over the rows of every group.
void grouped_weight_grad(const Tensor& grad, const Tensor& x, const Tensor& ends,
                         const Tensor& out) {
  GroupedGemm p = problem(x, ends, grad, out);
  HE_CHECK_VALUE(grad.dim() == 2 && grad.size(0) == x.size(0), kOp, ": grad has shape ",
                 grad.sizes(), "; expected ", x.size(0), " rows");
  p.a = grad.data(), p.a_layout = of_rows(grad, "grad", true), p.m = grad.size(1);
  p.b = x.data(), p.b_layout = of_rows(x, "x", true), p.n = x.size(1);
  p.out_layout = of_groups(out, p.groups, p.m, p.n);
  p.out = out.data();
  p.grouped = GroupedDim::k;
  if (p.out_layout.k_stride != 1) {
    std::swap(p.a, p.b), std::swap(p.a_layout, p.b_layout), std::swap(p.m, p.n);
    p.out_layout = transposed(p.out_layout);
  }
  without_gil([&] { grouped_gemm_cpu(p); });
}

}  // namespace

void register_grouped_linear(py::module_& m) {
  m.def("grouped_linear", &grouped_linear, py::arg("x"), py::arg("weight"), py::arg("cu_counts"),
        py::arg("out"));
  m.def("grouped_weight_grad", &grouped_weight_grad, py::arg("grad"), py::arg("x"),
        py::arg("cu_counts"), py::arg("out"));
}

}  // namespace hybridengine
