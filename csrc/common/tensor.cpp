#include "common/tensor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "common/graph.h"
#include "common/memory_pool.h"

#ifdef HYBRIDENGINE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace hybridengine {

namespace {

struct NamedType {
  const char* name;
  ScalarType type;
};

constexpr NamedType kNamedTypes[] = {
    {"float32", kFloat},
    {"bfloat16", kBFloat16},
    {"float16", kHalf},
    {"float64", kDouble},
    {"int64", kLong},
    {"int32", kInt},
    {"int16", {dlpack::kInt, 16}},
    {"int8", {dlpack::kInt, 8}},
    {"uint8", kByte},
    {"uint16", {dlpack::kUInt, 16}},
    {"uint32", {dlpack::kUInt, 32}},
    {"uint64", {dlpack::kUInt, 64}},
    {"bool", kBool},
    {"float8_e4m3fn", kFloat8_e4m3fn},
    {"float8_e5m2", {dlpack::kFloat8E5m2, 8}},
    {"complex64", {dlpack::kComplex, 64}},
    {"complex128", {dlpack::kComplex, 128}},
};

// What the bindings need of torch, looked up once.
struct Torch {
  const dlpack::ExchangeApi* api = nullptr;
  py::module_ module = py::module_::import("torch");
  py::object tensor_type = module.attr("Tensor");
  py::object get_num_threads = module.attr("get_num_threads");
  std::vector<std::pair<py::object, ScalarType>> dtypes;
};

const Torch& torch() {
  static const Torch& found = *[] {  // never destroyed: Python is gone before static objects
    auto* torch = new Torch;
    const py::object capsule =
        py::getattr(torch->tensor_type, "__dlpack_c_exchange_api__", py::none());
    HE_CHECK(!capsule.is_none(), "torch ", torch->module.attr("__version__").cast<std::string>(),
             " has no Tensor.__dlpack_c_exchange_api__; install torch 2.11 or newer");
    torch->api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (PyErr_Occurred()) throw py::error_already_set();
    while (torch->api && torch->api->version.major > dlpack::kMajorVersion)
      torch->api = torch->api->previous;
    HE_CHECK(torch->api && torch->api->view_of_py_object,
             "this torch does not offer version 1 of DLPack's exchange API; install a newer "
             "hybridengine");
    for (const NamedType& known : kNamedTypes)
      torch->dtypes.emplace_back(torch->module.attr(known.name), known.type);
    return torch;
  }();
  return found;
}

constexpr int32_t kMeta = -1;  // a device type that DLPack does not have

void check_python(int status) {
  if (status) throw py::error_already_set();
}

// Memory of a new tensor on the CPU with what DLPack says about it.
struct OwnedTensor {
  dlpack::ManagedTensor managed{};
  std::vector<int64_t> shape_and_strides;
  PooledBlock block;                    // of the pool, or none
  std::shared_ptr<GraphMemory> memory;  // or of a graph
};

// The bytes of a contiguous tensor; ValueError where a size is negative or they do not fit.
int64_t bytes_of(const Sizes& shape, const ScalarType& dtype) {
  int64_t bytes = dtype.bytes();
  bool fits = true;
  for (const int64_t size : shape) {
    HE_CHECK_VALUE(size >= 0, "cannot allocate a tensor of shape ", shape,
                   "; sizes must not be negative");
    fits = fits && !__builtin_mul_overflow(bytes, size, &bytes);
  }
  fits = fits && bytes <= INT64_MAX - kAlignment;
  HE_CHECK_VALUE(fits, "cannot allocate a tensor of shape ", shape, " of ", dtype,
                 "; it has more bytes than an address counts");
  return bytes;
}

Tensor adopt(dlpack::ManagedTensor* managed) {
  void* object = nullptr;
  if (torch().api->to_py_object(managed, &object)) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return Tensor(py::reinterpret_steal<py::object>(static_cast<PyObject*>(object)));
}

Tensor empty_on_cpu(const Sizes& shape, const ScalarType& dtype) {
  auto owned = std::make_unique<OwnedTensor>();
  const int64_t bytes = bytes_of(shape, dtype), dim = shape.size();
  owned->shape_and_strides.resize(2 * dim);
  int64_t* const sizes = owned->shape_and_strides.data();
  std::copy(shape.begin(), shape.end(), sizes);
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    sizes[dim + i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  owned->managed.version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
  owned->managed.context = owned.get();
  const auto code = static_cast<uint8_t>(dtype.code);
  owned->managed.view = {nullptr,
                         {dlpack::kCpu, 0},
                         static_cast<int32_t>(dim),
                         {code, dtype.bits, 1},
                         sizes,
                         sizes + dim,
                         0};
  if (Graph* graph = Graph::capturing()) {
    owned->memory = graph->memory();
    owned->managed.view.data = owned->memory->take(bytes);
    owned->managed.deleter = [](dlpack::ManagedTensor* self) {
      const std::unique_ptr<OwnedTensor> freed(static_cast<OwnedTensor*>(self->context));
      freed->memory->give_back(self->view.data);
    };
    return adopt(&owned.release()->managed);
  }
  if (bytes >= kPooledBytes) owned->block = take_from_pool(bytes);
  if (owned->block.begin) {
    owned->managed.view.data = owned->block.begin;
    owned->managed.deleter = [](dlpack::ManagedTensor* self) {
      const std::unique_ptr<OwnedTensor> freed(static_cast<OwnedTensor*>(self->context));
      return_to_pool(freed->block);
    };
  } else {
    owned->managed.view.data = std::aligned_alloc(kAlignment, rounded_size(bytes));
    if (!owned->managed.view.data) throw std::bad_alloc();
    owned->managed.deleter = [](dlpack::ManagedTensor* self) {
      const std::unique_ptr<OwnedTensor> freed(static_cast<OwnedTensor*>(self->context));
      std::free(self->view.data);
    };
  }
  return adopt(&owned.release()->managed);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ScalarType& type) {
  for (const NamedType& known : kNamedTypes)
    if (known.type == type) return out << known.name;
  return out << "DLPack type " << int{type.code} << " of " << int{type.bits} << " bits";
}

std::ostream& operator<<(std::ostream& out, const Device& device) {
  if (device.is_cpu()) return out << "cpu";
  if (device.type == kMeta) return out << "meta";
  if (device.is_cuda() || device.type == dlpack::kRocm) return out << "cuda:" << device.index;
  return out << "DLPack device " << device.type << ":" << device.index;
}

std::ostream& operator<<(std::ostream& out, const Sizes& sizes) {
  out << "[";
  for (int64_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  return out << "]";
}

Tensor::Tensor(py::object object) : object_(std::move(object)) {
  if (torch().api->view_of_py_object(object_.ptr(), &view_) == 0) return;
  const std::string reason = py::error_already_set().what();
  if (object_.attr("is_meta").cast<bool>()) {
    view_ = {};
    view_.device.type = kMeta;
    return;
  }
  throw py::value_error(joined(
      "got a tensor on ", py::str(object_.attr("device")).cast<std::string>(), " with layout ",
      py::str(object_.attr("layout")).cast<std::string>(),
      "; expected a dense tensor on the CPU or a GPU (", reason.substr(0, reason.find('\n')), ")"));
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (const int64_t size : sizes()) count *= size;
  return count;
}

int64_t Tensor::extent() const {
  int64_t last = 0;
  for (int64_t i = 0; i < dim(); ++i) {
    if (size(i) == 0) return 0;
    last += (size(i) - 1) * stride(i);
  }
  return last + 1;
}

bool Tensor::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (int64_t i = dim() - 1; i >= 0; --i) {
    if (size(i) != 1 && stride(i) != expected) return false;
    expected *= size(i);
  }
  return true;
}

Device Tensor::device() const {
  const dlpack::Device device = view_.device;
  if (device.type == dlpack::kCpu || device.type == dlpack::kCudaHost) return kCPU;
  return {device.type, device.index};
}

Tensor empty(Sizes shape, ScalarType dtype, const Device& device) {
  if (device.is_cpu()) return empty_on_cpu(shape, dtype);
  std::vector<int64_t> sizes(shape.begin(), shape.end());
  dlpack::TensorView prototype{};
  prototype.device = {device.type, device.index};
  prototype.dim = static_cast<int32_t>(sizes.size());
  prototype.dtype = {dtype.code, dtype.bits, 1};
  prototype.shape = sizes.data();
  dlpack::ManagedTensor* allocated = nullptr;
  std::string error;
  const auto set_error = [](void* text, const char* kind, const char* message) {
    *static_cast<std::string*>(text) = joined(kind, ": ", message);
  };
  const int status = torch().api->allocate(&prototype, &allocated, &error, set_error);
  HE_CHECK(status == 0, "cannot allocate a tensor of shape ", shape, " on ", device, ": ", error);
  return adopt(allocated);
}

Tensor zeros(Sizes shape, ScalarType dtype, const Device& device) {
  Tensor tensor = empty(shape, dtype, device);
  if (device.is_cpu()) {
    if (tensor.numel()) std::memset(tensor.data(), 0, tensor.nbytes());
    return tensor;
  }
  return tensor.call("zero_");
}

Tensor upload(const void* data, int64_t num_bytes, const Device& device) {
  using namespace py::literals;
  const auto filled = [&](Tensor bytes) {
    if (num_bytes) std::memcpy(bytes.data(), data, num_bytes);
    return bytes;
  };
  if (device.is_cpu()) return filled(empty({num_bytes}, kByte));
  const py::object pinned = torch().module.attr("empty")(
      num_bytes, "dtype"_a = torch().module.attr("uint8"), "pin_memory"_a = true);
  const py::object target = torch().module.attr("device")(joined(device));
  return filled(Tensor(pinned)).call("to", target, "non_blocking"_a = true);
}

int get_num_threads() {
  const auto count =
      py::reinterpret_steal<py::object>(PyObject_CallNoArgs(torch().get_num_threads.ptr()));
  if (!count) throw py::error_already_set();
  return count.cast<int>();
}

void* current_stream(const Device& device) {
  void* stream = nullptr;
  check_python(torch().api->current_stream(device.type, device.index, &stream));
  return stream;
}

#ifdef HYBRIDENGINE_WITH_CUDA
DeviceGuard::DeviceGuard(const Device& device) {
  int current = 0;
  if (!device.is_cuda() || cudaGetDevice(&current) != cudaSuccess || current == device.index)
    return;
  const cudaError_t error = cudaSetDevice(device.index);
  HE_CHECK(error == cudaSuccess, "cannot use ", device, ": ", cudaGetErrorString(error));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}
#else
DeviceGuard::DeviceGuard(const Device&) {}
DeviceGuard::~DeviceGuard() = default;
#endif

void require_torch() { torch(); }

bool is_tensor(py::handle object) {
  auto* wanted = reinterpret_cast<PyTypeObject*>(torch().tensor_type.ptr());
  return Py_TYPE(object.ptr()) == wanted || PyType_IsSubtype(Py_TYPE(object.ptr()), wanted);
}

bool scalar_type_of(py::handle dtype, ScalarType& type) {
  for (const auto& [object, known] : torch().dtypes) {
    if (!object.is(dtype)) continue;
    type = known;
    return true;
  }
  return false;
}

bool device_of(py::handle object, Device& device) {
  if (!py::isinstance(object, torch().module.attr("device"))) return false;
  const auto type = object.attr("type").cast<std::string>();
  if (type != "cpu" && type != "cuda") return false;
  const py::object index = object.attr("index");
  if (type == "cpu") {
    device = kCPU;
  } else if (index.is_none()) {
    const py::object current = torch().module.attr("cuda").attr("current_device")();
    device = {dlpack::kCuda, current.cast<int32_t>()};
  } else {
    device = {dlpack::kCuda, index.cast<int32_t>()};
  }
  return true;
}

}  // namespace hybridengine
