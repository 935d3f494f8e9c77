// Shared by every bind.cpp: the checks of arguments, new tensors, and the run of a kernel.
//
// All that an address is computed from is checked here or in the bind.cpp. The operators of
// hybridengine.kernels check for the user's sake, and word their errors for the user.
#pragma once

#include <pybind11/stl.h>

#include <array>
#include <initializer_list>
#include <optional>

#include "common/dtype.h"
#include "common/graph.h"
#include "common/heads.h"
#include "common/rows.h"
#include "common/tensor.h"

#ifdef HYBRIDENGINE_WITH_CUDA
#define HE_CUDA(kernel) kernel
#else
#define HE_CUDA(kernel) nullptr  // this build has none
#endif

namespace hybridengine {

// --- What an argument has to be ------------------------------------------------------------------

// Element types; does not own them.
class Types {
 public:
  Types(const ScalarType& type) : first_(&type), count_(1) {}
  template <size_t count>
  constexpr Types(const ScalarType (&types)[count]) : first_(types), count_(count) {}

  const ScalarType* begin() const { return first_; }
  const ScalarType* end() const { return first_ + count_; }
  bool have(const ScalarType& type) const { return std::find(begin(), end(), type) != end(); }

 private:
  const ScalarType* first_;
  int64_t count_;
};

constexpr ScalarType kFloats[] = {kFloat, kBFloat16, kHalf};
constexpr ScalarType kAllFloats[] = {kFloat, kBFloat16, kHalf, kDouble};
constexpr ScalarType kWideFloats[] = {kFloat, kBFloat16};
constexpr ScalarType kShortFloats[] = {kBFloat16, kHalf};

// Of one of kAllFloats.
DType dtype_of(const ScalarType& type);

// A size, or where the size of the argument goes, whatever it is.
class Dim {
 public:
  Dim(int64_t size) : size_(size) {}
  Dim(int64_t* found) : found_(found) {}

  bool takes(int64_t size) const { return found_ ? (*found_ = size, true) : size == size_; }
  friend std::ostream& operator<<(std::ostream& out, const Dim& dim) {
    return dim.found_ ? out << "*" : out << dim.size_;
  }

 private:
  int64_t size_ = 0;
  int64_t* found_ = nullptr;
};

// Does not own its dimensions.
class Shape {
 public:
  Shape(std::initializer_list<Dim> dims) : Shape(dims.begin(), std::ssize(dims)) {}

  const Dim* begin() const { return first_; }
  const Dim* end() const { return first_ + count_; }
  bool takes(const Sizes& sizes) const {
    const auto takes = [](const Dim& dim, int64_t size) { return dim.takes(size); };
    return !first_ || std::equal(begin(), end(), sizes.begin(), sizes.end(), takes);
  }
  static Shape any() { return Shape(nullptr, 0); }
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape);

 private:
  Shape(const Dim* first, int64_t count) : first_(first), count_(count) {}

  const Dim* first_;  // null: any
  int64_t count_;
};

// Of an argument, or of an entry of a list of tensors.
struct Name {
  Name(const char* text) : text(text) {}
  Name(const char* list, int64_t index) : text(list), index(index) {}
  friend std::ostream& operator<<(std::ostream& out, const Name& name) {
    out << name.text;
    return name.index < 0 ? out : out << "[" << name.index << "]";
  }

  const char* text;
  int64_t index = -1;
};

// How functions take tensors.
using In = const Tensor&;
using OptionalIn = const std::optional<Tensor>&;

// A tensor, or none: nothing is checked of an absent one.
struct MaybeTensor {
  MaybeTensor(const Tensor& given) : tensor(&given) {}
  MaybeTensor(const std::optional<Tensor>& given) : tensor(given ? &*given : nullptr) {}
  const Tensor* tensor;
};

// --- A call --------------------------------------------------------------------------------------

// The arguments of a call of an operator, all on the device of the first one. What is not as it has
// to be raises ValueError with the name, what was given and what is expected.
class Arguments {
 public:
  Arguments(const char* op, const Name& name, const Tensor& first)
      : op_(op), name_(name), device_(first.device()) {}
  explicit Arguments(const char* op) : op_(op), name_("") {}  // without tensors

  const char* op() const { return op_; }
  const Device& device() const { return device_; }
  // RuntimeError on any other device.
  const Arguments& on_cpu() const {
    if (!device_.is_cpu()) no_kernel();
    return *this;
  }

