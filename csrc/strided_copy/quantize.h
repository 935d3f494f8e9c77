// Quantization to float8_e4m3fn in blocks, of slices that each lie in one block: the largest
// magnitude of every block, then dst[slice] = e4m3(engine_dtype(src[slice]) * (1 / scale[block])).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/float8.h"
#include "common/isa.h"
#include "strided_copy/copy_row.h"

namespace hybridengine {

struct QuantizeParams {
  const CopyRow* rows;         // of one chunk each; on the device of the tensors
  const char* const* sources;  // first element of each tensor; arrays on that device
  char* const* destinations;   // null to find the largest magnitudes
  int64_t num_rows;
  int32_t* absmax;  // by block: bits of a float32, whose order is that of the magnitudes, NaN last
  const float* scale;  // by block
  DType src_dtype;     // float32, float16 or bfloat16
  DType engine_dtype;  // values are rounded to it first
  int num_threads;
};

HE_CPU_KERNEL(block_absmax_cpu, QuantizeParams)
HE_CPU_KERNEL(block_quantize_cpu, QuantizeParams)

// Both return a cudaError_t.
int block_absmax_cuda(const QuantizeParams& params, void* stream);
int block_quantize_cuda(const QuantizeParams& params, void* stream);

// The value that the engine would hold without quantization.
template <typename S, typename E>
HE_HOST_DEVICE float engine_value(S value) {
  return to_float(convert<S, E>(value));
}

HE_HOST_DEVICE uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7FFFFFFFu; }

// Calls body(S, E) with values of the source's and the engine's type.
template <typename Body>
auto by_dtypes(const QuantizeParams& p, const Body& body) {
  return with_float(p.src_dtype, [&](auto source) {
    return with_float(p.engine_dtype, [&](auto engine) { return body(source, engine); });
  });
}

}  // namespace hybridengine
