// Shared by every bind.cpp: tensor conversion, argument checks, device and stream. It includes
// narrow headers only, because torch/extension.h takes most of a minute to compile.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <initializer_list>
#include <optional>

#include "common/dtype.h"

namespace hybridengine {

namespace py = pybind11;

// Element type for kernels that do arithmetic; an error for anything but f32, f16, bf16, f64.
inline DType float_dtype(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kDouble:
      return DType::f64;
    default:
      TORCH_CHECK_VALUE(false, name, " has dtype ", tensor.scalar_type(),
                        "; expected float32, float16, bfloat16 or float64");
  }
}

// Raises ValueError unless the argument is a contiguous vector of this size and type.
inline void check_vector(const at::Tensor& tensor, const char* name, at::ScalarType dtype,
                         int64_t size) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.scalar_type() == dtype && tensor.size(0) == size &&
                        tensor.is_contiguous(),
                    name, " has shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(),
                    "; expected a contiguous [", size, "] tensor of ", dtype);
}

// A tensor argument and its name; absent tensors are not checked.
struct NamedTensor {
  NamedTensor(const char* name, const at::Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const std::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}
  const char* name;
  const at::Tensor* tensor;
};

// Raises ValueError naming the first tensor that is not on the device of the first one present.
inline void check_same_device(const char* op, std::initializer_list<NamedTensor> arguments) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& argument : arguments) {
    if (!argument.tensor) continue;
    if (!first) first = &argument;
    TORCH_CHECK_VALUE(argument.tensor->device() == first->tensor->device(), op, ": ", argument.name,
                      " is on ", argument.tensor->device(), ", ", first->name, " on ",
                      first->tensor->device(), "; move them to one device");
  }
}

inline void* current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

// The bytes at `data` in a new tensor on the device. To a GPU they go through pinned memory, which
// torch reuses once they have arrived: the host does not wait.
inline at::Tensor upload(const void* data, int64_t num_bytes, const at::Device& device) {
  const auto options = at::TensorOptions(at::kByte).pinned_memory(device.is_cuda());
  at::Tensor bytes = at::empty({num_bytes}, options);
  if (num_bytes) std::memcpy(bytes.mutable_data_ptr(), data, num_bytes);
  return bytes.to(at::TensorOptions().device(device), /*non_blocking=*/true);
}

inline void check_cuda(int error, const char* kernel) {
  TORCH_CHECK(error == 0, kernel, " failed to launch: CUDA error ", error);
}

[[noreturn]] inline void no_kernel_for(const at::Device& device, const char* op) {
  TORCH_CHECK(false, op, ": this build of hybridengine._C has no kernel for ", device,
              "; build with HYBRIDENGINE_CUDA=ON or use backend='reference'");
}

}  // namespace hybridengine