  // Where the elements of a tensor are, null for an absent one. It is contiguous; with a
  // `row_stride` it is a matrix with inner stride 1.
  void* data(const Name& name, const MaybeTensor& given, Types types, Shape shape,
             int64_t* row_stride = nullptr) const;
  template <typename T>
  T* data(const Name& name, const MaybeTensor& given, Shape shape,
          int64_t* row_stride = nullptr) const {
    return static_cast<T*>(data(name, given, scalar_type_of<T>(), shape, row_stride));
  }
  Rows rows(const Name& name, const Tensor& given, Types types, Shape shape) const {
    int64_t stride;
    const void* first = data(name, given, types, shape, &stride);
    return {first, stride};
  }
  // [tokens, heads, dim] with inner stride 1.
  HeadRows heads(const Name& name, const Tensor& given, Types types, Shape shape) const {
    check(name, given, types, shape, Layout::rows);
    return {given.data(), given.stride(0), given.stride(1)};
  }
  DType dtype(const Name& name, const ScalarType& given, Types types = kFloats) const;
  void same_device(const Name& name, const MaybeTensor& given) const;

  // [*count + 1] numbers that ascend from 0 to `total`, or below it unless they `cover` all. On a
  // GPU they are not read, which would synchronize: the kernels clamp them (sequence_bounds.h).
  const int32_t* ends(const Name& name, const MaybeTensor& given, int64_t* count, int64_t total,
                      const char* unit = "tokens", bool cover = false) const;

  void expect(bool condition, const auto&... parts) const {
    if (!condition) [[unlikely]]
      throw py::value_error(joined(op_, ": ", parts...));
  }
  int64_t number(const Name& name, int64_t given, int64_t least, int64_t most) const {
    expect(least <= given && given <= most, name, " is ", given, "; expected ", least, " to ",
           most);
    return given;
  }
  template <typename Enum>
  Enum choice(const Name& name, int64_t given, Enum last) const {
    return static_cast<Enum>(number(name, given, 0, static_cast<int64_t>(last)));
  }

  // A new tensor on the device, whose elements `data` becomes.
  Tensor make(auto*& data, const Sizes& shape, const ScalarType& dtype) const {
    Tensor made = empty(shape, dtype, device_);
    data = static_cast<std::remove_reference_t<decltype(data)>>(made.data());
    return made;
  }
  template <typename T>
  Tensor make(T*& data, const Sizes& shape) const {
    return make(data, shape, scalar_type_of<T>());
  }
  // Of these sizes; unless it is wanted, without elements and null.
  template <typename T>
  Tensor make_if(bool wanted, T*& data, int64_t first, auto... sizes) const {
    Tensor made = make(data, {wanted ? first : 0, int64_t{sizes}...});
    if (!wanted) data = nullptr;
    return made;
  }

  // Calls the kernel of the device, on a CPU with Python's lock released.
  template <typename Params>
  void run(Params& p, void (*cpu)(const Params&),
           std::type_identity_t<int (*)(const Params&, void*)> cuda = nullptr) const {
    p.num_threads = get_num_threads();
    if (device_.is_cpu()) return without_gil([&] { cpu(p); });
    if (!cuda || !device_.is_cuda()) no_kernel();
    launch([&](void* stream) { return cuda(p, stream); });
  }
  // The same on a CPU. params.*rows is the number of rows of its operands: a graph that this thread
  // captures calls it again, with fewer rows.
  template <typename Params, typename Kernel>
  void run_rows(Params& p, int64_t Params::* rows, const Kernel& kernel) const {
    p.num_threads = get_num_threads();
    if (Graph* graph = Graph::capturing()) graph->add(op_, p, rows, kernel);
    const py::gil_scoped_release released;
    kernel(p);
  }
  // kernel(stream) returns a cudaError_t.
  template <typename Kernel>
  void launch(const Kernel& kernel) const {
    const DeviceGuard guard(device_);
    const int error = kernel(current_stream(device_));
    HE_CHECK(error == 0, op_, " failed to launch: CUDA error ", error);
  }
  [[noreturn]] void no_kernel() const;

 private:
  enum class Layout { contiguous, rows };
  void check(const Name& name, const Tensor& given, Types types, Shape shape, Layout layout) const;

  const char* op_;
  Name name_;  // of the first one
  Device device_;
};

// ValueError unless values[i] is from `least` to `most`. For kernels: it needs no Arguments.
template <typename T>
void check_values(const char* op, const char* name, const T* values, int64_t count, int64_t least,
                  int64_t most) {
  for (int64_t i = 0; i < count; ++i)
    HE_CHECK_VALUE(least <= values[i] && values[i] <= most, op, ": ", name, "[", i, "] is ",
                   values[i], "; expected ", least, " to ", most);
}

// Adds a function to the module. `names`, with a blank between them, and `last` are its arguments.
template <typename Result, typename... Arguments, typename... Last>
void def(py::module_& m, const char* name, Result (*function)(Arguments...), const char* names,
         const Last&... last) {
  std::istringstream words(names);
  std::array<std::string, sizeof...(Arguments) - sizeof...(Last)> of;
  for (std::string& word : of) words >> word;
  HE_CHECK(words && words.peek() == EOF, name, " has other arguments than ", names);
  std::apply([&](const auto&... word) { m.def(name, function, py::arg(word.c_str())..., last...); },
             of);
}

}  // namespace hybridengine
