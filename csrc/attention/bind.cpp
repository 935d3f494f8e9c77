
#include <algorithm>

#include "attention/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

const char* const kOp = "tree_attention";

void fill(Attention& p, const Tensor& query, const Tensor& key, const Tensor& value,
          const Tensor& subtree_ends, const std::optional<Tensor>& position_ids,
          double softmax_scale, std::optional<int64_t> window_size, std::optional<double> softcap) {
  check_same_device(kOp, {{"query", query}, {"key", key}, {"value", value}});
  const Arguments given(kOp, "query", query);
  if (!query.device().is_cpu()) no_kernel_for(query.device(), kOp);
  p.dtype = float_dtype(query, "query");
  HE_CHECK_VALUE(p.dtype != DType::f64, kOp, ": query has dtype float64; use the reference");
  HE_CHECK_VALUE(query.dim() == 3 && key.dim() == 3 && value.dim() == 3 && key.size(1) > 0 &&
                     query.size(1) % key.size(1) == 0,
                 kOp, ": query is ", query.sizes(), ", key ", key.sizes(), " and value ",
                 value.sizes(), "; expected [T, H, D], [T, H_kv, D] and [T, H_kv, D_v]");
  p.tokens = query.size(0), p.heads = query.size(1), p.kv_heads = key.size(1);
  p.dim = query.size(2), p.value_dim = value.size(2);
  p.query = head_rows(kOp, "query", query, query, p.heads, p.dim);
  p.key = head_rows(kOp, "key", key, query, p.kv_heads, p.dim);
  p.value = head_rows(kOp, "value", value, query, p.kv_heads, p.value_dim);
  p.ends = given.data<int32_t>("subtree_ends", subtree_ends, {p.tokens});
  if (window_size) {
    HE_CHECK_VALUE(position_ids, kOp, ": position_ids is None; window_size needs them");
    p.positions = given.data<int32_t>("position_ids", *position_ids, {p.tokens});
    const int32_t* negative = std::find_if(p.positions, p.positions + p.tokens,
                                           [](int32_t position) { return position < 0; });
    HE_CHECK_VALUE(negative == p.positions + p.tokens, kOp, ": position_ids[",
                   negative - p.positions, "] is negative");
    p.window = static_cast<int32_t>(std::min<int64_t>(*window_size, INT32_MAX));
  }
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap.value_or(0.0));
  p.num_threads = get_num_threads();
}

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& sinks,
    const Tensor& subtree_ends, const std::optional<Tensor>& position_ids, double softmax_scale,
    std::optional<int64_t> window_size, std::optional<double> softcap) {
  AttentionForward p{};
  fill(p, query, key, value, subtree_ends, position_ids, softmax_scale, window_size, softcap);
  p.sinks = Arguments(kOp, "query", query).data<float>("sinks", sinks, {p.heads});
  Tensor out = empty({p.tokens, p.heads, p.value_dim}, query.scalar_type(), query.device());
  Tensor lse = empty({p.heads, p.tokens}, kFloat, query.device());
  p.out = out.data();
  p.lse = lse.data<float>();
  if (p.tokens > 0) without_gil([&] { attention_forward_cpu(p); });
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, const Tensor& subtree_ends,
    const std::optional<Tensor>& position_ids, double softmax_scale,
    std::optional<int64_t> window_size, std::optional<double> softcap) {
  AttentionBackward p{};
  fill(p, query, key, value, subtree_ends, position_ids, softmax_scale, window_size, softcap);
  check_same_device(kOp, {{"query", query}, {"grad_out", grad_out}, {"out", out}});
  p.grad_out = head_rows(kOp, "grad_out", grad_out, query, p.heads, p.value_dim);
  p.out = head_rows(kOp, "out", out, query, p.heads, p.value_dim);
  p.lse = Arguments(kOp, "query", query).data<float>("lse", lse, {p.heads, p.tokens});
  Tensor grad_query = empty_like(query), grad_key = empty_like(key), grad_value = empty_like(value);
  Tensor delta = empty_like(lse);
  p.grad_query = grad_query.data();
  p.grad_key = grad_key.data();
  p.grad_value = grad_value.data();
  p.delta = delta.data<float>();
  if (p.tokens > 0) without_gil([&] { attention_backward_cpu(p); });
  return {grad_query, grad_key, grad_value, delta};
}

}  // namespace

void register_attention(py::module_& m) {
  m.def("attention_forward", &attention_forward, py::arg("query"), py::arg("key"), py::arg("value"),
        py::arg("sinks"), py::arg("subtree_ends"), py::arg("position_ids"),
        py::arg("softmax_scale"), py::arg("window_size"), py::arg("softcap"));
  m.def("attention_backward", &attention_backward, py::arg("grad_out"), py::arg("query"),
        py::arg("key"), py::arg("value"), py::arg("out"), py::arg("lse"), py::arg("subtree_ends"),
        py::arg("position_ids"), py::arg("softmax_scale"), py::arg("window_size"),
        py::arg("softcap"));
}

}  // namespace hybridengine
