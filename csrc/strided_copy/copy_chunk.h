// Parts of rows for blocks of CUDA threads, and what one thread does with one. Tests run it on the
// CPU.
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

// Reads a group that nothing reads again soon: it does not displace what is in the first cache.
template <typename Group>
HE_HOST_DEVICE Group stream_load(const void* from) {
  Group group;
#ifdef __CUDA_ARCH__
  const auto* at = static_cast<const char*>(from);
  auto* to = reinterpret_cast<char*>(&group);
  constexpr int kBytes = sizeof(Group);
  if constexpr (kBytes % 16 == 0) {
    HE_UNROLL
    for (int i = 0; i < kBytes; i += 16) {
      uint4 words;
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "l"(at + i));
      memcpy(to + i, &words, 16);
    }
  } else if constexpr (kBytes == 8) {
    const uint2 words = __ldcs(reinterpret_cast<const uint2*>(at));
    memcpy(to, &words, 8);
  } else if constexpr (kBytes == 4) {
    const uint32_t word = __ldcs(reinterpret_cast<const uint32_t*>(at));
    memcpy(to, &word, 4);
  } else {
    group = *static_cast<const Group*>(from);
  }
#else
  memcpy(&group, from, sizeof(Group));
#endif
  return group;
}

// Writes a group that nothing reads soon.
template <typename Group>
HE_HOST_DEVICE void stream_store(void* to, const Group& group) {
#ifdef __CUDA_ARCH__
  const auto* from = reinterpret_cast<const char*>(&group);
  constexpr int kBytes = sizeof(Group);
  if constexpr (kBytes % 16 == 0) {
    HE_UNROLL
    for (int i = 0; i < kBytes; i += 16) {
      uint4 words;
      memcpy(&words, from + i, 16);
      __stcs(reinterpret_cast<uint4*>(static_cast<char*>(to) + i), words);
    }
  } else if constexpr (kBytes == 8) {
    uint2 words;
    memcpy(&words, from, 8);
    __stcs(static_cast<uint2*>(to), words);
  } else if constexpr (kBytes == 4) {
    uint32_t word;
    memcpy(&word, from, 4);
    __stcs(static_cast<uint32_t*>(to), word);
  } else {
    *static_cast<Group*>(to) = group;
  }
#else
  memcpy(to, &group, sizeof(Group));
#endif
}

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

// Equal runs at equal distances, of one row. Kernels read these 64 bytes and nothing else of it.
struct alignas(16) CopyChunk {
  int64_t src_offset;  // of the first element, in elements of its tensor
  int64_t dst_offset;
  int64_t src_pitch;  // from a run to the next
  int64_t dst_pitch;
  int64_t src_step;  // within a run
  int64_t dst_step;
  int32_t src;  // index of the tensor
  int32_t dst;
  int32_t block;  // as of the row
  uint16_t run;   // elements; run * runs is at most kChunkElements
  uint16_t runs;

  HE_HOST_DEVICE uint32_t count() const { return uint32_t{run} * runs; }
};
static_assert(sizeof(CopyChunk) == 64);

constexpr int64_t kFullChunk = 2048;  // elements from which a chunk keeps a block busy

// Calls emit(chunk) for the chunks of a row.
template <typename Emit>
void cut_row(const CopyRow& row, const Emit& emit) {
  constexpr int kInner = kCopyDims - 1;
  const int64_t run = row.size[kInner] < kChunkElements ? row.size[kInner] : kChunkElements;
  // Runs follow each other in the last dimension that is long enough, or else in the longest.
  int across = kInner - 1;
  while (across >= 0 && row.size[across] * run < kFullChunk) --across;
  if (across < 0) {
    across = kInner - 1;
    for (int dim = kInner - 1; dim >= 0; --dim) {
      if (row.size[dim] > row.size[across]) across = dim;
    }
  }
  int64_t step[kCopyDims] = {1, 1, 1, run}, at[kCopyDims] = {};
  step[across] = kChunkElements / run;
  CopyChunk chunk{};
  chunk.src_pitch = row.src_stride[across];
  chunk.dst_pitch = row.dst_stride[across];
  chunk.src_step = row.src_stride[kInner];
  chunk.dst_step = row.dst_stride[kInner];
  chunk.src = row.src;
  chunk.dst = row.dst;
  chunk.block = row.block;
  const auto left = [&](int dim) {
    const int64_t rest = row.size[dim] - at[dim];
    return static_cast<uint16_t>(rest < step[dim] ? rest : step[dim]);
  };
  for (at[0] = 0; at[0] < row.size[0]; at[0] += step[0]) {
    for (at[1] = 0; at[1] < row.size[1]; at[1] += step[1]) {
      for (at[2] = 0; at[2] < row.size[2]; at[2] += step[2]) {
        for (at[3] = 0; at[3] < row.size[3]; at[3] += step[3]) {
          chunk.src_offset = row.src_offset;
          chunk.dst_offset = row.dst_offset;
          for (int dim = 0; dim < kCopyDims; ++dim) {
            chunk.src_offset += at[dim] * row.src_stride[dim];
            chunk.dst_offset += at[dim] * row.dst_stride[dim];
          }
          chunk.run = left(kInner);
          chunk.runs = left(across);
          emit(chunk);
        }
      }
    }
  }
}

