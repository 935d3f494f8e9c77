// The checksum of bytes, see kernels/checksum.py: the sum of w[i] x[i] modulo 2^64 over 32-bit
// words, with w[0] = 2^32 + 1 and w[i] = 2 i - 1.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/isa.h"

namespace hybridengine {

struct ChecksumParams {
  const char* data;  // aligned to 4 bytes on CUDA
  int64_t num_bytes;
  uint64_t* checksum;  // 0 before the call
  int num_threads;
};

// What word 0 adds to its share of the sum of (2 i - 1) x[i].
constexpr uint64_t kFirstWord = (uint64_t{1} << 32) + 2;

HE_HOST_DEVICE uint64_t weighted(int64_t i, uint64_t x) {
  return (2 * static_cast<uint64_t>(i) - 1) * x;
}

HE_CPU_KERNEL(bit_checksum_cpu, ChecksumParams)
// Returns a cudaError_t.
int bit_checksum_cuda(const ChecksumParams& params, void* stream);

}  // namespace hybridengine
