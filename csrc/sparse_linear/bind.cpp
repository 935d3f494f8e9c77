
#include <vector>

#include "common/binding.h"
#include "common/sequences.h"
#include "sparse_linear/params.h"

namespace hybridengine {

namespace {

void fill(SparseRows& p, const Tensor& hidden, const Tensor& weight, const Tensor& ids,
          const Tensor& ends, int64_t first_id) {
  const char* op = "sparse_linear_token_log_probs";
  check_same_device(op,
                    {{"hidden", hidden}, {"weight", weight}, {"kept_ids", ids}, {"cu_kept", ends}});
  if (!hidden.device().is_cpu()) no_kernel_for(hidden.device(), op);
  for (const NamedTensor& x : {NamedTensor("hidden", hidden), NamedTensor("weight", weight)}) {
    HE_CHECK_VALUE(x.tensor->dim() == 2 && x.tensor->has_unit_inner_stride(), op, ": ", x.name,
                   " has shape ", x.tensor->sizes(), " and strides ", x.tensor->strides(),
                   "; expected a matrix with inner stride 1");
  }
  p.dtype = float_dtype(hidden, "hidden");
  HE_CHECK_VALUE(p.dtype != DType::f64 && weight.scalar_type() == hidden.scalar_type() &&
                     weight.size(1) == hidden.size(1),
                 op, ": hidden is ", hidden.sizes(), " ", hidden.scalar_type(), ", weight ",
                 weight.sizes(), " ", weight.scalar_type(),
                 "; expected [T, H] and [V, H] of one dtype below float64");
  p.hidden = hidden.data();
  p.hidden_stride = hidden.stride(0);
  p.weight = weight.data();
  p.weight_stride = weight.stride(0);
  p.rows = hidden.size(0);
  p.width = hidden.size(1);
  p.vocab = weight.size(0);
  check_vector(ids, "kept_ids", kInt, ids.numel());
  check_vector(ends, "cu_kept", kInt, p.rows + 1);
  check_cu_seqlens(ends, ids.numel(), op, "cu_kept", "kept_ids");
  HE_CHECK_VALUE(first_id >= 0 && first_id <= INT32_MAX, op, ": first_id is ", first_id,
                 "; expected 0 to 2^31 - 1, as ids are int32");
  p.ids = ids.data<int32_t>();
  p.ends = ends.data<int32_t>();
  HE_CHECK_VALUE(p.ends[p.rows] == ids.numel(), op, ": cu_kept ends at ", p.ends[p.rows],
                 ", but there are ", ids.numel(), " kept_ids");
  p.first_id = first_id;
  p.num_threads = get_num_threads();
}

const float* gradients(const Tensor& grad_logits, const Tensor& ids) {
  check_same_device("sparse_linear_token_log_probs",
                    {{"kept_ids", ids}, {"grad_logits", grad_logits}});
  check_vector(grad_logits, "grad_logits", kFloat, ids.numel());
  return grad_logits.data<float>();
}

Tensor sparse_logits(const Tensor& hidden, const Tensor& weight, const Tensor& ids,
                     const Tensor& ends, int64_t first_id) {
  SparseLogits p{};
  fill(p, hidden, weight, ids, ends, first_id);
  Tensor logits = empty({ids.numel()}, kFloat);
  p.logits = logits.data<float>();
  without_gil([&] { sparse_logits_cpu(p); });
  return logits;
}

Tensor sparse_hidden_grad(const Tensor& hidden, const Tensor& weight, const Tensor& ids,
                          const Tensor& ends, int64_t first_id, const Tensor& grad_logits) {
  SparseHiddenGrad p{};
  fill(p, hidden, weight, ids, ends, first_id);
  p.grad_logits = gradients(grad_logits, ids);
  Tensor grad = empty({p.rows, p.width}, hidden.scalar_type());
  p.hidden_grad = grad.data();
  without_gil([&] { sparse_hidden_grad_cpu(p); });
  return grad;
}

// Sorts the entries by id (counting sort, stable) and runs the kernel over them.
void add_weight_grad(SparseWeightGrad& p, int64_t entries) {
  std::vector<int64_t> begin(p.vocab + 1, 0);
  const auto local = [&](int64_t i) { return p.ids[i] - p.first_id; };
  const auto is_local = [&](int64_t i) { return local(i) >= 0 && local(i) < p.vocab; };
  for (int64_t i = 0; i < entries; ++i) begin[is_local(i) ? local(i) + 1 : 0] += is_local(i);
  for (int64_t id = 0; id < p.vocab; ++id) begin[id + 1] += begin[id];
  std::vector<int32_t> entry(begin[p.vocab]);
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t i = 0; i < entries; ++i) {
    if (is_local(i)) entry[next[local(i)]++] = static_cast<int32_t>(i);
  }
  p.entry = entry.data();
  p.begin = begin.data();
  sparse_weight_grad_cpu(p);
}

// Into `out`, which is of the weight's dtype, or float32 to add to.
void sparse_weight_grad(const Tensor& hidden, const Tensor& weight, const Tensor& ids,
                        const Tensor& ends, int64_t first_id, const Tensor& grad_logits,
                        Tensor& out, bool accumulate) {
  SparseWeightGrad p{};
  fill(p, hidden, weight, ids, ends, first_id);
  HE_CHECK_VALUE(out.is_contiguous() && out.sizes() == weight.sizes() && out.is_cpu() &&
                     out.scalar_type() == (accumulate ? kFloat : weight.scalar_type()),
                 "sparse_linear_token_log_probs: main_grad has shape ", out.sizes(), " and dtype ",
                 out.scalar_type(), "; expected contiguous float32 ", weight.sizes());
  p.grad_logits = gradients(grad_logits, ids);
  p.weight_grad = out.data();
  p.grad_dtype = float_dtype(out, "weight_grad");
  p.accumulate = accumulate;
  const int64_t entries = ids.numel();
  without_gil([&] { add_weight_grad(p, entries); });
}

}  // namespace

void register_sparse_linear(py::module_& m) {
  m.def("sparse_logits", &sparse_logits, py::arg("hidden"), py::arg("weight"), py::arg("ids"),
        py::arg("ends"), py::arg("first_id"));
  m.def("sparse_hidden_grad", &sparse_hidden_grad, py::arg("hidden"), py::arg("weight"),
        py::arg("ids"), py::arg("ends"), py::arg("first_id"), py::arg("grad_logits"));
  m.def("sparse_weight_grad", &sparse_weight_grad, py::arg("hidden"), py::arg("weight"),
        py::arg("ids"), py::arg("ends"), py::arg("first_id"), py::arg("grad_logits"),
        py::arg("out"), py::arg("accumulate"));
}

}  // namespace hybridengine
