#include <algorithm>
#include <tuple>

#include "common/binding.h"
#include "sampling/params.h"

namespace hybridengine {

namespace {

// (tokens int64 [rows], log_probs float32 [rows], num_kept int32 [rows], kept_ids int32 [K]); the
// last one is empty unless `return_kept_ids`.
std::tuple<Tensor, Tensor, Tensor, Tensor> sample_tokens(In logits, In temperature, In top_k,
                                                         In top_p, In min_p, In seeds, In positions,
                                                         bool return_kept_ids) {
  const Arguments given("sample_tokens", "logits", logits);
  given.on_cpu();
  SampleTokens p{};
  p.dtype = given.dtype("logits", logits.scalar_type());
  p.logits = given.data("logits", logits, kFloats, {&p.rows, &p.vocab}, &p.row_stride);
  given.number("the vocabulary of logits", p.vocab, 1, INT32_MAX);
  p.temperature = given.data<float>("temperature", temperature, {p.rows});
  p.top_k = given.data<int32_t>("top_k", top_k, {p.rows});
  p.top_p = given.data<float>("top_p", top_p, {p.rows});
  p.min_p = given.data<float>("min_p", min_p, {p.rows});
  p.seeds = given.data<int64_t>("seeds", seeds, {p.rows});
  p.positions = given.data<int64_t>("positions", positions, {p.rows});
  Tensor tokens = given.make(p.tokens, {p.rows});
  Tensor log_probs = given.make(p.log_probs, {p.rows});
  Tensor num_kept = given.make(p.num_kept, {p.rows});
  std::vector<std::vector<int32_t>> kept(return_kept_ids ? p.rows : 0);
  p.kept_ids = return_kept_ids ? kept.data() : nullptr;
  given.run(p, sample_tokens_cpu);
  int64_t count = 0;
  for (const auto& ids : kept) count += std::ssize(ids);
  int32_t* target;
  Tensor kept_ids = given.make(target, {count});
  for (const auto& ids : kept) target = std::copy(ids.begin(), ids.end(), target);
  return {tokens, log_probs, num_kept, kept_ids};
}

}  // namespace

void register_sampling(py::module_& m) {
  def(m, "sample_tokens", &sample_tokens,
      "logits temperature top_k top_p min_p seeds positions return_kept_ids");
}

}  // namespace hybridengine
