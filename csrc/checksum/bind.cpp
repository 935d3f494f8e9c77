
#include "checksum/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

// Returns an int64 scalar on the device of `data`, bytes.
Tensor bit_checksum(Tensor data) {
  constexpr const char* kOp = "bit_checksum";
  check_vector(data, "bit_checksum: data", kByte, data.numel());
  const Device device = data.device();
  Tensor checksum = zeros({}, kLong, device);
  ChecksumParams params{};
  params.num_bytes = data.numel();
  params.checksum = reinterpret_cast<uint64_t*>(checksum.data<int64_t>());
  params.num_threads = get_num_threads();
  params.data = reinterpret_cast<const char*>(data.data<uint8_t>());
  if (device.is_cpu()) {
    without_gil([&] { bit_checksum_cpu(params); });
    return checksum;
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    const DeviceGuard guard(device);
    if (reinterpret_cast<uintptr_t>(params.data) % 4) {
      data = data.call("clone");
      params.data = reinterpret_cast<const char*>(data.data<uint8_t>());
    }
    check_cuda(bit_checksum_cuda(params, current_stream(device)), kOp);
    return checksum;
  }
#endif
  no_kernel_for(device, kOp);
}

}  // namespace

void register_checksum(py::module_& m) { m.def("bit_checksum", &bit_checksum, py::arg("data")); }

}  // namespace hybridengine
