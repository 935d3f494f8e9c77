// Packing on the CPU: rows are moved as runs of consecutive source rows; large results bypass the
// caches.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/parallel.h"
#include "common/streaming.h"
#include "packing/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {
namespace {

constexpr int64_t kLayoutGrain = 16384;     // mask elements per task
constexpr int64_t kMoveGrainBytes = 65536;  // bytes per task

template <typename Mask>
int64_t count_row(const Mask* row, int64_t seqlen) {
  int64_t tokens = 0;
  for (int64_t l = 0; l < seqlen; ++l) tokens += row[l] != 0;
  return tokens;
}

// Writes one padded row as runs of unmasked and of masked tokens: real masks have very few runs.
template <typename Mask>
void layout_row(const PackLayoutParams& p, int64_t b, int64_t first) {
  const Mask* row = static_cast<const Mask*>(p.mask) + b * p.mask_row_stride;
  int64_t* inverse = p.inverse + b * p.seqlen;
  int64_t position = 0;
  for (int64_t l = 0; l < p.seqlen;) {
    const bool unmasked = row[l] != 0;
    int64_t end = l + 1;
    while (end < p.seqlen && (row[end] != 0) == unmasked) ++end;
    const int64_t out = first + position;
    const int64_t fits = unmasked ? std::clamp<int64_t>(p.capacity - out, 0, end - l) : 0;
    for (int64_t i = 0; i < fits; ++i) p.indices[out + i] = b * p.seqlen + l + i;
    for (int64_t i = 0; i < fits; ++i) p.position_ids[out + i] = position + i;
    for (int64_t i = 0; i < fits; ++i) inverse[l + i] = out + i;
    for (int64_t i = l + fits; i < end; ++i) inverse[i] = -1;
    if (unmasked) position += end - l;
    l = end;
  }
}

template <typename Mask>
void count_rows(const PackLayoutParams& p) {
  const int64_t grain = std::max<int64_t>(1, kLayoutGrain / std::max<int64_t>(1, p.seqlen));
  parallel_for(p.batch, grain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      p.counts[b] = count_row(static_cast<const Mask*>(p.mask) + b * p.mask_row_stride, p.seqlen);
  });
}

template <typename Mask>
void layout_rows(const PackLayoutParams& p) {
  p.starts[0] = 0;
  for (int64_t b = 0; b < p.batch; ++b) p.starts[b + 1] = p.starts[b] + p.counts[b];
  for (int64_t b = 0; b <= p.batch; ++b)
    p.cu_seqlens[b] = static_cast<int32_t>(std::min(p.starts[b], p.capacity));
  const int64_t total = p.starts[p.batch];
  *p.num_dropped = std::max<int64_t>(0, total - p.capacity);
  const int64_t grain = std::max<int64_t>(1, kLayoutGrain / std::max<int64_t>(1, p.seqlen));
  parallel_for(p.batch, grain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) layout_row<Mask>(p, b, p.starts[b]);
  });
  for (int64_t t = total; t < p.capacity; ++t) p.indices[t] = -1, p.position_ids[t] = 0;
}

// Consecutive destination rows whose source rows are consecutive too, or are all the fill (-1).
struct Run {
  int64_t row, source, length;
};

int64_t source_row(const MoveRowsParams& p, int64_t t, int shift) {
  if (shift == 0) return p.index[t];
  const int64_t next = t + 1;
  return next < p.rows && p.position_ids[next] != 0 ? p.index[next] : -1;
}

void collect_runs(const MoveRowsParams& p, int64_t begin, int64_t end, int shift,
                  std::vector<Run>& runs) {
  runs.clear();
  for (int64_t t = begin; t < end;) {
    const int64_t source = source_row(p, t, shift);
    const bool inside = source >= 0 && source < p.source_rows;
    const int64_t step = inside;
    int64_t stop = t + 1;
    while (stop < end && source_row(p, stop, shift) == source + step * (stop - t)) ++stop;
    const int64_t last = source + step * (stop - t - 1);
    const bool valid = last < p.source_rows && source >= -1;
    if (!valid) __atomic_store_n(p.bad_index, last, __ATOMIC_RELAXED);  // of any thread
    runs.push_back({t, valid ? source : -1, stop - t});
    t = stop;
  }
}

template <typename T>
void fill_as(char* destination, int64_t bytes, uint64_t bits) {
  const T value = static_cast<T>(bits);
  for (int64_t i = 0; i < bytes; i += sizeof(T)) std::memcpy(destination + i, &value, sizeof(T));
}

