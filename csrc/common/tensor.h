// A torch.Tensor as the bindings see it. It is read and made through DLPack's C exchange API, never
// through torch's C++ headers, whose binary interface changes with every release.
//
// Everything here needs Python's lock, but for reading what a Tensor has: run kernels by
// `without_gil`, which holds no Tensor that it could copy or free.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/dlpack.h"

namespace hybridengine {

namespace py = pybind11;

// --- Errors --------------------------------------------------------------------------------------

template <typename... Parts>
std::string joined(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Raise RuntimeError, ValueError or IndexError, with the other arguments as one text.
#define HE_CHECK(condition, ...)                                                     \
  do {                                                                               \
    if (!(condition)) throw std::runtime_error(::hybridengine::joined(__VA_ARGS__)); \
  } while (false)
#define HE_CHECK_VALUE(condition, ...)                                                  \
  do {                                                                                  \
    if (!(condition)) throw pybind11::value_error(::hybridengine::joined(__VA_ARGS__)); \
  } while (false)
#define HE_CHECK_INDEX(condition, ...)                                                  \
  do {                                                                                  \
    if (!(condition)) throw pybind11::index_error(::hybridengine::joined(__VA_ARGS__)); \
  } while (false)

// --- Element types and devices -------------------------------------------------------------------

struct ScalarType {
  uint8_t code, bits;

  int64_t bytes() const { return bits / 8; }
  bool operator==(const ScalarType&) const = default;
};

constexpr ScalarType kFloat{dlpack::kFloat, 32}, kHalf{dlpack::kFloat, 16};
constexpr ScalarType kBFloat16{dlpack::kBfloat, 16}, kDouble{dlpack::kFloat, 64};
constexpr ScalarType kFloat8_e4m3fn{dlpack::kFloat8E4m3fn, 8};
constexpr ScalarType kLong{dlpack::kInt, 64}, kInt{dlpack::kInt, 32};
constexpr ScalarType kByte{dlpack::kUInt, 8}, kBool{dlpack::kBool, 8};

template <typename T>
constexpr ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<T, bool>) return kBool;
  if constexpr (std::is_floating_point_v<T>) return {dlpack::kFloat, 8 * sizeof(T)};
  return {std::is_signed_v<T> ? dlpack::kInt : dlpack::kUInt, 8 * sizeof(T)};
}

// As Python writes it, without `torch.`.
std::ostream& operator<<(std::ostream& out, const ScalarType& type);

struct Device {
  int32_t type = dlpack::kCpu, index = 0;

  bool is_cpu() const { return type == dlpack::kCpu; }
  bool is_cuda() const { return type == dlpack::kCuda; }
  bool operator==(const Device&) const = default;
};

constexpr Device kCPU{};

std::ostream& operator<<(std::ostream& out, const Device& device);

// --- Tensors -------------------------------------------------------------------------------------

// Sizes or strides; does not own them.
class Sizes {
 public:
  Sizes(const int64_t* first, int64_t count) : first_(first), count_(count) {}
  Sizes(std::initializer_list<int64_t> sizes) : Sizes(sizes.begin(), std::ssize(sizes)) {}
  Sizes(const std::vector<int64_t>& sizes) : Sizes(sizes.data(), std::ssize(sizes)) {}

  const int64_t* begin() const { return first_; }
  const int64_t* end() const { return first_ + count_; }
  int64_t size() const { return count_; }
  int64_t operator[](int64_t i) const {
    HE_CHECK_INDEX(i >= 0 && i < count_, "a tensor of ", count_, " dimensions has no number ", i);
    return first_[i];
  }
  Sizes first(int64_t count) const { return {first_, count}; }
  bool operator==(const Sizes& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

 private:
  const int64_t* first_;
  int64_t count_;
};

std::ostream& operator<<(std::ostream& out, const Sizes& sizes);

class Tensor {
 public:
  Tensor() = default;
  // `object` is a torch.Tensor. One on meta has a device only: neither sizes nor memory.
  explicit Tensor(py::object object);

  bool defined() const { return static_cast<bool>(object_); }
  const py::object& object() const { return object_; }

