#include <ATen/ops/empty.h>

#include <optional>
#include <tuple>

#include "advantage/params.h"
#include "common/binding.h"
#include "common/memory_pool.h"
#include "common/sequences.h"

namespace hybridengine {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

template <typename T>
const T* optional_data(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// At least twice the number of rows, which keeps probes short.
int64_t table_size_for(int64_t rows) {
  int64_t size = 16;
  while (size < 2 * rows) size *= 2;
  return size;
}

void check_finite(const char* op, const float* rewards, int64_t bad) {
  TORCH_CHECK_VALUE(bad < 0, op, ": rewards[", bad, "] is ", bad < 0 ? 0.0f : rewards[bad],
                    "; expected finite rewards: check what the reward function returned for it");
}

void run_on_cpu(GroupAdvantageParams& params) {
  const auto longs = at::TensorOptions(at::kLong);
  const int64_t rows = params.num_rows;
  params.table_size = table_size_for(rows);
  const at::Tensor table = at::empty({params.table_size}, longs);
  const at::Tensor group_of = at::empty({rows}, longs);
  const at::Tensor groups =
      at::empty({rows * static_cast<int64_t>(sizeof(GroupStats))}, longs.dtype(at::kByte));
  int64_t bad_row = -1;
  params.table = table.mutable_data_ptr<int64_t>();
  params.group_of = group_of.mutable_data_ptr<int64_t>();
  params.groups = static_cast<GroupStats*>(groups.mutable_data_ptr());
  params.bad_row = &bad_row;
  {
    py::gil_scoped_release no_gil;
    group_advantage_cpu(params);
  }
  check_finite("group_advantage", params.rewards, bad_row);
}

std::tuple<at::Tensor, at::Tensor> group_advantage(
    const at::Tensor& rewards, const at::Tensor& group_ids, int64_t estimator, bool norm_by_std,
    double epsilon, const OptionalTensor& lengths, const OptionalTensor& cu_seqlens,
    const OptionalTensor& token_mask, int64_t num_tokens) {
  const int64_t rows = rewards.numel();
  const at::Device device = rewards.device();
  check_same_device("group_advantage", {{"rewards", rewards},
                                        {"group_ids", group_ids},
                                        {"lengths", lengths},
                                        {"cu_seqlens", cu_seqlens},
                                        {"response_mask", token_mask}});
  const c10::DeviceGuard guard(device);
  check_vector(rewards, "rewards", at::kFloat, rows);
  check_vector(group_ids, "group_ids", at::kLong, rows);
  if (lengths) check_vector(*lengths, "lengths", at::kFloat, rows);
  if (cu_seqlens) {
    check_vector(*cu_seqlens, "cu_seqlens", at::kInt, rows + 1);
    check_cu_seqlens(*cu_seqlens, num_tokens, "group_advantage");
  }
  TORCH_CHECK_VALUE(cu_seqlens || num_tokens == 0, "group_advantage: num_tokens is ", num_tokens,
                    "; expected 0 without cu_seqlens");
  TORCH_CHECK_VALUE(estimator >= 0 && estimator <= static_cast<int64_t>(Estimator::grpo_loo),
                    "group_advantage: estimator is ", estimator, ", which does not exist");
  if (token_mask) check_vector(*token_mask, "response_mask", at::kBool, num_tokens);
  at::Tensor advantages = at::empty({rows}, rewards.options());
  at::Tensor tokens = empty_from_pool({num_tokens}, rewards.options());
  GroupAdvantageParams params{};
  params.rewards = rewards.const_data_ptr<float>();
  params.group_ids = group_ids.const_data_ptr<int64_t>();
  params.lengths = optional_data<float>(lengths);
  params.advantages = advantages.mutable_data_ptr<float>();
  params.cu_seqlens = optional_data<int32_t>(cu_seqlens);
  params.token_mask = optional_data<bool>(token_mask);
  params.token_advantages = tokens.mutable_data_ptr<float>();
  params.num_rows = rows;
  params.num_tokens = num_tokens;
  params.options = {static_cast<Estimator>(estimator), norm_by_std, epsilon};
  params.num_threads = at::get_num_threads();
  if (rows == 0) {
    tokens.zero_();
  } else if (device.is_cpu()) {
    run_on_cpu(params);
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (device.is_cuda()) {
    const auto bytes = rewards.options().dtype(at::kByte);
    const int64_t table_size = table_size_for(rows);
    const at::Tensor slots =
        at::empty({table_size * static_cast<int64_t>(sizeof(GroupSlot))}, bytes);
    const at::Tensor slot_of = at::empty({rows}, bytes.dtype(at::kLong));
    params.rows = {params.rewards,
                   params.group_ids,
                   params.lengths,
                   static_cast<GroupSlot*>(slots.mutable_data_ptr()),
                   slot_of.mutable_data_ptr<int64_t>(),
                   table_size};
    check_cuda(group_advantage_cuda(params, current_stream(device)), "group_advantage");
#endif
  } else {
    no_kernel_for(device, "group_advantage");
  }
  return {advantages, tokens};
}

std::tuple<at::Tensor, at::Tensor> gae(const at::Tensor& rewards, const OptionalTensor& values,
                                       const at::Tensor& cu_seqlens,
                                       const OptionalTensor& token_mask, double gamma, double lam) {
  const int64_t tokens = rewards.numel();
  const at::Device device = rewards.device();
  check_same_device("gae", {{"rewards", rewards},
                            {"values", values},
                            {"cu_seqlens", cu_seqlens},
                            {"response_mask", token_mask}});
  const c10::DeviceGuard guard(device);
  check_vector(rewards, "rewards", at::kFloat, tokens);
  check_cu_seqlens(cu_seqlens, tokens, "gae");
  if (values) check_vector(*values, "values", at::kFloat, tokens);
  if (token_mask) check_vector(*token_mask, "response_mask", at::kBool, tokens);
  at::Tensor advantages = empty_from_pool({tokens}, rewards.options());
  at::Tensor returns = empty_from_pool({tokens}, rewards.options());
  GaeParams params{};
  params.rewards = rewards.const_data_ptr<float>();
  params.values = optional_data<float>(values);
  params.token_mask = optional_data<bool>(token_mask);
  params.cu_seqlens = cu_seqlens.const_data_ptr<int32_t>();
  params.advantages = advantages.mutable_data_ptr<float>();
  params.returns = returns.mutable_data_ptr<float>();
  params.num_tokens = tokens;
  params.num_sequences = cu_seqlens.numel() - 1;
  params.gamma = gamma;
  params.lam = lam;
  params.num_threads = at::get_num_threads();
  if (params.num_sequences <= 0) {
    advantages.zero_();
    returns.zero_();
  } else if (device.is_cpu()) {
    int64_t bad_token = -1;
    params.bad_token = &bad_token;
    {
      py::gil_scoped_release no_gil;
      gae_cpu(params);
    }
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
