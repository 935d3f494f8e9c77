
#include <memory>
#include <optional>
#include <tuple>

#include "advantage/params.h"
#include "common/binding.h"
#include "common/sequences.h"

namespace hybridengine {

namespace {

using OptionalTensor = std::optional<Tensor>;

// At least twice the number of rows, which keeps probes short.
int64_t table_size_for(int64_t rows) {
  int64_t size = 16;
  while (size < 2 * rows) size *= 2;
  return size;
}

void check_finite(const char* op, const float* rewards, int64_t bad) {
  HE_CHECK_VALUE(bad < 0, op, ": rewards[", bad, "] is ", bad < 0 ? 0.0f : rewards[bad],
                 "; expected finite rewards: check what the reward function returned for it");
}

void run_on_cpu(GroupAdvantageParams& params) {
  const int64_t rows = params.num_rows;
  params.table_size = table_size_for(rows);
  const auto table = std::make_unique_for_overwrite<int64_t[]>(params.table_size);
  const auto group_of = std::make_unique_for_overwrite<int64_t[]>(rows);
  const auto groups = std::make_unique_for_overwrite<GroupStats[]>(rows);
  int64_t bad_row = -1;
  params.table = table.get();
  params.group_of = group_of.get();
  params.groups = groups.get();
  params.bad_row = &bad_row;
  without_gil([&] { group_advantage_cpu(params); });
  check_finite("group_advantage", params.rewards, bad_row);
}

std::tuple<Tensor, Tensor> group_advantage(const Tensor& rewards, const Tensor& group_ids,
                                           int64_t estimator, bool norm_by_std, double epsilon,
                                           const OptionalTensor& lengths,
                                           const OptionalTensor& cu_seqlens,
                                           const OptionalTensor& token_mask, int64_t num_tokens) {
  const int64_t rows = rewards.numel();
  const Device device = rewards.device();
  const DeviceGuard guard(device);
  const Arguments given("group_advantage", "rewards", rewards);
  GroupAdvantageParams params{};
  params.rewards = given.data<float>("rewards", rewards, {rows});
  params.group_ids = given.data<int64_t>("group_ids", group_ids, {rows});
  params.lengths = given.data<float>("lengths", lengths, {rows});
  params.cu_seqlens = given.data<int32_t>("cu_seqlens", cu_seqlens, {rows + 1});
  if (cu_seqlens) check_cu_seqlens(*cu_seqlens, num_tokens, "group_advantage");
  HE_CHECK_VALUE(cu_seqlens || num_tokens == 0, "group_advantage: num_tokens is ", num_tokens,
                 "; expected 0 without cu_seqlens");
  HE_CHECK_VALUE(estimator >= 0 && estimator <= static_cast<int64_t>(Estimator::grpo_loo),
                 "group_advantage: estimator is ", estimator, ", which does not exist");
  params.token_mask = given.data<bool>("response_mask", token_mask, {num_tokens});
  Tensor advantages = empty({rows}, kFloat, device);
  Tensor tokens = empty({num_tokens}, kFloat, device);
  params.advantages = advantages.data<float>();
  params.token_advantages = tokens.data<float>();
  params.num_rows = rows;
  params.num_tokens = num_tokens;
  params.options = {static_cast<Estimator>(estimator), norm_by_std, epsilon};
  params.num_threads = get_num_threads();
  if (rows == 0) {
    tokens = zeros({num_tokens}, kFloat, device);
  } else if (device.is_cpu()) {
    run_on_cpu(params);
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (device.is_cuda()) {
    const int64_t table_size = table_size_for(rows);
    const Tensor slots =
        empty({table_size * static_cast<int64_t>(sizeof(GroupSlot))}, kByte, device);
    const Tensor slot_of = empty({rows}, kLong, device);
    params.rows = {params.rewards,
                   params.group_ids,
                   params.lengths,
                   static_cast<GroupSlot*>(slots.data()),
                   slot_of.data<int64_t>(),
                   table_size,
                   params.options.leaves_one_out()};
    check_cuda(group_advantage_cuda(params, current_stream(device)), "group_advantage");
#endif
  } else {
    no_kernel_for(device, "group_advantage");
  }
  return {advantages, tokens};
}

std::tuple<Tensor, Tensor> gae(const Tensor& rewards, const OptionalTensor& values,
                               const Tensor& cu_seqlens, const OptionalTensor& token_mask,
                               double gamma, double lam) {
  const int64_t tokens = rewards.numel();
  const Device device = rewards.device();
  const DeviceGuard guard(device);
  const Arguments given("gae", "rewards", rewards);
  GaeParams params{};
  params.rewards = given.data<float>("rewards", rewards, {tokens});
  params.values = given.data<float>("values", values, {tokens});
  params.token_mask = given.data<bool>("response_mask", token_mask, {tokens});
  params.cu_seqlens = given.data<int32_t>("cu_seqlens", cu_seqlens, {cu_seqlens.numel()});
  check_cu_seqlens(cu_seqlens, tokens, "gae");
  Tensor advantages = empty({tokens}, kFloat, device);
  Tensor returns = empty({tokens}, kFloat, device);
  params.advantages = advantages.data<float>();
  params.returns = returns.data<float>();
  params.num_tokens = tokens;
  params.num_sequences = cu_seqlens.numel() - 1;
  params.gamma = gamma;
  params.lam = lam;
  params.num_threads = get_num_threads();
  if (params.num_sequences <= 0) {
    advantages = zeros({tokens}, kFloat, device);
    returns = zeros({tokens}, kFloat, device);
  } else if (device.is_cpu()) {
    int64_t bad_token = -1;
    params.bad_token = &bad_token;
    without_gil([&] { gae_cpu(params); });
    check_finite("gae", params.rewards, bad_token);
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (device.is_cuda()) {
    check_cuda(gae_cuda(params, current_stream(device)), "gae");
#endif
  } else {
    no_kernel_for(device, "gae");
  }
  return {advantages, returns};
}

}  // namespace

void register_advantage(py::module_& m) {
  m.def("group_advantage", &group_advantage, py::arg("rewards"), py::arg("group_ids"),
        py::arg("estimator"), py::arg("norm_by_std"), py::arg("epsilon"), py::arg("lengths"),
        py::arg("cu_seqlens"), py::arg("token_mask"), py::arg("num_tokens"));
  m.def("gae", &gae, py::arg("rewards"), py::arg("values"), py::arg("cu_seqlens"),
        py::arg("token_mask"), py::arg("gamma"), py::arg("lam"));
}

}  // namespace hybridengine
