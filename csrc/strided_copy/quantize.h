// Quantization to float8_e4m3fn in blocks. Of slices that each lie in one block: the largest
// magnitude of every block, then dst[slice] = e4m3(engine_dtype(src[slice]) * (1 / scale[block])).
// Of contiguous matrices: both in one read.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/float8.h"
#include "common/isa.h"
#include "strided_copy/copy_chunk.h"

namespace hybridengine {

struct QuantizeParams {
  const CopyRow* rows;         // CPU only
  const CopyChunk* chunks;     // CUDA only, on the device
  const char* const* sources;  // first element of each tensor; arrays on the device of the tensors
  char* const* destinations;   // null to find the largest magnitudes
  int64_t num_rows;
  int64_t num_chunks;
  int32_t* absmax;  // by block: bits of a float32, whose order is that of the magnitudes, NaN last
  const float* scale;  // by block
  DType src_dtype;     // float32, float16 or bfloat16
  DType engine_dtype;  // values are rounded to it first
  int num_threads;
};

constexpr int kQuantizeBlock = 128;  // rows and columns

struct QuantizeMatricesParams {
  const void* weight;  // [matrices, rows, columns], not empty
  uint8_t* quantized;  // the same shape
  float* scale;        // [matrices, blocks of rows, blocks of columns]
  int64_t matrices;
  int64_t rows;
  int64_t columns;
  DType dtype;  // float32, float16 or bfloat16
  int num_threads;
};

HE_CPU_KERNEL(block_absmax_cpu, QuantizeParams)
HE_CPU_KERNEL(block_quantize_cpu, QuantizeParams)
HE_CPU_KERNEL(quantize_matrices_cpu, QuantizeMatricesParams)

// All return a cudaError_t.
int block_absmax_cuda(const QuantizeParams& params, void* stream);
int block_quantize_cuda(const QuantizeParams& params, void* stream);
int quantize_matrices_cuda(const QuantizeMatricesParams& params, void* stream);

inline int64_t num_blocks(const QuantizeMatricesParams& p) {
  return p.matrices * ((p.rows + kQuantizeBlock - 1) / kQuantizeBlock) *
         ((p.columns + kQuantizeBlock - 1) / kQuantizeBlock);
}

// Block `number`: the offset of its first element, and its size, which is smaller at the edges.
struct MatrixBlock {
  int64_t offset;
  int rows;
  int columns;
};

HE_HOST_DEVICE MatrixBlock matrix_block(const QuantizeMatricesParams& p, uint32_t number) {
  const auto down = static_cast<uint32_t>((p.rows + kQuantizeBlock - 1) / kQuantizeBlock);
  const auto across = static_cast<uint32_t>((p.columns + kQuantizeBlock - 1) / kQuantizeBlock);
  const uint32_t line = number / across;
  const int64_t row = int64_t{line % down} * kQuantizeBlock,
                column = int64_t{number % across} * kQuantizeBlock;
  const int64_t rows = p.rows - row, columns = p.columns - column;
  return {(line / down * p.rows + row) * p.columns + column,
          static_cast<int>(rows < kQuantizeBlock ? rows : kQuantizeBlock),
          static_cast<int>(columns < kQuantizeBlock ? columns : kQuantizeBlock)};
}

// The scale of a block whose largest magnitude has these bits. Torch divides by a number on CUDA by
// multiplying with its inverse.
HE_HOST_DEVICE float block_scale(uint32_t absmax) {
  const float largest = float_of(absmax) < 1e-4f ? 1e-4f : float_of(absmax);
#ifdef __CUDA_ARCH__
  return largest * (1.0f / kE4m3Max);
#else
  return largest / kE4m3Max;
#endif
}

// The value that the engine would hold without quantization.
template <typename S, typename E>
HE_HOST_DEVICE float engine_value(S value) {
  return to_float(convert<S, E>(value));
}

HE_HOST_DEVICE uint32_t magnitude_bits(float value) { return bits_of(value) & 0x7FFFFFFFu; }

// Calls body(S, E) with values of the source's type and of the engine's, or twice with the source's
// where nothing is rounded: float32 holds every value.
template <typename Body>
auto by_dtypes(const QuantizeParams& p, const Body& body) {
  return with_float(p.src_dtype, [&](auto source) {
    using S = decltype(source);
    if constexpr (!__is_same(S, bf16)) {
      if (p.engine_dtype == DType::bf16) return body(source, bf16{});
    }
    if constexpr (!__is_same(S, f16)) {
      if (p.engine_dtype == DType::f16) return body(source, f16{});
    }
    return body(source, source);
  });
}

}  // namespace hybridengine
