#include "checksum/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

// Returns an int64 scalar on the device of `data`, bytes.
Tensor bit_checksum(Tensor data) {
  const Arguments given("bit_checksum", "data", data);
  ChecksumParams p{};
  const auto* bytes = given.data<uint8_t>("data", data, {&p.num_bytes});
  if (data.is_cuda() && reinterpret_cast<uintptr_t>(bytes) % 4) {
    data = data.call("clone");
    bytes = data.data<uint8_t>();
  }
  p.data = reinterpret_cast<const char*>(bytes);
  Tensor checksum = zeros({}, kLong, data.device());
  p.checksum = reinterpret_cast<uint64_t*>(checksum.data<int64_t>());
  given.run(p, bit_checksum_cpu, HE_CUDA(bit_checksum_cuda));
  return checksum;
}

}  // namespace

void register_checksum(py::module_& m) { def(m, "bit_checksum", &bit_checksum, "data"); }

}  // namespace hybridengine
