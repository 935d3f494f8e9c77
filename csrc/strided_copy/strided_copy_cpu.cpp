// strided_copy on the CPU: threads take equal parts of all chunks, whatever the sizes of the rows.
#include "common/parallel.h"
#include "common/simd.h"
#include "common/streaming.h"
#include "common/tensor_chunks.h"
#include "strided_copy/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename S, typename D>
void copy_run(const S* src, D* dst, int64_t count) {
  if constexpr (__is_same(S, D)) {
    std::memcpy(dst, src, count * sizeof(S));
  } else if constexpr (__is_same(S, double) || __is_same(D, double)) {
    for (int64_t i = 0; i < count; ++i) dst[i] = convert<S, D>(src[i]);
  } else {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(dst + i, load(src + i));
    for (; i < count; ++i) dst[i] = convert<S, D>(src[i]);
  }
}

// As copy_run, past the caches.
template <typename S, typename D>
void stream_run(const S* src, D* dst, int64_t count) {
  if constexpr (__is_same(S, D)) {
    stream_copy(reinterpret_cast<char*>(dst), reinterpret_cast<const char*>(src),
                count * sizeof(S));
  } else {
    constexpr int64_t kBlock = 1024;
    alignas(kCacheLine) D block[kBlock];
    int64_t i = bytes_to_line(reinterpret_cast<char*>(dst)) / sizeof(D);
    copy_run(src, dst, i);
    while (i < count) {
      const int64_t size = count - i < kBlock ? count - i : kBlock;
      copy_run(src + i, block, size);
      stream_copy(reinterpret_cast<char*>(dst + i), reinterpret_cast<char*>(block),
                  size * sizeof(D));
      i += size;
    }
  }
}

template <typename S, typename D>
void copy_range(const CopyRow& row, const S* source, D* destination, int64_t begin, int64_t end,
                bool streams) {
  const int64_t src_step = row.src_stride[kCopyDims - 1];
  const int64_t dst_step = row.dst_stride[kCopyDims - 1];
  while (begin < end) {
    const CopyPlace place = locate(row, begin);
    const int64_t left = row.size[kCopyDims - 1] - place.index[kCopyDims - 1];
    const int64_t run = left < end - begin ? left : end - begin;
    const S* src = source + place.src;
    D* dst = destination + place.dst;
    if (src_step == 1 && dst_step == 1) {
      const bool is_long = run * static_cast<int64_t>(sizeof(D)) >= kMinStreamBytes;
      streams&& is_long ? stream_run(src, dst, run) : copy_run(src, dst, run);
    } else {
      for (int64_t i = 0; i < run; ++i) dst[i * dst_step] = convert<S, D>(src[i * src_step]);
    }
    begin += run;
  }
}

template <typename S, typename D>
void copy_all(const StridedCopyParams& params) {
  const int64_t bytes = params.num_chunks * kChunkElements * static_cast<int64_t>(sizeof(D));
  // Streaming half a line at a time, as AVX2 does, is slower than ordinary stores (docs/notes.md).
  const bool streams = sizeof(Line) == kCacheLine && bytes >= kStreamedBytes;
  parallel_for(params.num_chunks, 1, params.num_threads, [&](int64_t begin, int64_t end) {
    int64_t index = last_begun(params.rows, params.num_rows, begin);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (index + 1 < params.num_rows && params.rows[index + 1].first_chunk <= chunk) ++index;
      const CopyRow& row = params.rows[index];
      const int64_t first = (chunk - row.first_chunk) * kChunkElements;
      const int64_t total = num_elements(row);
      copy_range(row, reinterpret_cast<const S*>(params.sources[row.src]) + row.src_offset,
                 reinterpret_cast<D*>(params.destinations[row.dst]) + row.dst_offset, first,
                 total < first + kChunkElements ? total : first + kChunkElements, streams);
    }
    if (streams) stream_fence();
  });
}

}  // namespace

void strided_copy_cpu(const StridedCopyParams& params) {
  with_copy_types(params,
                  [&](auto src, auto dst) { copy_all<decltype(src), decltype(dst)>(params); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
