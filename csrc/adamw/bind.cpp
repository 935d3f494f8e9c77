#include <optional>
#include <string>
#include <vector>

#include "adamw/params.h"
#include "changes/change_mask.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr const char* kOp = "adamw_";

// Raises ValueError unless the tensor is contiguous, of this dtype, on this device, and as large.
void check_one(const at::Tensor& tensor, const char* name, size_t i, at::ScalarType dtype,
               const at::Tensor& param) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype, kOp, ": ", name, "[", i, "] has dtype ",
                    tensor.scalar_type(), "; expected ", dtype);
  TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), kOp, ": ", name, "[", i, "] has shape ",
                    tensor.sizes(), ", params[", i, "] ", param.sizes(), "; expected the same");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), kOp, ": ", name, "[", i, "] has strides ",
                    tensor.strides(), "; expected a contiguous tensor");
  TORCH_CHECK_VALUE(tensor.device() == param.device(), kOp, ": ", name, "[", i, "] is on ",
                    tensor.device(), ", params[0] on ", param.device(),
                    "; move them to one device");
}

void check_length(const Tensors& tensors, const char* name, const Tensors& params) {
  TORCH_CHECK_VALUE(tensors.size() == params.size(), kOp, ": there are ", tensors.size(), " ", name,
                    " and ", params.size(), " params; expected one each");
}

const float* step_of(const at::Tensor& step, size_t i, const at::Device& device) {
  TORCH_CHECK_VALUE(
      step.numel() == 1 && step.scalar_type() == at::kFloat && step.device() == device, kOp,
      ": steps[", i, "] has ", step.numel(), " elements and dtype ", step.scalar_type(), " on ",
      step.device(), "; expected one float32 on ", device);
  const auto* value = step.const_data_ptr<float>();
  TORCH_CHECK_VALUE(!device.is_cpu() || *value >= 1, kOp, ": steps[", i, "] is ", *value,
                    "; updates are counted from 1");
  return value;
}

uint32_t* mask_of(at::Tensor& mask, size_t i, const at::Tensor& param) {
  const int64_t words = num_mask_words(param.numel());
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kInt && mask.numel() == words &&
                        mask.is_contiguous() && mask.device() == param.device(),
                    kOp, ": changed[", i, "] has ", mask.numel(), " elements and dtype ",
                    mask.scalar_type(), " on ", mask.device(), "; expected ", words, " int32 on ",
                    param.device(), ": make it with change_mask()");
  return static_cast<uint32_t*>(mask.mutable_data_ptr());
}

void adamw(Tensors params, const Tensors& grads, Tensors exp_avgs, Tensors exp_avg_sqs,
           const Tensors& steps, Tensors changed, at::Tensor checksums,
           std::optional<at::ScalarType> engine_dtype, const AdamwOptions& options,
           const std::optional<at::Tensor>& grad_factor) {
  check_length(grads, "grads", params);
  check_length(exp_avgs, "exp_avgs", params);
  check_length(exp_avg_sqs, "exp_avg_sqs", params);
  check_length(steps, "steps", params);
  if (engine_dtype) {
    check_length(changed, "changed", params);
    TORCH_CHECK_VALUE(*engine_dtype == at::kBFloat16 || *engine_dtype == at::kHalf, kOp,
                      ": engine_dtype is ", *engine_dtype, "; expected bfloat16 or float16");
    check_vector(checksums, "adamw_: checksums", at::kLong, 2 * params.size());
  }
  if (params.empty()) return;
  const at::Device device = params[0].device();
  AdamwParams p{};
  p.options = options;
  p.grad_dtype = float_dtype(grads[0], "grads[0]");
  TORCH_CHECK_VALUE(p.grad_dtype != DType::f64, kOp,
                    ": grads[0] has dtype float64; expected float32, bfloat16 or float16");
  std::vector<AdamwTensor> tensors;
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].device() == device, kOp, ": params[", i, "] is on ",
                      params[i].device(), ", params[0] on ", device, "; move them to one device");
    check_one(params[i], "params", i, at::kFloat, params[i]);
    check_one(grads[i], "grads", i, grads[0].scalar_type(), params[i]);
    check_one(exp_avgs[i], "exp_avgs", i, at::kFloat, params[i]);
    check_one(exp_avg_sqs[i], "exp_avg_sqs", i, at::kFloat, params[i]);
    AdamwTensor tensor{};
    tensor.param = params[i].mutable_data_ptr<float>();
    tensor.grad = grads[i].const_data_ptr();
    tensor.exp_avg = exp_avgs[i].mutable_data_ptr<float>();
    tensor.exp_avg_sq = exp_avg_sqs[i].mutable_data_ptr<float>();
    tensor.step = step_of(steps[i], i, device);
    if (engine_dtype) {
      tensor.changed = mask_of(changed[i], i, params[i]);
      tensor.checksums = reinterpret_cast<uint64_t*>(checksums.mutable_data_ptr<int64_t>()) + 2 * i;
    }
    tensor.numel = params[i].numel();
    tensor.first_chunk = p.num_chunks;
    tensors.push_back(tensor);
    p.num_chunks += num_chunks_of(tensor.numel);
  }
  if (grad_factor) {
    TORCH_CHECK_VALUE(grad_factor->numel() == 1 && grad_factor->scalar_type() == at::kFloat &&
                          grad_factor->device() == device,
                      kOp, ": grad_factor has ", grad_factor->numel(), " elements and dtype ",
                      grad_factor->scalar_type(), " on ", grad_factor->device(),
                      "; expected one float32 on ", device);
    p.options.grad_factor = grad_factor->const_data_ptr<float>();
  }
  p.tensors = tensors.data();
  p.num_tensors = static_cast<int64_t>(tensors.size());
  p.marks_changes = engine_dtype.has_value();
  p.engine_dtype = engine_dtype == at::kBFloat16 ? DType::bf16 : DType::f16;
  p.num_threads = at::get_num_threads();
  if (device.is_cpu()) {
    py::gil_scoped_release no_gil;
    adamw_cpu(p);
    return;
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    check_cuda(adamw_cuda(p, current_stream(device)), kOp);
    return;
  }
#endif
  no_kernel_for(device, kOp);
}

}  // namespace

void register_adamw(py::module_& m) {
  m.def(
      "adamw",
      [](Tensors params, const Tensors& grads, Tensors exp_avgs, Tensors exp_avg_sqs,
         const Tensors& steps, Tensors changed, at::Tensor checksums,
         std::optional<at::ScalarType> engine_dtype, double lr, double beta1, double beta2,
         double eps, double weight_decay, const std::optional<at::Tensor>& grad_factor) {
        adamw(std::move(params), grads, std::move(exp_avgs), std::move(exp_avg_sqs), steps,
              std::move(changed), std::move(checksums), engine_dtype,
              AdamwOptions{lr, beta1, beta2, eps, weight_decay, nullptr}, grad_factor);
      },
      py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
      py::arg("steps"), py::arg("changed"), py::arg("checksums"), py::arg("engine_dtype"),
      py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
      py::arg("grad_factor"));
}

}  // namespace hybridengine
