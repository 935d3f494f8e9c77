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
void copy_elements(const S* src, int64_t src_step, D* dst, int64_t dst_step, int64_t count,
                   bool streams) {
  if (src_step == 1 && dst_step == 1) {
    const bool is_long = count * static_cast<int64_t>(sizeof(D)) >= kMinStreamBytes;
    streams&& is_long ? stream_run(src, dst, count) : copy_run(src, dst, count);
  } else {
    for (int64_t i = 0; i < count; ++i) dst[i * dst_step] = convert<S, D>(src[i * src_step]);
  }
}

// Calls body(place, number, count) for the runs of elements [begin, end) along the last dimension;
// number: of the first element of the run, counted from begin.
template <typename Body>
void for_each_run(const CopyRow& row, int64_t begin, int64_t end, const Body& body) {
  for (int64_t at = begin; at < end;) {
    const CopyPlace place = locate(row, at);
    const int64_t left = row.size[kCopyDims - 1] - place.index[kCopyDims - 1];
    const int64_t count = left < end - at ? left : end - at;
    body(place, at - begin, count);
    at += count;
  }
}

// Copies elements [begin, end) of the rows of a group, which read the same; `last` is its last row.
template <typename S, typename D>
void copy_group(const StridedCopyParams& params, const CopyRow* last, int64_t begin, int64_t end,
                bool streams) {
  constexpr int kInner = kCopyDims - 1;
  const auto source = [&](const CopyRow& row) {
    return reinterpret_cast<const S*>(params.sources[row.src]) + row.src_offset;
  };
  const auto destination = [&](const CopyRow& row) {
    return reinterpret_cast<D*>(params.destinations[row.dst]) + row.dst_offset;
  };
  if (last->group == 1) {
    for_each_run(*last, begin, end, [&](const CopyPlace& place, int64_t, int64_t count) {
      copy_elements(source(*last) + place.src, last->src_stride[kInner],
                    destination(*last) + place.dst, last->dst_stride[kInner], count, streams);
    });
    return;
  }
  constexpr int64_t kBlock = 2048;  // elements, converted once for all rows
  alignas(kCacheLine) D block[kBlock];
  for (; begin < end; begin += kBlock) {
    const int64_t stop = end - begin < kBlock ? end : begin + kBlock;
    for_each_run(*last, begin, stop, [&](const CopyPlace& place, int64_t number, int64_t count) {
      copy_elements(source(*last) + place.src, last->src_stride[kInner], block + number, 1, count,
                    false);
    });
    for (const CopyRow* row = last; row > last - last->group; --row) {
      for_each_run(*row, begin, stop, [&](const CopyPlace& place, int64_t number, int64_t count) {
        copy_elements(block + number, 1, destination(*row) + place.dst, row->dst_stride[kInner],
                      count, streams);
      });
    }
  }
}

// Copies chunk `number` of `count` of a band of several groups; `last` is its last row.
template <typename S, typename D>
void copy_band(const StridedCopyParams& params, const CopyRow* last, int64_t number, int64_t count,
               bool streams) {
  const int64_t stop = last->runs * (number + 1) / count;
  for (int64_t run = last->runs * number / count; run < stop; ++run) {
    for (const CopyRow* row = last - last->band + 1; row <= last; ++row) {
      if (row < last && row[1].group > 1) continue;  // not the last of its group
      const int64_t length = num_elements(*row) / last->runs;
      copy_group<S, D>(params, row, run * length, (run + 1) * length, streams);
    }
  }
}

template <typename S, typename D>
void copy_all(const StridedCopyParams& params) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < params.num_rows; ++i)
    bytes += num_elements(params.rows[i]) * static_cast<int64_t>(sizeof(D));
  // Streaming half a line at a time, as AVX2 does, is slower than ordinary stores (docs/notes.md).
  const bool streams = sizeof(Line) == kCacheLine && bytes >= kStreamedBytes;
  parallel_for(params.num_chunks, 1, params.num_threads, [&](int64_t begin, int64_t end) {
    int64_t index = last_begun(params.rows, params.num_rows, begin);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      while (index + 1 < params.num_rows && params.rows[index + 1].first_chunk <= chunk) ++index;
      const CopyRow* last = params.rows + index;
      if (last->band > last->group) {
        const int64_t end_of_band =
            index + 1 < params.num_rows ? last[1].first_chunk : params.num_chunks;
        copy_band<S, D>(params, last, chunk - last->first_chunk, end_of_band - last->first_chunk,
                        streams);
        continue;
      }
      const int64_t first = (chunk - last->first_chunk) * kChunkElements;
      const int64_t total = num_elements(*last);
      copy_group<S, D>(params, last, first,
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