// Whether one side of a chunk, `first` its first element, is made of groups of `width` adjacent
// elements that can each be accessed at once.
template <typename T, int width>
HE_HOST_DEVICE bool groups_fit(const CopyChunk& chunk, const T* first, int64_t step,
                               int64_t pitch) {
  const uint64_t places = reinterpret_cast<uintptr_t>(first) |
                          (chunk.runs > 1 ? static_cast<uint64_t>(pitch) * sizeof(T) : 0);
  return step == 1 && chunk.run % width == 0 && places % (width * sizeof(T)) == 0;
}

// Calls body(group, offset of its destination) for groups thread, thread + threads, ... of a chunk
// whose first element is `src`. The loads of several groups are in flight before the first one is
// used, and the lanes of a warp load adjacent groups.
template <typename Group, int width, typename S, typename Body>
HE_HOST_DEVICE void for_each_group(const CopyChunk& chunk, const S* src, uint32_t thread,
                                   uint32_t threads, const Body& body) {
  constexpr int kGroups = 8;
  const uint32_t count = chunk.count(), step = threads * width;
  // ceil(2^32 / run): the number of an element's run is a multiplication, exact below 2^14. A run
  // of one element is the only one of its chunk.
  const uint32_t inverse = 0xFFFFFFFFu / chunk.run + 1;
  const auto offset = [&](uint32_t element, int64_t run_pitch, int64_t run_step) {
    const auto run = static_cast<uint32_t>((uint64_t{element} * inverse) >> 32);
    const uint32_t place = element - run * chunk.run;
    return run * run_pitch + (width > 1 ? place : place * run_step);
  };
  for (uint32_t at = thread * width; at < count; at += kGroups * step) {
    Group groups[kGroups];
    HE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t element = at + i * step;
      if (element < count)
        groups[i] = stream_load<Group>(src + offset(element, chunk.src_pitch, chunk.src_step));
    }
    HE_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      const uint32_t element = at + i * step;
      if (element < count) body(groups[i], offset(element, chunk.dst_pitch, chunk.dst_step));
    }
  }
}

// Copies what thread `thread` of `threads` copies of a chunk whose first elements are src and dst:
// in groups of 16 bytes (of the wider type) where both sides are aligned to them.
template <typename S, typename D>
HE_HOST_DEVICE void copy_chunk(const CopyChunk& chunk, const S* src, D* dst, uint32_t thread,
                               uint32_t threads) {
  constexpr int kWidth = 16 / (sizeof(S) > sizeof(D) ? sizeof(S) : sizeof(D));
  if (groups_fit<S, kWidth>(chunk, src, chunk.src_step, chunk.src_pitch) &&
      groups_fit<D, kWidth>(chunk, dst, chunk.dst_step, chunk.dst_pitch)) {
    using Groups = Conversion<S, D, kWidth>;
    for_each_group<typename Groups::Source, kWidth>(
        chunk, src, thread, threads, [&](const typename Groups::Source& group, int64_t to) {
          stream_store(dst + to, Groups::of(group));
        });
  } else {
    for_each_group<CopyGroup<S, 1>, 1>(chunk, src, thread, threads,
                                       [&](const CopyGroup<S, 1>& group, int64_t to) {
                                         dst[to] = convert<S, D>(group.values[0]);
                                       });
  }
}

}  // namespace hybridengine
