#include <optional>
#include <tuple>

#include "common/binding.h"
#include "linear_recurrence/params.h"

namespace hybridengine {

namespace {

const char* const kOp = "linear_recurrence";

// `keep_borders`: for a backward, the states between chunks have slots, too.
Segments plan_segments(const Tensor& cu_seqlens, const std::optional<Tensor>& parents,
                       int64_t tokens, bool keep_borders) {
  const int64_t count = cu_seqlens.numel() - 1;
  HE_CHECK_VALUE(count >= 0, kOp, ": cu_seqlens is empty; expected 0 and the end of every segment");
  check_vector(cu_seqlens, "cu_seqlens", kInt, count + 1);
  const int32_t* ends = cu_seqlens.data<int32_t>();
  HE_CHECK_VALUE(ends[0] == 0 && ends[count] == tokens, kOp, ": cu_seqlens goes from ", ends[0],
                 " to ", ends[count], "; expected 0 to ", tokens);
  if (parents) check_vector(*parents, "parents", kInt, count);
  Segments plan;
  std::vector<int64_t> tree(count), size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = parents ? parents->data<int32_t>()[i] : -1;
    HE_CHECK_VALUE(ends[i] <= ends[i + 1], kOp, ": cu_seqlens[", i + 1, "] is ", ends[i + 1],
                   ", less than cu_seqlens[", i, "], ", ends[i]);
    HE_CHECK_VALUE(-1 <= parent && parent < i, kOp, ": parents[", i, "] is ", parent,
                   "; expected -1 or an earlier segment");
    plan.segments.push_back({ends[i], ends[i + 1], parent, -1, -1});
    tree[i] = parent < 0 ? std::ssize(size) : tree[parent];
    if (parent < 0) size.push_back(0);
    ++size[tree[i]];
    if (parent >= 0 && plan.segments[parent].end_slot < 0) {
      plan.segments[parent].end_slot = plan.slots++;
    }
  }
  plan.trees.assign(1, 0);
  for (const int64_t segments : size) plan.trees.push_back(plan.trees.back() + segments);
  std::vector<int64_t> next(plan.trees.begin(), plan.trees.end() - 1);
  plan.order.resize(count);
  for (int64_t i = 0; i < count; ++i) plan.order[next[tree[i]]++] = i;
  for (Segment& segment : plan.segments) {
    const int64_t borders = (segment.end - segment.begin - 1) / kChunk;
    if (!keep_borders || borders <= 0) continue;
    segment.border_slot = plan.slots;
    plan.slots += borders;
  }
  return plan;
}

TokenRows token_rows(const char* name, const Tensor& x, const Tensor& like, int64_t heads,
                     int64_t dim) {
  HE_CHECK_VALUE(x.dim() == 3 && x.size(0) == like.size(0) && x.size(1) == heads &&
                     x.size(2) == dim && x.scalar_type() == like.scalar_type() &&
                     (x.numel() == 0 || dim == 1 || x.stride(2) == 1),
                 kOp, ": ", name, " has shape ", x.sizes(), ", strides ", x.strides(),
                 " and dtype ", x.scalar_type(), "; expected [", like.size(0), ", ", heads, ", ",
                 dim, "] of ", like.scalar_type(), " with inner stride 1");
  return {x.data(), x.stride(0), x.stride(1)};
}

const float* floats(const char* name, const Tensor& x, const std::vector<int64_t>& shape) {
  HE_CHECK_VALUE(x.scalar_type() == kFloat && x.sizes() == Sizes(shape) && x.is_contiguous(), kOp,
                 ": ", name, " has shape ", x.sizes(), " and dtype ", x.scalar_type(),
                 "; expected contiguous ", Sizes(shape), " of float32");
  return x.data<float>();
}

void fill(LinearRecurrence& p, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
          const std::optional<Tensor>& beta, const std::optional<Tensor>& initial_state,
          const Segments& plan, double scale, bool delta, bool l2_norm) {
  check_same_device(
      kOp,
      {{"q", q}, {"k", k}, {"v", v}, {"g", g}, {"beta", beta}, {"initial_state", initial_state}});
  if (!q.device().is_cpu()) no_kernel_for(q.device(), kOp);
  p.dtype = float_dtype(q, "q");
  HE_CHECK_VALUE(p.dtype != DType::f64, kOp, ": q has dtype float64; use the reference");
  HE_CHECK_VALUE(q.dim() == 3 && v.dim() == 3 && q.size(1) > 0 && q.size(2) > 0 && v.size(1) > 0 &&
                     v.size(2) > 0 && v.size(1) % q.size(1) == 0,
                 kOp, ": q is ", q.sizes(), " and v ", v.sizes(),
                 "; expected [T, H_k, D_k] and [T, H_v, D_v], H_v a multiple of H_k");
  p.tokens = q.size(0), p.k_heads = q.size(1), p.k_dim = q.size(2);
  p.v_heads = v.size(1), p.v_dim = v.size(2);
  p.q = token_rows("q", q, q, p.k_heads, p.k_dim);
  p.k = token_rows("k", k, q, p.k_heads, p.k_dim);
  p.v = token_rows("v", v, q, p.v_heads, p.v_dim);
  p.g_channels = g.dim() == 3;
  std::vector<int64_t> per_head{p.tokens, p.v_heads};
  if (beta) p.beta = floats("beta", *beta, per_head);
  if (p.g_channels) per_head.push_back(p.k_dim);
  p.g = floats("g", g, per_head);
  if (initial_state) {
    p.initial = floats("initial_state", *initial_state,
                       {std::ssize(plan.segments), p.v_heads, p.k_dim, p.v_dim});
  }
  p.plan = &plan;
  p.scale = static_cast<float>(scale);
  p.delta = delta, p.l2_norm = l2_norm;
  p.num_threads = get_num_threads();
}

// The output, the states that a backward needs (without keep_states those of parents only), and the
// last state of every segment if it is wanted (else empty).
std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const Tensor& g, const std::optional<Tensor>& beta,
                                           const Tensor& cu_seqlens,
                                           const std::optional<Tensor>& parents,
                                           const std::optional<Tensor>& initial_state, double scale,
                                           bool delta, bool l2_norm, bool keep_states,
                                           bool wants_final) {
  HE_CHECK_VALUE(q.dim() == 3, kOp, ": q has shape ", q.sizes(), "; expected [T, H_k, D_k]");
  const Segments plan = plan_segments(cu_seqlens, parents, q.size(0), keep_states);
  LinearRecurrenceForward p{};
  fill(p, q, k, v, g, beta, initial_state, plan, scale, delta, l2_norm);
  Tensor out = empty({p.tokens, p.v_heads, p.v_dim}, q.scalar_type());
  Tensor states = empty({plan.slots, p.v_heads, p.k_dim, p.v_dim}, kFloat);
  const int64_t finals = wants_final ? std::ssize(plan.segments) : 0;
  Tensor final_states = empty({finals, p.v_heads, p.k_dim, p.v_dim}, kFloat);
  p.out = out.data();
  p.states = states.data<float>();
  p.final_states = wants_final ? final_states.data<float>() : nullptr;
  without_gil([&] { linear_recurrence_cpu(p); });
  return {out, states, final_states};
}

