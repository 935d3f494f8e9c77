#include <tuple>
#include <vector>

#include "common/binding.h"
#include "policy_loss/params.h"

namespace hybridengine {

namespace {

// Returns the loss [], the metrics [kNumSums], the terms of the tokens [kNumTokenTerms, T] and
// their clip masks [2, T], and the gradients by log_probs and entropy (empty if not wanted).
// `options` is TokenLossOptions and the clamps of KlOptions in their order; `coefficients` are
// kl_coef, entropy_coeff, loss_scale_factor and the global numbers of tokens and sequences, NaN
// where they are counted here; `denominators` is those two numbers as a float64 tensor, or null.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> policy_loss(
    In log_probs, In old_log_probs, In advantages, OptionalIn mask, OptionalIn selected,
    OptionalIn ref_log_probs, OptionalIn entropy, OptionalIn is_weights, OptionalIn cu_seqlens,
    OptionalIn seq_num_tokens, OptionalIn denominators, int64_t mode, int64_t agg_mode,
    int64_t kl_type, bool kl_straight_through, bool kl_times_ratio,
    const std::vector<double>& options, const std::vector<double>& coefficients, bool wants_tokens,
    bool wants_gradient, bool wants_entropy_gradient) {
  const Arguments given("policy_loss", "log_probs", log_probs);
  PolicyLossParams p{};
  p.log_probs = given.data<float>("log_probs", log_probs, {&p.num_tokens});
  const int64_t tokens = p.num_tokens;
  p.old_log_probs = given.data<float>("old_log_probs", old_log_probs, {tokens});
  p.advantages = given.data<float>("advantages", advantages, {tokens});
  p.mask = given.data<bool>("response_mask", mask, {tokens});
  p.selected = given.data<bool>("selected", selected, {tokens});
  p.ref_log_probs = given.data<float>("ref_log_probs", ref_log_probs, {tokens});
  p.entropy = given.data<float>("entropy", entropy, {tokens});
  p.is_weights = given.data<float>("rollout_is_weights", is_weights, {tokens});
  p.global_counts = given.data<double>("denominators", denominators, {2});
  p.cu_seqlens = given.ends("cu_seqlens", cu_seqlens, &p.num_sequences, tokens);
  p.seq_num_tokens = given.data<float>("seq_num_tokens", seq_num_tokens, {p.num_sequences});
  p.mode = given.choice("mode", mode, LossMode::value);
  p.agg_mode = given.choice("agg_mode", agg_mode, LossAggMode::seq_mean_token_sum_norm);
  given.expect(selected || (p.mode != LossMode::clip_cov && p.mode != LossMode::kl_cov),
               "selected is None; expected bool [", tokens,
               "] for the loss modes clip_cov and kl_cov");
  const auto option = [&](int i) { return static_cast<float>(options.at(i)); };
  p.options = {option(0), option(1), option(2), option(3), option(4), option(5), option(6)};
  p.kl = {given.choice("kl_type", kl_type, KlType::k3), kl_straight_through, kl_times_ratio,
          option(7), option(8)};
  p.kl_coef = static_cast<float>(coefficients.at(0));
  p.entropy_coeff = static_cast<float>(coefficients.at(1));
  p.loss_scale_factor = static_cast<float>(coefficients.at(2));
  p.global_num_tokens = coefficients.at(3);
  p.global_num_seqs = coefficients.at(4);

  const int64_t chunk = given.device().is_cpu() ? kCpuChunk : kCudaChunk;
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  const int64_t stats_bytes = needs_sequence_pass(p) ? sizeof(SequenceStats) : 0;
  Tensor loss = given.make(p.loss, {}), metrics = given.make(p.metrics, {kNumSums});
  Tensor gradient = given.make_if(wants_gradient, p.gradient, tokens);
  Tensor entropy_gradient = given.make_if(wants_entropy_gradient, p.entropy_gradient, tokens);
  Tensor token_terms = given.make_if(wants_tokens, p.token_terms, kNumTokenTerms, tokens);
  Tensor token_clips = given.make_if(wants_tokens, p.token_clips, 2, tokens);
  const Tensor stats = given.make(p.sequence_stats, {p.num_sequences * stats_bytes}, kByte);
  const Tensor counts = given.make(p.token_counts, {needs_count_pass(p) ? chunks : 0});
  const Tensor partials = given.make(p.partials, {chunks, kNumSums});
  given.run(p, policy_loss_cpu, HE_CUDA(policy_loss_cuda));
  return {loss, metrics, token_terms, token_clips, gradient, entropy_gradient};
}

}  // namespace

void register_policy_loss(py::module_& m) {
  def(m, "policy_loss", &policy_loss,
      "log_probs old_log_probs advantages mask selected ref_log_probs entropy is_weights "
      "cu_seqlens seq_num_tokens denominators mode agg_mode kl_type kl_straight_through "
      "kl_times_ratio options coefficients wants_tokens wants_gradient wants_entropy_gradient");
}

}  // namespace hybridengine
