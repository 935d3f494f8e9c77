#include <memory>
#include <tuple>

#include "advantage/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

// At least twice the number of rows, which keeps probes short.
int64_t table_size_for(int64_t rows) {
  int64_t size = 16;
  while (size < 2 * rows) size *= 2;
  return size;
}

void check_finite(const char* op, const float* rewards, int64_t bad) {
  HE_CHECK_VALUE(bad < 0, op, ": rewards[", bad, "] is ", rewards[bad],
                 "; expected finite rewards: check what the reward function returned for it");
}

void run_on_cpu(const Arguments& given, GroupAdvantageParams& p) {
  p.table_size = table_size_for(p.num_rows);
  const auto table = std::make_unique_for_overwrite<int64_t[]>(p.table_size);
  const auto group_of = std::make_unique_for_overwrite<int64_t[]>(p.num_rows);
  const auto groups = std::make_unique_for_overwrite<GroupStats[]>(p.num_rows);
  int64_t bad_row = -1;
  p.table = table.get();
  p.group_of = group_of.get();
  p.groups = groups.get();
  p.bad_row = &bad_row;
  given.run(p, group_advantage_cpu);
  check_finite(given.op(), p.rewards, bad_row);
}

void run_on_cuda(const Arguments& given, GroupAdvantageParams& p) {
  const int64_t size = table_size_for(p.num_rows);
  p.rows = {p.rewards, p.group_ids, p.lengths, nullptr, nullptr, size, p.options.leaves_one_out()};
  const int64_t slot_bytes = size * static_cast<int64_t>(sizeof(GroupSlot));
  const Tensor slots = given.make(p.rows.slots, {slot_bytes}, kByte);
  const Tensor slot_of = given.make(p.rows.slot_of, {p.num_rows});
  given.run(p, group_advantage_cpu, HE_CUDA(group_advantage_cuda));
}

std::tuple<Tensor, Tensor> group_advantage(In rewards, In group_ids, int64_t estimator,
                                           bool norm_by_std, double epsilon, OptionalIn lengths,
                                           OptionalIn cu_seqlens, OptionalIn token_mask,
                                           int64_t num_tokens) {
  const Arguments given("group_advantage", "rewards", rewards);
  GroupAdvantageParams p{};
  int64_t sequences = rewards.numel();
  p.rewards = given.data<float>("rewards", rewards, {&p.num_rows});
  p.group_ids = given.data<int64_t>("group_ids", group_ids, {p.num_rows});
  p.lengths = given.data<float>("lengths", lengths, {p.num_rows});
  p.cu_seqlens = given.ends("cu_seqlens", cu_seqlens, &sequences, num_tokens);
  given.expect(sequences == p.num_rows, "cu_seqlens has ", sequences, " sequences; expected ",
               p.num_rows);
  given.number("num_tokens", num_tokens, 0, cu_seqlens ? INT64_MAX : 0);
  p.num_tokens = num_tokens;
  p.token_mask = given.data<bool>("response_mask", token_mask, {num_tokens});
  Tensor advantages = given.make(p.advantages, {p.num_rows});
  Tensor tokens = given.make(p.token_advantages, {num_tokens});
  p.options = {given.choice("estimator", estimator, Estimator::grpo_loo), norm_by_std, epsilon};
  if (p.num_rows == 0) {
    tokens = zeros({num_tokens}, kFloat, given.device());
  } else {
    (given.device().is_cpu() ? run_on_cpu : run_on_cuda)(given, p);
  }
  return {advantages, tokens};
}

std::tuple<Tensor, Tensor> gae(In rewards, OptionalIn values, In cu_seqlens, OptionalIn token_mask,
                               double gamma, double lam) {
  const Arguments given("gae", "rewards", rewards);
  GaeParams p{};
  int64_t bad_token = -1;
  p.rewards = given.data<float>("rewards", rewards, {&p.num_tokens});
  p.values = given.data<float>("values", values, {p.num_tokens});
  p.token_mask = given.data<bool>("response_mask", token_mask, {p.num_tokens});
  p.cu_seqlens = given.ends("cu_seqlens", cu_seqlens, &p.num_sequences, p.num_tokens);
  p.gamma = gamma;
  p.lam = lam;
  p.bad_token = &bad_token;
  if (p.num_sequences == 0) {
    const auto none = [&] { return zeros({p.num_tokens}, kFloat, given.device()); };
    return {none(), none()};
  }
  Tensor advantages = given.make(p.advantages, {p.num_tokens});
  Tensor returns = given.make(p.returns, {p.num_tokens});
  given.run(p, gae_cpu, HE_CUDA(gae_cuda));
  if (given.device().is_cpu()) check_finite(given.op(), p.rewards, bad_token);
  return {advantages, returns};
}

}  // namespace

void register_advantage(py::module_& m) {
  def(m, "group_advantage", &group_advantage,
      "rewards group_ids estimator norm_by_std epsilon lengths cu_seqlens token_mask num_tokens");
  def(m, "gae", &gae, "rewards values cu_seqlens token_mask gamma lam");
}

}  // namespace hybridengine
