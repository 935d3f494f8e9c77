// strided_copy on CUDA: one launch for the table, one block per chunk, 16-byte accesses where both
// sides allow them.
#include <cuda_runtime.h>

#include "strided_copy/params.h"

namespace hybridengine {

namespace {

constexpr int kThreads = 256;

template <typename T, int width>
struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) Group {
  T values[width];
};

template <typename S, typename D>
__global__ void __launch_bounds__(kThreads)
    copy_chunks(const CopyRow* rows, int64_t num_rows, const char* const* sources,
                char* const* destinations) {
  constexpr int kWidth = 16 / (sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
  const int64_t chunk = blockIdx.x;
  const CopyRow row = rows[find_row(rows, num_rows, chunk)];
  const S* src = reinterpret_cast<const S*>(sources[row.src]) + row.src_offset;
  D* dst = reinterpret_cast<D*>(destinations[row.dst]) + row.dst_offset;
  const int64_t total = num_elements(row);
  const int64_t begin = (chunk - row.first_chunk) * kChunkElements;
  const int64_t end = total < begin + kChunkElements ? total : begin + kChunkElements;
  const bool flat = row.size[0] * row.size[1] * row.size[2] == 1;
  const int64_t src_step = row.src_stride[kCopyDims - 1];
  const int64_t dst_step = row.dst_stride[kCopyDims - 1];

  if (vectors_fit(row, reinterpret_cast<const char*>(src), reinterpret_cast<const char*>(dst),
                  kWidth, sizeof(S), sizeof(D))) {
    for (int64_t i = begin + threadIdx.x * kWidth; i < end; i += kThreads * kWidth) {
      const CopySpan span = flat ? CopySpan{i, i, 0} : locate(row, i);
      const auto in = *reinterpret_cast<const Group<S, kWidth>*>(src + span.src);
      Group<D, kWidth> out;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) out.values[j] = convert<S, D>(in.values[j]);
      *reinterpret_cast<Group<D, kWidth>*>(dst + span.dst) = out;
    }
    return;
  }
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const CopySpan span = flat ? CopySpan{i * src_step, i * dst_step, 0} : locate(row, i);
    dst[span.dst] = convert<S, D>(src[span.src]);
  }
}

template <typename S, typename D>
int launch(const StridedCopyParams& params, void* stream) {
  copy_chunks<S, D><<<static_cast<unsigned>(params.num_chunks), kThreads, 0,
                      static_cast<cudaStream_t>(stream)>>>(params.rows, params.num_rows,
                                                           params.sources, params.destinations);
  return cudaGetLastError();
}

template <typename S>
int dispatch_dst(const StridedCopyParams& params, void* stream) {
  switch (params.dst_dtype) {
    case DType::f32:
      return launch<S, float>(params, stream);
    case DType::f16:
      return launch<S, f16>(params, stream);
    case DType::bf16:
      return launch<S, bf16>(params, stream);
    default:
      return launch<S, double>(params, stream);
  }
}

}  // namespace

int upload_cuda(const void* host, void* device, int64_t bytes, void* stream) {
  return cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice,
                         static_cast<cudaStream_t>(stream));
}

int strided_copy_cuda(const StridedCopyParams& params, void* stream) {
  switch (params.src_dtype) {
    case DType::f32:
      return dispatch_dst<float>(params, stream);
    case DType::f16:
      return dispatch_dst<f16>(params, stream);
    case DType::bf16:
      return dispatch_dst<bf16>(params, stream);
    case DType::f64:
      return dispatch_dst<double>(params, stream);
    case DType::raw1:
      return launch<uint8_t, uint8_t>(params, stream);
    case DType::raw2:
      return launch<uint16_t, uint16_t>(params, stream);
    case DType::raw4:
      return launch<uint32_t, uint32_t>(params, stream);
    case DType::raw8:
      return launch<uint64_t, uint64_t>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace hybridengine
