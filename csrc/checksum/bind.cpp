#include <ATen/ops/zeros.h>

#include "checksum/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

// data: bytes on the CPU. Returns an int64 scalar.
at::Tensor bit_checksum(const at::Tensor& data) {
  check_vector(data, "bit_checksum: data", at::kByte, data.numel());
  if (!data.device().is_cpu()) no_kernel_for(data.device(), "bit_checksum");
  at::Tensor checksum = at::zeros({}, at::TensorOptions(at::kLong));
  ChecksumParams params{};
  params.data = reinterpret_cast<const char*>(data.const_data_ptr<uint8_t>());
  params.num_bytes = data.numel();
  params.checksum = reinterpret_cast<uint64_t*>(checksum.mutable_data_ptr<int64_t>());
  params.num_threads = at::get_num_threads();
  py::gil_scoped_release no_gil;
  bit_checksum_cpu(params);
  return checksum;
}

}  // namespace

void register_checksum(py::module_& m) { m.def("bit_checksum", &bit_checksum, py::arg("data")); }

}  // namespace hybridengine
