// Shared by every bind.cpp: argument checks and what follows a launch.
#pragma once

#include <pybind11/stl.h>

#include <initializer_list>
#include <optional>

#include "common/dtype.h"
#include "common/graph.h"
#include "common/heads.h"
#include "common/tensor.h"

namespace hybridengine {

// Element type for kernels that do arithmetic; an error for anything but f32, f16, bf16, f64.
inline DType float_dtype(const ScalarType& type, const char* name) {
  if (type == kFloat) return DType::f32;
  if (type == kHalf) return DType::f16;
  if (type == kBFloat16) return DType::bf16;
  HE_CHECK_VALUE(type == kDouble, name, " has dtype ", type,
                 "; expected float32, float16, bfloat16 or float64");
  return DType::f64;
}

inline DType float_dtype(const Tensor& tensor, const char* name) {
  return float_dtype(tensor.scalar_type(), name);
}

// Raises ValueError unless the argument is a contiguous vector of this size and type.
inline void check_vector(const Tensor& tensor, const char* name, ScalarType dtype, int64_t size) {
  HE_CHECK_VALUE(tensor.dim() == 1 && tensor.scalar_type() == dtype && tensor.size(0) == size &&
                     tensor.is_contiguous(),
                 name, " has shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(),
                 "; expected a contiguous [", size, "] tensor of ", dtype);
}

// Raises ValueError unless x is [tokens of like, heads, dim] of the type of `like`.
inline HeadRows head_rows(const char* op, const char* name, const Tensor& x, const Tensor& like,
                          int64_t heads, int64_t dim) {
  HE_CHECK_VALUE(x.sizes() == Sizes({like.size(0), heads, dim}) &&
                     x.scalar_type() == like.scalar_type() && x.has_unit_inner_stride(),
                 op, ": ", name, " has shape ", x.sizes(), ", strides ", x.strides(), " and dtype ",
                 x.scalar_type(), "; expected [", like.size(0), ", ", heads, ", ", dim, "] of ",
                 like.scalar_type(), " with inner stride 1");
  return {x.data(), x.stride(0), x.stride(1)};
}

// A tensor argument and its name; absent tensors are not checked.
struct NamedTensor {
  NamedTensor(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  NamedTensor(const char* name, const std::optional<Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}
  const char* name;
  const Tensor* tensor;
};

// Raises ValueError naming the first tensor that is not on the device of the first one present.
inline void check_same_device(const char* op, std::initializer_list<NamedTensor> arguments) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& argument : arguments) {
    if (!argument.tensor) continue;
    if (!first) first = &argument;
    HE_CHECK_VALUE(argument.tensor->device() == first->tensor->device(), op, ": ", argument.name,
                   " is on ", argument.tensor->device(), ", ", first->name, " on ",
                   first->tensor->device(), "; move them to one device");
  }
}

// The tensors of a call: data() is where a tensor's elements are, if it is on the device of the
// first one, contiguous and of this type and shape, else it raises ValueError. Absent tensors have
// none.
class Arguments {
 public:
  Arguments(const char* op, const char* first_name, const Tensor& first)
      : op_(op), first_(first_name, first) {}

  void* data(const char* name, const Tensor& tensor, ScalarType dtype, Sizes shape) const {
    check_same_device(op_, {first_, {name, tensor}});
    HE_CHECK_VALUE(
        tensor.scalar_type() == dtype && tensor.sizes() == shape && tensor.is_contiguous(), op_,
        ": ", name, " has shape ", tensor.sizes(), " and dtype ", tensor.scalar_type(),
        "; expected a contiguous ", shape, " tensor of ", dtype);
    return tensor.data();
  }
  template <typename T>
  T* data(const char* name, const Tensor& tensor, Sizes shape) const {
    return static_cast<T*>(data(name, tensor, scalar_type_of<T>(), shape));
  }
  template <typename T>
  T* data(const char* name, const std::optional<Tensor>& tensor, Sizes shape) const {
    return tensor ? data<T>(name, *tensor, shape) : nullptr;
  }

 private:
  const char* op_;
  NamedTensor first_;
};

// Calls kernel(params) with Python's lock released. params.*rows is the number of rows of its
// operands: a graph that this thread captures calls it again, with fewer rows.
template <typename Params, typename Kernel>
void run_rows(const char* op, const Params& params, int64_t Params::* rows, const Kernel& kernel) {
  if (Graph* graph = Graph::capturing()) graph->add(op, params, rows, kernel);
  const py::gil_scoped_release released;
  kernel(params);
}

inline void check_cuda(int error, const char* kernel) {
  HE_CHECK(error == 0, kernel, " failed to launch: CUDA error ", error);
}

[[noreturn]] inline void no_kernel_for(const Device& device, const char* op) {
  throw std::runtime_error(joined(op, ": this build of hybridengine._C has no kernel for ", device,
                                  "; build with HYBRIDENGINE_CUDA=ON or use backend='reference'"));
}

}  // namespace hybridengine
