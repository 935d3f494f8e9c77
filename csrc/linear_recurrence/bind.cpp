#include <array>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/segments.h"
#include "linear_recurrence/params.h"

namespace hybridengine {

namespace {

const char* const kRecurrence = "linear_recurrence";

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

Arguments fill_heads(LinearRecurrence& p, In q, In k, In v, In g, OptionalIn beta, double scale,
                     bool delta, bool l2_norm) {
  const Arguments given(kRecurrence, "q", q);
  given.on_cpu();
  const ScalarType type = q.scalar_type();
  p.dtype = given.dtype("q", type);
  p.q = given.heads("q", q, type, {&p.tokens, &p.k_heads, &p.k_dim});
  p.k = given.heads("k", k, type, {p.tokens, p.k_heads, p.k_dim});
  p.v = given.heads("v", v, type, {p.tokens, &p.v_heads, &p.v_dim});
  given.expect(
      p.k_heads > 0 && p.k_dim > 0 && p.v_heads > 0 && p.v_dim > 0 && p.v_heads % p.k_heads == 0,
      "q is ", q.sizes(), " and v ", v.sizes(),
      "; expected [T, H_k, D_k] and [T, H_v, D_v], H_v a multiple of H_k");
  p.g_channels = g.dim() == 3;
  p.g = p.g_channels ? given.data<float>("g", g, {p.tokens, p.v_heads, p.k_dim})
                     : given.data<float>("g", g, {p.tokens, p.v_heads});
  p.beta = given.data<float>("beta", beta, {p.tokens, p.v_heads});
  p.scale = static_cast<float>(scale);
  p.delta = delta, p.l2_norm = l2_norm;
  return given;
}

Arguments fill(LinearRecurrence& p, Segments& plan, In q, In k, In v, In g, OptionalIn beta,
               In cu_seqlens, OptionalIn parents, OptionalIn initial_state, double scale,
               bool delta, bool l2_norm, bool keep_borders) {
  const Arguments given = fill_heads(p, q, k, v, g, beta, scale, delta, l2_norm);
  const SegmentBounds bounds = check_segments(given, cu_seqlens, parents, p.tokens);
  p.initial = given.data<float>("initial_state", initial_state,
                                {bounds.count, p.v_heads, p.k_dim, p.v_dim});
  plan = plan_segments(bounds, keep_borders);
  p.plan = &plan;
  return given;
}

// The output, the states that a backward needs (without keep_states those of parents only), and the
// last state of every segment if it is wanted (else empty).
std::tuple<Tensor, Tensor, Tensor> forward(In q, In k, In v, In g, OptionalIn beta, In cu_seqlens,
                                           OptionalIn parents, OptionalIn initial_state,
                                           double scale, bool delta, bool l2_norm, bool keep_states,
                                           bool wants_final) {
  LinearRecurrenceForward p{};
  Segments plan;
  const Arguments given = fill(p, plan, q, k, v, g, beta, cu_seqlens, parents, initial_state, scale,
                               delta, l2_norm, keep_states);
  Tensor out = given.make(p.out, {p.tokens, p.v_heads, p.v_dim}, q.scalar_type());
  Tensor states = given.make(p.states, {plan.slots, p.v_heads, p.k_dim, p.v_dim});
  Tensor final_states = given.make_if(wants_final, p.final_states, std::ssize(plan.segments),
                                      p.v_heads, p.k_dim, p.v_dim);
  given.run(p, linear_recurrence_cpu);
  return {out, states, final_states};
}

// One token of each of T sequences, whose states are rows `slots` of the cache, which it updates.
Tensor update(In q, In k, In v, In g, OptionalIn beta, In states, In slots, double scale,
              bool delta, bool l2_norm) {
  LinearRecurrenceForward p{};
  const Arguments given = fill_heads(p, q, k, v, g, beta, scale, delta, l2_norm);
  given.same_device("states", states);
  const int64_t size = p.v_heads * p.k_dim * p.v_dim;
  given.expect(states.scalar_type() == kFloat && states.dim() == 4 &&
                   states.sizes() == Sizes{states.size(0), p.v_heads, p.k_dim, p.v_dim} &&
                   states.strides() == Sizes{states.stride(0), p.k_dim * p.v_dim, p.v_dim, 1} &&
                   states.stride(0) >= size,
               "states is a ", states.scalar_type(), " of shape ", states.sizes(), " and strides ",
               states.strides(), "; expected float32 [N, ", p.v_heads, ", ", p.k_dim, ", ", p.v_dim,
               "] with contiguous rows");
  p.cache = states.data<float>(), p.cache_stride = states.stride(0);
  p.slots = given.data<int32_t>("slots", slots, {p.tokens});
  Tensor out = given.make(p.out, {p.tokens, p.v_heads, p.v_dim}, q.scalar_type());
  int64_t LinearRecurrenceForward::* const tokens = &LinearRecurrenceForward::tokens;
  given.run_rows(p, tokens, [op = given.op(), count = states.size(0)](LinearRecurrenceForward p) {
    check_values(op, "slots", p.slots, p.tokens, 0, count - 1);
    std::vector<int32_t> ends(p.tokens + 1);
    std::iota(ends.begin(), ends.end(), 0);
    const Segments plan = plan_segments({p.tokens, ends.data(), nullptr}, false);
    p.plan = &plan;
    linear_recurrence_cpu(p);
  });
  return out;
}

using Gradient = std::optional<Tensor>;

// The gradients of q and k for each head of v, and of v, g, beta and initial_state: those that are
// `wanted`, in this order.
std::tuple<Gradient, Gradient, Gradient, Gradient, Gradient, Gradient> backward(
    In grad_out, OptionalIn grad_final, In q, In k, In v, In g, OptionalIn beta, In cu_seqlens,
    OptionalIn parents, OptionalIn initial_state, In states, double scale, bool delta, bool l2_norm,
    const std::array<bool, 6>& wanted) {
  LinearRecurrenceBackward p{};
  Segments plan;
  const Arguments given = fill(p, plan, q, k, v, g, beta, cu_seqlens, parents, initial_state, scale,
                               delta, l2_norm, true);
  p.grad_out = given.heads("grad_out", grad_out, q.scalar_type(), {p.tokens, p.v_heads, p.v_dim});
  p.states = given.data<float>("states", states, {plan.slots, p.v_heads, p.k_dim, p.v_dim});
  p.grad_final = given.data<float>("grad_final", grad_final,
                                   {std::ssize(plan.segments), p.v_heads, p.k_dim, p.v_dim});
  Gradient grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial;
  if (wanted[0]) grad_q = given.make(p.grad_q, {p.tokens, p.v_heads, p.k_dim});
  if (wanted[1]) grad_k = given.make(p.grad_k, {p.tokens, p.v_heads, p.k_dim});
  if (wanted[2]) grad_v = given.make(p.grad_v, v.sizes(), v.scalar_type());
  if (wanted[3]) grad_g = given.make(p.grad_g, g.sizes());
  if (wanted[4] && beta) grad_beta = given.make(p.grad_beta, beta->sizes());
  if (wanted[5] && initial_state) {
    grad_initial = zeros(initial_state->sizes(), kFloat);
    p.grad_initial = grad_initial->data<float>();
  }
  given.run(p, linear_recurrence_backward_cpu);
  return {grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial};
}

}  // namespace

void register_linear_recurrence(py::module_& m) {
  def(m, "linear_recurrence", &forward,
      "q k v g beta cu_seqlens parents initial_state scale delta l2_norm keep_states wants_final");
  def(m, "linear_recurrence_update", &update, "q k v g beta states slots scale delta l2_norm");
  def(m, "linear_recurrence_backward", &backward,
      "grad_out grad_final q k v g beta cu_seqlens parents initial_state states scale delta "
      "l2_norm wanted");
}

}  // namespace hybridengine
