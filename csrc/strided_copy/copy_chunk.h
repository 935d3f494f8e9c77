// What one thread of the CUDA kernel copies of a chunk. Tests run it on the CPU.
#pragma once

#include <type_traits>

#include "common/words.h"
#include "strided_copy/copy_row.h"

namespace hybridengine {

// Elements that are accessed together: with 16 bytes at a time, or all of them if they have fewer.
template <typename T, int width>
struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) CopyGroup {
  T values[width];
};

template <typename S, typename D, int width>
struct Conversion {
  using Source = CopyGroup<S, width>;
  using Destination = CopyGroup<D, width>;

  static HE_HOST_DEVICE Destination of(const Source& in) {
    Destination out;
    if constexpr (sizeof(D) == 2 && width > 1) {  // two values an instruction
      HE_UNROLL
      for (int i = 0; i < width; i += 2) {
        const float pair[2] = {to_float(in.values[i]), to_float(in.values[i + 1])};
        const uint32_t word = Word<D>::pack(pair);
        memcpy(&out.values[i], &word, 4);
      }
    } else {
      HE_UNROLL
      for (int i = 0; i < width; ++i) out.values[i] = convert<S, D>(in.values[i]);
    }
    return out;
  }
};

template <typename T, int width>
struct Conversion<T, T, width> {
  using Unit = std::conditional_t<(width > 1), uint32_t, T>;  // not bytes, which would be unpacked
  using Source = CopyGroup<Unit, width * sizeof(T) / sizeof(Unit)>;
  using Destination = Source;

  static HE_HOST_DEVICE Destination of(const Source& in) { return in; }
};

// Copies groups thread, thread + threads, ... of the `count` elements that follow `start`. The
// loads of several groups are in flight before the first one is used.
template <typename S, typename D, int width>
HE_HOST_DEVICE void copy_groups(const CopyRow& row, const S* src, D* dst, const CopyPlace& start,
                                uint32_t count, uint32_t thread, uint32_t threads) {
  using Groups = Conversion<S, D, width>;
  constexpr int kLoadBytes = width * sizeof(S);
  constexpr int kGroups = kLoadBytes < 16 ? 4 : kLoadBytes < 64 ? 64 / kLoadBytes : 1;
  constexpr int kInner = kCopyDims - 1;
  // Most groups are in the run that the chunk begins in, or all of them.
  const int64_t run = row.size[kInner] - start.index[kInner];
  const int64_t src_step = row.src_stride[kInner], dst_step = row.dst_stride[kInner];
  const uint32_t step = threads * width;
  for (uint32_t at = thread * width; at < count; at += kGroups * step) {
    typename Groups::Source groups[kGroups];
    int64_t to[kGroups];
    HE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t steps = at + i * step;
      if (steps < count) {
        const CopyOffsets offsets =
            steps < run ? CopyOffsets{start.src + steps * src_step, start.dst + steps * dst_step}
                        : advance(row, start, steps);
        groups[i] = *reinterpret_cast<const typename Groups::Source*>(src + offsets.src);
        to[i] = offsets.dst;
      }
    }
    HE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      if (at + i * step < count) {
        *reinterpret_cast<typename Groups::Destination*>(dst + to[i]) = Groups::of(groups[i]);
      }
    }
  }
}

// Copies what thread `thread` of `threads` copies of a chunk of the row: in groups of 16 bytes (of
// the narrower type) where both sides are aligned to them.
template <typename S, typename D>
HE_HOST_DEVICE void copy_chunk(const CopyRow& row, const char* source, char* destination,
                               int64_t chunk, uint32_t thread, uint32_t threads) {
  constexpr int kWidth = 16 / (sizeof(S) < sizeof(D) ? sizeof(S) : sizeof(D));
  const S* src = reinterpret_cast<const S*>(source) + row.src_offset;
  D* dst = reinterpret_cast<D*>(destination) + row.dst_offset;
  const int64_t begin = (chunk - row.first_chunk) * kChunkElements;
  const int64_t left = num_elements(row) - begin;
  const auto count = static_cast<uint32_t>(left < kChunkElements ? left : kChunkElements);
  const CopyPlace start = locate(row, begin);
  if (vectors_fit(row, reinterpret_cast<const char*>(src), reinterpret_cast<const char*>(dst),
                  kWidth, sizeof(S), sizeof(D))) {
    copy_groups<S, D, kWidth>(row, src, dst, start, count, thread, threads);
  } else {
    copy_groups<S, D, 1>(row, src, dst, start, count, thread, threads);
  }
}

}  // namespace hybridengine