  int64_t dim() const { return view_.dim; }
  int64_t size(int64_t i) const { return sizes()[i]; }
  int64_t stride(int64_t i) const { return strides()[i]; }
  Sizes sizes() const { return {view_.shape, view_.dim}; }
  Sizes strides() const { return {view_.strides, view_.dim}; }
  int64_t numel() const;
  int64_t nbytes() const { return numel() * element_size(); }
  // From the first element to the last one in memory, elements between them included.
  int64_t extent() const;
  bool is_contiguous() const;
  // Whether the elements along the last dimension are consecutive. As for is_contiguous, strides
  // that address no second element do not matter.
  bool has_unit_inner_stride() const {
    return view_.dim > 0 &&
           (numel() == 0 || size(view_.dim - 1) == 1 || stride(view_.dim - 1) == 1);
  }

  ScalarType scalar_type() const { return {view_.dtype.code, view_.dtype.bits}; }
  int64_t element_size() const { return scalar_type().bytes(); }
  Device device() const;
  bool is_cpu() const { return device().is_cpu(); }
  bool is_cuda() const { return device().is_cuda(); }

  void* data() const { return static_cast<char*>(view_.data) + view_.byte_offset; }
  // RuntimeError where T is not the element type.
  template <typename T>
  T* data() const {
    check_type(scalar_type_of<T>());
    return static_cast<T*>(data());
  }

  // A method of torch.Tensor that returns a tensor.
  template <typename... Arguments>
  Tensor call(const char* method, Arguments&&... arguments) const {
    return Tensor(object_.attr(method)(std::forward<Arguments>(arguments)...));
  }

 private:
  void check_type(const ScalarType& expected) const {
    HE_CHECK(scalar_type() == expected, "got a tensor of ", scalar_type(), "; expected ", expected);
  }

  dlpack::TensorView view_{};  // sizes and strides are those of object_, which keeps them
  py::object object_;
};

constexpr int64_t kAlignment = 64;  // bytes, of memory on the CPU, as of torch's own tensors

// The bytes to allocate for so many.
constexpr int64_t rounded_size(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kAlignment - 1) & -kAlignment;
}

// A new tensor; large ones on the CPU come from the memory pool. Its memory cannot grow by resize_.
Tensor empty(Sizes shape, ScalarType dtype, const Device& device = kCPU);
Tensor zeros(Sizes shape, ScalarType dtype, const Device& device = kCPU);
inline Tensor empty_like(const Tensor& x) { return empty(x.sizes(), x.scalar_type(), x.device()); }

// The bytes at `data` in a new tensor on the device. To a GPU they go through pinned memory, which
// torch reuses once they have arrived: the host does not wait.
Tensor upload(const void* data, int64_t num_bytes, const Device& device);

// --- Running kernels -----------------------------------------------------------------------------

// torch.get_num_threads()
int get_num_threads();

// The stream of torch that kernels on this device go to now.
void* current_stream(const Device& device);

// Makes a CUDA device the current one for its lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Device& device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// A graph that this thread captures (common/graph.h) cannot be replayed.
void refuse_capture();

// Calls a kernel with Python's lock released.
template <typename Kernel>
void without_gil(Kernel&& kernel) {
  refuse_capture();
  const py::gil_scoped_release released;
  kernel();
}

// Looks torch up, once; RuntimeError where it lacks what this needs.
void require_torch();

bool is_tensor(py::handle object);
bool scalar_type_of(py::handle dtype, ScalarType& type);
bool device_of(py::handle object, Device& device);

}  // namespace hybridengine

namespace pybind11::detail {

template <>
struct type_caster<hybridengine::Tensor> {
  PYBIND11_TYPE_CASTER(hybridengine::Tensor, const_name("torch.Tensor"));

  bool load(handle source, bool) {
    if (!hybridengine::is_tensor(source)) return false;
    value = hybridengine::Tensor(reinterpret_borrow<object>(source));
    return true;
  }

  static handle cast(const hybridengine::Tensor& tensor, return_value_policy, handle) {
    return tensor.object().inc_ref();
  }
};

template <>
struct type_caster<hybridengine::ScalarType> {
  PYBIND11_TYPE_CASTER(hybridengine::ScalarType, const_name("torch.dtype"));

  bool load(handle source, bool) { return hybridengine::scalar_type_of(source, value); }
};

template <>
struct type_caster<hybridengine::Device> {
  PYBIND11_TYPE_CASTER(hybridengine::Device, const_name("torch.device"));

  bool load(handle source, bool) { return hybridengine::device_of(source, value); }
};

}  // namespace pybind11::detail
