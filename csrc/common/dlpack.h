// The part of DLPack's binary interface (version 1) that the bindings use, which
// `torch.Tensor.__dlpack_c_exchange_api__` offers: https://dmlc.github.io/dlpack/latest/c_api.html.
// It is the same for every torch, so that one build of the extension works with all of them.
#pragma once

#include <cstdint>

namespace hybridengine::dlpack {

constexpr uint32_t kMajorVersion = 1, kMinorVersion = 3;

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kRocm = 10 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E5m2 = 12,
};

struct Version {
  uint32_t major, minor;
};

struct Device {
  int32_t type, index;
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct TensorView {
  void* data;
  Device device;
  int32_t dim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ManagedTensor {
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  uint64_t flags;
  TensorView view;
};

using SetError = void (*)(void* context, const char* kind, const char* message);

// Functions return 0, or another number with a Python error set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(TensorView* prototype, ManagedTensor** out, void* context, SetError set_error);
  int (*from_py_object)(void* object, ManagedTensor** out);
  int (*to_py_object)(ManagedTensor* tensor, void** object);
  int (*view_of_py_object)(void* object, TensorView* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};

}  // namespace hybridengine::dlpack