void fill(char* destination, int64_t bytes, uint64_t bits, int element_size, bool streamed) {
  if (bits == 0 && streamed && bytes >= kMinStreamBytes)
    stream_zeros(destination, bytes);
  else if (bits == 0)
    std::memset(destination, 0, bytes);
  else if (element_size == 1)
    fill_as<uint8_t>(destination, bytes, bits);
  else if (element_size == 2)
    fill_as<uint16_t>(destination, bytes, bits);
  else if (element_size == 4)
    fill_as<uint32_t>(destination, bytes, bits);
  else
    fill_as<uint64_t>(destination, bytes, bits);
}

// Rows of 1 to 8 bytes in short runs: a call to memcpy would cost more than the row.
template <int kBytes>
void copy_narrow(char* destination, const char* source, int64_t rows, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i)
    std::memcpy(destination + i * kBytes, source + i * stride, kBytes);
}

void copy_bytes(char* destination, const char* source, int64_t bytes, bool streamed) {
  if (streamed && bytes >= kMinStreamBytes)
    stream_copy(destination, source, bytes);
  else
    std::memcpy(destination, source, bytes);
}

void copy_rows(char* destination, const char* source, int64_t rows, int64_t stride,
               int64_t row_bytes, bool streamed) {
  const bool contiguous = stride == row_bytes;
  if (contiguous && (rows > 16 || row_bytes > 8)) {
    copy_bytes(destination, source, rows * row_bytes, streamed);
  } else if (row_bytes == 8) {
    copy_narrow<8>(destination, source, rows, stride);
  } else if (row_bytes == 4) {
    copy_narrow<4>(destination, source, rows, stride);
  } else if (row_bytes == 2) {
    copy_narrow<2>(destination, source, rows, stride);
  } else if (row_bytes == 1) {
    copy_narrow<1>(destination, source, rows, stride);
  } else {
    for (int64_t i = 0; i < rows; ++i)
      copy_bytes(destination + i * row_bytes, source + i * stride, row_bytes, streamed);
  }
}

bool is_streamed(const MoveRowsParams& p, const RowTensor& tensor) {
  // Streaming half a line at a time, as AVX2 does, is slower than ordinary stores (docs/notes.md).
  return sizeof(Line) == kCacheLine && p.rows * tensor.row_bytes >= kStreamedBytes;
}

void move_run(const MoveRowsParams& p, const RowTensor& tensor, const Run& run, bool streamed) {
  char* destination = tensor.destination + run.row * tensor.row_bytes;
  if (run.source < 0) {
    fill(destination, run.length * tensor.row_bytes, tensor.fill, tensor.element_size, streamed);
    return;
  }
  for (int64_t done = 0; done < run.length;) {  // one outer index of the source at a time
    const int64_t outer = (run.source + done) / p.source_inner;
    const int64_t inner = (run.source + done) - outer * p.source_inner;
    const int64_t rows = std::min(run.length - done, p.source_inner - inner);
    copy_rows(destination + done * tensor.row_bytes,
              tensor.source + outer * tensor.outer_stride + inner * tensor.inner_stride, rows,
              tensor.inner_stride, tensor.row_bytes, streamed);
    done += rows;
  }
}

}  // namespace

void pack_count_cpu(const PackLayoutParams& p) {
  with_mask_type(p, [&](auto element) { count_rows<decltype(element)>(p); });
}

void pack_layout_cpu(const PackLayoutParams& p) {
  with_mask_type(p, [&](auto element) { layout_rows<decltype(element)>(p); });
}

void move_rows_cpu(const MoveRowsParams& p) {
  int64_t row_bytes = 1;
  for (int i = 0; i < p.num_tensors; ++i) row_bytes += p.tensors[i].row_bytes;
  const int64_t grain = std::max<int64_t>(1, kMoveGrainBytes / row_bytes);
  parallel_for(p.rows, grain, p.num_threads, [&](int64_t begin, int64_t end) {
    std::vector<Run> runs;
    for (int shift = 0; shift <= 1; ++shift) {
      bool collected = false;
      for (int i = 0; i < p.num_tensors; ++i) {
        if (p.tensors[i].shift != shift) continue;
        if (!collected) collect_runs(p, begin, end, shift, runs);
        collected = true;
        for (const Run& run : runs) move_run(p, p.tensors[i], run, is_streamed(p, p.tensors[i]));
      }
    }
    stream_fence();
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