// The gradients of q and k for each head of v, and of v, g, beta and initial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>, std::optional<Tensor>> backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_final, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& g, const std::optional<Tensor>& beta,
    const Tensor& cu_seqlens, const std::optional<Tensor>& parents,
    const std::optional<Tensor>& initial_state, const Tensor& states, double scale, bool delta,
    bool l2_norm) {
  HE_CHECK_VALUE(q.dim() == 3, kOp, ": q has shape ", q.sizes(), "; expected [T, H_k, D_k]");
  const Segments plan = plan_segments(cu_seqlens, parents, q.size(0), true);
  LinearRecurrenceBackward p{};
  fill(p, q, k, v, g, beta, initial_state, plan, scale, delta, l2_norm);
  p.grad_out = token_rows("grad_out", grad_out, q, p.v_heads, p.v_dim);
  floats("states", states, {plan.slots, p.v_heads, p.k_dim, p.v_dim});
  p.states = states.data<float>();
  if (grad_final) {
    p.grad_final =
        floats("grad_final", *grad_final, {std::ssize(plan.segments), p.v_heads, p.k_dim, p.v_dim});
  }
  Tensor grad_q = empty({p.tokens, p.v_heads, p.k_dim}, kFloat), grad_k = empty_like(grad_q);
  Tensor grad_v = empty({p.tokens, p.v_heads, p.v_dim}, q.scalar_type());
  Tensor grad_g = empty_like(g);
  std::optional<Tensor> grad_beta, grad_initial;
  if (beta) grad_beta = empty_like(*beta), p.grad_beta = grad_beta->data<float>();
  if (initial_state) {
    grad_initial = zeros(initial_state->sizes(), kFloat);
    p.grad_initial = grad_initial->data<float>();
  }
  p.grad_q = grad_q.data<float>(), p.grad_k = grad_k.data<float>();
  p.grad_v = grad_v.data(), p.grad_g = grad_g.data<float>();
  without_gil([&] { linear_recurrence_backward_cpu(p); });
  return {grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial};
}

}  // namespace

void register_linear_recurrence(py::module_& m) {
  m.def("linear_recurrence", &forward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("g"),
        py::arg("beta"), py::arg("cu_seqlens"), py::arg("parents"), py::arg("initial_state"),
        py::arg("scale"), py::arg("delta"), py::arg("l2_norm"), py::arg("keep_states"),
        py::arg("wants_final"));
  m.def("linear_recurrence_backward", &backward, py::arg("grad_out"), py::arg("grad_final"),
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("g"), py::arg("beta"),
        py::arg("cu_seqlens"), py::arg("parents"), py::arg("initial_state"), py::arg("states"),
        py::arg("scale"), py::arg("delta"), py::arg("l2_norm"));
}

}  // namespace hybridengine
