#include <algorithm>
#include <tuple>

#include "attention/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

const char* const kOp = "tree_attention";

Arguments fill(Attention& p, In query, In key, In value, In subtree_ends, OptionalIn position_ids,
               double softmax_scale, std::optional<int64_t> window_size,
               std::optional<double> softcap) {
  const Arguments given(kOp, "query", query);
  given.on_cpu();
  const ScalarType type = query.scalar_type();
  p.dtype = given.dtype("query", type);
  p.query = given.heads("query", query, type, {&p.tokens, &p.heads, &p.dim});
  p.key = given.heads("key", key, type, {p.tokens, &p.kv_heads, p.dim});
  p.value = given.heads("value", value, type, {p.tokens, p.kv_heads, &p.value_dim});
  given.expect(p.kv_heads > 0 && p.heads % p.kv_heads == 0, "query has ", p.heads, " heads, key ",
               p.kv_heads, "; expected a multiple");
  p.ends = given.data<int32_t>("subtree_ends", subtree_ends, {p.tokens});
  if (window_size) {
    given.expect(position_ids.has_value(), "position_ids is None; window_size needs them");
    p.positions = given.data<int32_t>("position_ids", position_ids, {p.tokens});
    check_values(kOp, "position_ids", p.positions, p.tokens, 0, INT32_MAX);
    p.window = static_cast<int32_t>(std::min<int64_t>(*window_size, INT32_MAX));
  }
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap.value_or(0.0));
  return given;
}

std::tuple<Tensor, Tensor> attention_forward(In query, In key, In value, OptionalIn sinks,
                                             In subtree_ends, OptionalIn position_ids,
                                             double softmax_scale,
                                             std::optional<int64_t> window_size,
                                             std::optional<double> softcap) {
  AttentionForward p{};
  const Arguments given =
      fill(p, query, key, value, subtree_ends, position_ids, softmax_scale, window_size, softcap);
  p.sinks = given.data<float>("sinks", sinks, {p.heads});
  Tensor out = given.make(p.out, {p.tokens, p.heads, p.value_dim}, query.scalar_type());
  Tensor lse = given.make(p.lse, {p.heads, p.tokens});
  if (p.tokens > 0) given.run(p, attention_forward_cpu);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    In grad_out, In query, In key, In value, In out, In lse, In subtree_ends,
    OptionalIn position_ids, double softmax_scale, std::optional<int64_t> window_size,
    std::optional<double> softcap) {
  AttentionBackward p{};
  const Arguments given =
      fill(p, query, key, value, subtree_ends, position_ids, softmax_scale, window_size, softcap);
  const ScalarType type = query.scalar_type();
  p.grad_out = given.heads("grad_out", grad_out, type, {p.tokens, p.heads, p.value_dim});
  p.out = given.heads("out", out, type, {p.tokens, p.heads, p.value_dim});
  p.lse = given.data<float>("lse", lse, {p.heads, p.tokens});
  Tensor grad_query = given.make(p.grad_query, query.sizes(), type);
  Tensor grad_key = given.make(p.grad_key, key.sizes(), type);
  Tensor grad_value = given.make(p.grad_value, value.sizes(), type);
  Tensor delta = given.make(p.delta, lse.sizes());
  if (p.tokens > 0) given.run(p, attention_backward_cpu);
  return {grad_query, grad_key, grad_value, delta};
}

}  // namespace

void register_attention(py::module_& m) {
  def(m, "attention_forward", &attention_forward,
      "query key value sinks subtree_ends position_ids softmax_scale window_size softcap");
  def(m, "attention_backward", &attention_backward,
      "grad_out query key value out lse subtree_ends position_ids softmax_scale window_size "
      "softcap");
}

}  // namespace hybridengine
