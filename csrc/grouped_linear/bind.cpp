#include "common/binding.h"
#include "grouped_linear/params.h"

namespace hybridengine {

namespace {

// Fills what all products share.
Arguments fill(GroupedGemm& p, In x, In ends) {
  const Arguments given("grouped_linear", "x", x);
  given.on_cpu();
  p.dtype = given.dtype("x", x.scalar_type(), kWideFloats);
  p.ends = given.ends("cu_counts", ends, &p.groups, x.size(0), "rows", true);
  return given;
}

// A matrix of rows [T, C] as an operand, with the sums along C or along T.
GroupedMatrix along_columns(const Rows& rows) { return {rows.stride, 1, 0, rows.stride}; }
GroupedMatrix along_rows(const Rows& rows) { return {1, rows.stride, 0, rows.stride}; }

GroupedMatrix transposed(GroupedMatrix x) {
  return {x.k_stride, x.stride, x.group_stride, x.row_stride};
}

// The matrices [E, N, K], whose two inner dimensions may be transposed in memory.
GroupedMatrix of_groups(const Arguments& given, In weight, ScalarType dtype, int64_t groups,
                        int64_t n, int64_t k) {
  given.same_device("weight", weight);
  given.expect(weight.scalar_type() == dtype && weight.sizes() == Sizes({groups, n, k}) &&
                   (weight.stride(2) == 1 || weight.stride(1) == 1),
               "weight has shape ", weight.sizes(), ", strides ", weight.strides(), " and dtype ",
               weight.scalar_type(), "; expected ", Sizes({groups, n, k}), " of ", dtype,
               " with stride 1 along one of the last two dimensions");
  return {weight.stride(1), weight.stride(2), weight.stride(0), 0};
}

// out [T, N] = x [T, K] @ weight [E, N, K].T of the group of every row.
void grouped_linear(In x, In weight, In ends, In out) {
  GroupedGemm p{};
  const Arguments given = fill(p, x, ends);
  const ScalarType type = x.scalar_type();
  int64_t rows, columns;
  const Rows of_x = given.rows("x", x, type, {&rows, &p.k});
  const Rows of_out = given.rows("out", out, type, {rows, &columns});
  const GroupedMatrix layout = of_groups(given, weight, type, p.groups, columns, p.k);
  p.out = out.data();
  if (layout.k_stride == 1) {  // the rows are packed, whose columns are few
    p.a = weight.data(), p.a_layout = layout, p.m = columns;
    p.b = x.data(), p.b_layout = along_columns(of_x);
    p.out_layout = transposed(along_columns(of_out));
    p.grouped = GroupedDim::n;
  } else {
    p.a = x.data(), p.a_layout = along_columns(of_x);
    p.b = weight.data(), p.b_layout = layout, p.n = columns;
    p.out_layout = along_columns(of_out);
    p.grouped = GroupedDim::m;
  }
  given.run(p, grouped_gemm_cpu);
}

// out [E, N, K] = grad [T, N].T @ x [T, K] over the rows of every group.
void grouped_weight_grad(In grad, In x, In ends, In out) {
  GroupedGemm p{};
  const Arguments given = fill(p, x, ends);
  const ScalarType type = x.scalar_type();
  int64_t rows;
  p.b_layout = along_rows(given.rows("x", x, type, {&rows, &p.n}));
  p.a_layout = along_rows(given.rows("grad", grad, type, {rows, &p.m}));
  p.out_layout = of_groups(given, out, type, p.groups, p.m, p.n);
  p.a = grad.data(), p.b = x.data(), p.out = out.data();
  p.grouped = GroupedDim::k;
  if (p.out_layout.k_stride != 1) {
    std::swap(p.a, p.b), std::swap(p.a_layout, p.b_layout), std::swap(p.m, p.n);
    p.out_layout = transposed(p.out_layout);
  }
  given.run(p, grouped_gemm_cpu);
}

}  // namespace

void register_grouped_linear(py::module_& m) {
  def(m, "grouped_linear", &grouped_linear, "x weight cu_counts out");
  def(m, "grouped_weight_grad", &grouped_weight_grad, "grad x cu_counts out");
}

}  // namespace hybridengine
