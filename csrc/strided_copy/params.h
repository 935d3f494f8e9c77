// strided_copy: dst[row slice] = cast(src[row slice]) for every row of a table of strided slices.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "strided_copy/copy_chunk.h"

namespace hybridengine {

struct StridedCopyParams {
  const CopyRow* rows;         // CPU only: coalesced, with chunk numbers
  const CopyChunk* chunks;     // CUDA only, on the device
  const char* const* sources;  // first element of each tensor; arrays on the device that copies
  char* const* destinations;
  int64_t num_rows;
  int64_t num_chunks;  // CPU: of about kChunkElements each; CUDA: of `chunks`
  DType src_dtype;
  DType dst_dtype;
  int num_threads;
};

HE_CPU_KERNEL(strided_copy_cpu, StridedCopyParams)

// Both return a cudaError_t.
int strided_copy_cuda(const StridedCopyParams& params, void* stream);

// Calls body(S{}, D{}) for the types of source and destination, which differ, or are one raw type.
template <typename Body>
void with_copy_types(const StridedCopyParams& params, const Body& body) {
  switch (params.src_dtype) {
    case DType::raw1:
      return body(uint8_t{}, uint8_t{});
    case DType::raw2:
      return body(uint16_t{}, uint16_t{});
    case DType::raw4:
      return body(uint32_t{}, uint32_t{});
    case DType::raw8:
      return body(uint64_t{}, uint64_t{});
    default:
      return with_float64(params.src_dtype, [&](auto src) {
        return with_float64(params.dst_dtype, [&](auto dst) {
          if constexpr (!__is_same(decltype(src), decltype(dst))) body(src, dst);
        });
      });
  }
}

}  // namespace hybridengine
