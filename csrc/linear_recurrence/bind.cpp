#include <array>
#include <optional>
#include <tuple>

#include "common/sequences.h"
#include "linear_recurrence/params.h"

namespace hybridengine {

namespace {

const char* const kOp = "linear_recurrence";

// `keep_borders`: for a backward, the states between chunks have slots, too.
Segments plan_segments(const SegmentBounds& bounds, bool keep_borders) {
  const int64_t count = bounds.count;
  Segments plan;
  std::vector<int64_t> tree(count), size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t parent = bounds.parent(i);
    plan.segments.push_back({bounds.begin(i), bounds.end(i), parent, -1, -1});
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

void fill(LinearRecurrence& p, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
          const std::optional<Tensor>& beta, const std::optional<Tensor>& initial_state,
          const Segments& plan, double scale, bool delta, bool l2_norm) {
  check_same_device(kOp, {{"q", q}, {"k", k}, {"v", v}});
  const Arguments given(kOp, "q", q);
  if (!q.device().is_cpu()) no_kernel_for(q.device(), kOp);
  p.dtype = float_dtype(q, "q");
  HE_CHECK_VALUE(p.dtype != DType::f64, kOp, ": q has dtype float64; use the reference");
  HE_CHECK_VALUE(q.dim() == 3 && v.dim() == 3 && q.size(1) > 0 && q.size(2) > 0 && v.size(1) > 0 &&
                     v.size(2) > 0 && v.size(1) % q.size(1) == 0,
                 kOp, ": q is ", q.sizes(), " and v ", v.sizes(),
                 "; expected [T, H_k, D_k] and [T, H_v, D_v], H_v a multiple of H_k");
  p.tokens = q.size(0), p.k_heads = q.size(1), p.k_dim = q.size(2);
  p.v_heads = v.size(1), p.v_dim = v.size(2);
  p.q = head_rows(kOp, "q", q, q, p.k_heads, p.k_dim);
  p.k = head_rows(kOp, "k", k, q, p.k_heads, p.k_dim);
  p.v = head_rows(kOp, "v", v, q, p.v_heads, p.v_dim);
  p.g_channels = g.dim() == 3;
  p.beta = given.data<float>("beta", beta, {p.tokens, p.v_heads});
  p.g = p.g_channels ? given.data<float>("g", g, {p.tokens, p.v_heads, p.k_dim})
                     : given.data<float>("g", g, {p.tokens, p.v_heads});
  p.initial = given.data<float>("initial_state", initial_state,
                                {std::ssize(plan.segments), p.v_heads, p.k_dim, p.v_dim});
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
  const Segments plan =
      plan_segments(check_segments(kOp, cu_seqlens, parents, q.size(0)), keep_states);
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

using Gradient = std::optional<Tensor>;

// The gradients of q and k for each head of v, and of v, g, beta and initial_state: those that are
// `wanted`, in this order.
std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient, Gradient> backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_final, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& g, const std::optional<Tensor>& beta,
    const Tensor& cu_seqlens, const std::optional<Tensor>& parents,
    const std::optional<Tensor>& initial_state, const Tensor& states, double scale, bool delta,
    bool l2_norm, const std::array<bool, 6>& wanted) {
  HE_CHECK_VALUE(q.dim() == 3, kOp, ": q has shape ", q.sizes(), "; expected [T, H_k, D_k]");
  const Segments plan = plan_segments(check_segments(kOp, cu_seqlens, parents, q.size(0)), true);
  LinearRecurrenceBackward p{};
  fill(p, q, k, v, g, beta, initial_state, plan, scale, delta, l2_norm);
  p.grad_out = head_rows(kOp, "grad_out", grad_out, q, p.v_heads, p.v_dim);
  const Arguments given(kOp, "q", q);
  check_same_device(kOp, {{"q", q}, {"grad_out", grad_out}});
  p.states = given.data<float>("states", states, {plan.slots, p.v_heads, p.k_dim, p.v_dim});
  p.grad_final = given.data<float>("grad_final", grad_final,
                                   {std::ssize(plan.segments), p.v_heads, p.k_dim, p.v_dim});
  Gradient grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial;
  const auto wants = [](Gradient& gradient, const Tensor& made) {
    gradient = made;
    return gradient->data<float>();
  };
  const auto per_head = [&] { return empty({p.tokens, p.v_heads, p.k_dim}, kFloat); };
  if (wanted[0]) p.grad_q = wants(grad_q, per_head());
  if (wanted[1]) p.grad_k = wants(grad_k, per_head());
  if (wanted[2]) {
    grad_v = empty({p.tokens, p.v_heads, p.v_dim}, q.scalar_type());
    p.grad_v = grad_v->data();
  }
  if (wanted[3]) p.grad_g = wants(grad_g, empty_like(g));
  if (wanted[4] && beta) p.grad_beta = wants(grad_beta, empty_like(*beta));
  if (wanted[5] && initial_state) {
    p.grad_initial = wants(grad_initial, zeros(initial_state->sizes(), kFloat));
  }
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
        py::arg("scale"), py::arg("delta"), py::arg("l2_norm"), py::arg("wanted"));
}

}  // namespace hybridengine
