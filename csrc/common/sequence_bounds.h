// Bounds of sequences for the CUDA kernels, where cu_seqlens is not checked on the host.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

// An entry of cu_seqlens, clamped to [0, num_tokens] so that no index leaves the tensors.
HE_HOST_DEVICE int64_t bounded_entry(int64_t entry, int64_t num_tokens) {
  return entry < 0 ? 0 : entry > num_tokens ? num_tokens : entry;
}

}  // namespace hybridengine
