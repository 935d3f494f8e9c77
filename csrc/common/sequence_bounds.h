// Where sequences begin and end, for the CUDA kernels: nobody has checked cu_seqlens there.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

// An entry of cu_seqlens, moved into [0, num_tokens]: a wrong one must not lead out of the tensors.
HE_HOST_DEVICE int64_t bounded_entry(int64_t entry, int64_t num_tokens) {
  return entry < 0 ? 0 : entry > num_tokens ? num_tokens : entry;
}

}  // namespace hybridengine
