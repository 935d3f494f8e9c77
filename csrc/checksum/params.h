// The checksum of bytes, see kernels/checksum.py.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace hybridengine {

struct ChecksumParams {
  const char* data;
  int64_t num_bytes;
  uint64_t* checksum;  // 0 before the call
  int num_threads;
};

HE_CPU_KERNEL(bit_checksum_cpu, ChecksumParams)

}  // namespace hybridengine
