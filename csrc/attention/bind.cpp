#include <algorithm>
#include <tuple>

#include "attention/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

const char* const kOp = "tree_attention";

enum class Order { heads_first, tokens_first };

// Of [tokens, heads, dim], or of one row [1, ...] of it with its heads or tokens first.
HeadRows head_rows(const Arguments& arguments, const Name& name, const Tensor& given,
                   ScalarType type, Order order, Dim tokens, Dim heads, Dim dim) {
  if (given.dim() != 4) return arguments.heads(name, given, type, {tokens, heads, dim});
  if (order == Order::tokens_first) {
    const void* data = arguments.heads(name, given, type, {1, tokens, heads, dim}).data;
    return {data, given.stride(1), given.stride(2)};
  }
  const void* data = arguments.heads(name, given, type, {1, heads, tokens, dim}).data;
  return {data, given.stride(2), given.stride(1)};
}

// A new tensor of heads, as one row with its tokens first if `like` is one.
Tensor make_heads(const Arguments& arguments, void*& data, const Tensor& like, int64_t tokens,
                  int64_t heads, int64_t dim) {
  const std::array<int64_t, 4> sizes{1, tokens, heads, dim};
  const int64_t count = like.dim();
  return arguments.make(data, Sizes(sizes.data() + 4 - count, count), like.scalar_type());
}

Arguments fill(Attention& p, In query, In key, In value, In subtree_ends, OptionalIn position_ids,
               double softmax_scale, std::optional<int64_t> window_size,
               std::optional<double> softcap) {
  const Arguments given(kOp, "query", query);
  given.on_cpu();
  const ScalarType type = query.scalar_type();
  p.dtype = given.dtype("query", type);
  const Order order = Order::heads_first;
  p.query = head_rows(given, "query", query, type, order, &p.tokens, &p.heads, &p.dim);
  p.key = head_rows(given, "key", key, type, order, p.tokens, &p.kv_heads, p.dim);
  p.value = head_rows(given, "value", value, type, order, p.tokens, p.kv_heads, &p.value_dim);
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
  Tensor out = make_heads(given, p.out, query, p.tokens, p.heads, p.value_dim);
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
  const Order order = Order::tokens_first;
  p.grad_out = head_rows(given, "grad_out", grad_out, type, order, p.tokens, p.heads, p.value_dim);
  p.out = head_rows(given, "out", out, type, order, p.tokens, p.heads, p.value_dim);
  p.lse = given.data<float>("lse", lse, {p.heads, p.tokens});
  Tensor grad_query = make_heads(given, p.grad_query, query, p.tokens, p.heads, p.dim);
  Tensor grad_key = make_heads(given, p.grad_key, key, p.tokens, p.kv_heads, p.dim);
  Tensor grad_value = make_heads(given, p.grad_value, value, p.tokens, p.kv_heads, p.value_dim);
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
