
#include <optional>
#include <tuple>
#include <vector>

#include "common/binding.h"
#include "common/sequences.h"
#include "policy_loss/params.h"

namespace hybridengine {

namespace {

using OptionalTensor = std::optional<Tensor>;

void check_number(const char* name, int64_t value, int64_t last) {
  HE_CHECK_VALUE(value >= 0 && value <= last, "policy_loss: ", name, " is ", value,
                 "; expected 0 to ", last);
}

// Returns the loss [], the metrics [kNumSums], the terms of the tokens [kNumTokenTerms, T] and
// their clip masks [2, T], and the gradients by log_probs and entropy (empty if not wanted).
// `options` is TokenLossOptions and the clamps of KlOptions in their order; `coefficients` are
// kl_coef, entropy_coeff, loss_scale_factor and the global numbers of tokens and sequences, NaN
// where they are counted here; `denominators` is those two numbers as a float64 tensor, or null.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> policy_loss(
    const Tensor& log_probs, const Tensor& old_log_probs, const Tensor& advantages,
    const OptionalTensor& mask, const OptionalTensor& selected, const OptionalTensor& ref_log_probs,
    const OptionalTensor& entropy, const OptionalTensor& is_weights,
    const OptionalTensor& cu_seqlens, const OptionalTensor& seq_num_tokens,
    const OptionalTensor& denominators, int64_t mode, int64_t agg_mode, int64_t kl_type,
    bool kl_straight_through, bool kl_times_ratio, const std::vector<double>& options,
    const std::vector<double>& coefficients, bool wants_tokens, bool wants_gradient,
    bool wants_entropy_gradient) {
  const int64_t tokens = log_probs.numel();
  const Device device = log_probs.device();
  const DeviceGuard guard(device);
  const Arguments given("policy_loss", "log_probs", log_probs);
  PolicyLossParams params{};
  params.log_probs = given.data<float>("log_probs", log_probs, {tokens});
  params.old_log_probs = given.data<float>("old_log_probs", old_log_probs, {tokens});
  params.advantages = given.data<float>("advantages", advantages, {tokens});
  params.mask = given.data<bool>("response_mask", mask, {tokens});
  params.selected = given.data<bool>("selected", selected, {tokens});
  params.ref_log_probs = given.data<float>("ref_log_probs", ref_log_probs, {tokens});
  params.entropy = given.data<float>("entropy", entropy, {tokens});
  params.is_weights = given.data<float>("rollout_is_weights", is_weights, {tokens});
  params.global_counts = given.data<double>("denominators", denominators, {2});
  if (cu_seqlens) {
    params.cu_seqlens = given.data<int32_t>("cu_seqlens", *cu_seqlens, {cu_seqlens->numel()});
    check_cu_seqlens(*cu_seqlens, tokens, "policy_loss");
    params.num_sequences = cu_seqlens->numel() - 1;
  }
  params.seq_num_tokens =
      given.data<float>("seq_num_tokens", seq_num_tokens, {params.num_sequences});
  params.num_tokens = tokens;
  check_number("mode", mode, static_cast<int64_t>(LossMode::value));
  check_number("agg_mode", agg_mode, static_cast<int64_t>(LossAggMode::seq_mean_token_sum_norm));
  check_number("kl_type", kl_type, static_cast<int64_t>(KlType::k3));
  params.mode = static_cast<LossMode>(mode);
  HE_CHECK_VALUE(selected || (params.mode != LossMode::clip_cov && params.mode != LossMode::kl_cov),
                 "policy_loss: selected is None; expected bool [", tokens,
                 "] for the loss modes clip_cov and kl_cov");
  params.agg_mode = static_cast<LossAggMode>(agg_mode);
  const auto option = [&](int i) { return static_cast<float>(options.at(i)); };
  params.options = {option(0), option(1), option(2), option(3), option(4), option(5), option(6)};
  params.kl = {static_cast<KlType>(kl_type), kl_straight_through, kl_times_ratio, option(7),
               option(8)};
  params.kl_coef = static_cast<float>(coefficients.at(0));
  params.entropy_coeff = static_cast<float>(coefficients.at(1));
  params.loss_scale_factor = static_cast<float>(coefficients.at(2));
  params.global_num_tokens = coefficients.at(3);
  params.global_num_seqs = coefficients.at(4);
  params.num_threads = get_num_threads();

  const int64_t chunk = device.is_cpu() ? kCpuChunk : kCudaChunk;
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  const int64_t stats_bytes = needs_sequence_pass(params) ? sizeof(SequenceStats) : 0;
  Tensor loss = empty({}, kFloat, device), metrics = empty({kNumSums}, kFloat, device);
  Tensor gradient = empty({wants_gradient ? tokens : 0}, kFloat, device);
  Tensor entropy_gradient = empty({wants_entropy_gradient ? tokens : 0}, kFloat, device);
  Tensor token_terms = empty({wants_tokens ? kNumTokenTerms : 0, tokens}, kFloat, device);
  Tensor token_clips = empty({wants_tokens ? 2 : 0, tokens}, kBool, device);
  Tensor sequence_stats = empty({params.num_sequences * stats_bytes}, kByte, device);
  Tensor token_counts = empty({needs_count_pass(params) ? chunks : 0}, kInt, device);
  Tensor partials = empty({chunks, kNumSums}, kDouble, device);
  params.sequence_stats = static_cast<SequenceStats*>(sequence_stats.data());
  params.token_counts = token_counts.data<int32_t>();
  params.partials = partials.data<double>();
  params.loss = loss.data<float>();
  params.metrics = metrics.data<float>();
  if (wants_gradient) params.gradient = gradient.data<float>();
  if (wants_tokens) {
    params.token_terms = token_terms.data<float>();
    params.token_clips = token_clips.data<bool>();
  }
  if (wants_entropy_gradient) params.entropy_gradient = entropy_gradient.data<float>();
  if (device.is_cpu()) {
    without_gil([&] { policy_loss_cpu(params); });
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (device.is_cuda()) {
    check_cuda(policy_loss_cuda(params, current_stream(device)), "policy_loss");
#endif
  } else {
    no_kernel_for(device, "policy_loss");
  }
  return {loss, metrics, token_terms, token_clips, gradient, entropy_gradient};
}

}  // namespace

void register_policy_loss(py::module_& m) {
  m.def("policy_loss", &policy_loss, py::arg("log_probs"), py::arg("old_log_probs"),
        py::arg("advantages"), py::arg("mask"), py::arg("selected"), py::arg("ref_log_probs"),
        py::arg("entropy"), py::arg("is_weights"), py::arg("cu_seqlens"), py::arg("seq_num_tokens"),
        py::arg("denominators"), py::arg("mode"), py::arg("agg_mode"), py::arg("kl_type"),
        py::arg("kl_straight_through"), py::arg("kl_times_ratio"), py::arg("options"),
        py::arg("coefficients"), py::arg("wants_tokens"), py::arg("wants_gradient"),
        py::arg("wants_entropy_gradient"));
}

}  // namespace hybridengine
