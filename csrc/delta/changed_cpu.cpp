// changed_elements on the CPU: casts a tile into the cache, compares it with what was sent, and
// collects and writes back the blocks that differ. Threads take contiguous parts, in order.
#include <cstdlib>

#include "common/parallel.h"
#include "common/simd.h"
#include "delta/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kTile = 2048;
constexpr int64_t kBlock = 32;
constexpr int64_t kWord = 4;  // elements that are compared at once in a block that differs

template <typename S, typename D>
const D* cast_tile(const S* source, D* tile, int64_t count) {
  if constexpr (__is_same(S, D)) {
    return source;
  } else if constexpr (__is_same(S, double)) {
    for (int64_t i = 0; i < count; ++i) tile[i] = convert<S, D>(source[i]);
  } else {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(tile + i, load(source + i));
    for (; i < count; ++i) tile[i] = convert<S, D>(source[i]);
  }
  return tile;
}

bool differ(const uint16_t* a, const uint16_t* b) {
  uint64_t words[2][kBlock / 4];
  std::memcpy(words[0], a, sizeof words[0]);
  std::memcpy(words[1], b, sizeof words[1]);
  uint64_t different = 0;
  for (int64_t i = 0; i < kBlock / 4; ++i) different |= words[0][i] ^ words[1][i];
  return different != 0;
}

// Not a std::vector: its functions could be shared with a file of a wider instruction set.
template <typename Index>
void make_room(ChangedPart& part, int64_t room) {
  if (room <= part.room) return;
  part.room = room > 2 * part.room ? room : 2 * part.room;
  part.indices = std::realloc(part.indices, part.room * sizeof(Index));
  part.values = static_cast<uint16_t*>(std::realloc(part.values, part.room * sizeof(uint16_t)));
  if (!part.indices || !part.values) std::abort();
}

// Adds the changes of one block, whose first element has number `first`, to the part.
template <typename Index>
void collect(const uint16_t* now, const uint16_t* then, int64_t size, int64_t first,
             int64_t capacity, ChangedPart& part) {
  if (part.count >= capacity) {
    for (int64_t i = 0; i < size; ++i) part.count += now[i] != then[i];
    return;
  }
  if (part.count + size > part.room) make_room<Index>(part, part.count + kTile);
  Index* index = static_cast<Index*>(part.indices) + part.count;
  uint16_t* value = part.values + part.count;
  int64_t found = 0;
  for (int64_t i = 0; i < size; i += kWord) {
    const int64_t end = size - i < kWord ? size : i + kWord;
    if (end - i == kWord && !std::memcmp(now + i, then + i, sizeof(uint64_t))) continue;
    for (int64_t j = i; j < end; ++j) {
      index[found] = static_cast<Index>(first + j);
      value[found] = now[j];
      found += now[j] != then[j];
    }
  }
  part.count += found;
}

template <typename S, typename D, typename Index>
void compare_range(const ChangedElementsParams& params, int64_t begin, int64_t end,
                   ChangedPart& part) {
  const S* current = static_cast<const S*>(params.current);
  uint16_t* sent = static_cast<uint16_t*>(params.sent);
  D tile[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = end - at < kTile ? end - at : kTile;
    const auto* now = reinterpret_cast<const uint16_t*>(cast_tile(current + at, tile, count));
    uint16_t* then = sent + at;
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t size = count - i < kBlock ? count - i : kBlock;
      if (size == kBlock && !differ(now + i, then + i)) continue;
      collect<Index>(now + i, then + i, size, at + i, params.capacity, part);
      std::memcpy(then + i, now + i, size * sizeof(uint16_t));
    }
  }
}

template <typename S, typename D>
void compare(const ChangedElementsParams& params) {
  const int64_t parts = params.num_threads;
  parallel_for(parts, 1, params.num_threads, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = params.size * part / parts, end = params.size * (part + 1) / parts;
      if (params.wide) {
        compare_range<S, D, int64_t>(params, begin, end, params.parts[part]);
      } else {
        compare_range<S, D, int32_t>(params, begin, end, params.parts[part]);
      }
    }
  });
}

template <typename S>
void dispatch_sent(const ChangedElementsParams& params) {
  if (params.sent_dtype == DType::bf16) return compare<S, bf16>(params);
  compare<S, f16>(params);
}

}  // namespace

void changed_elements_cpu(const ChangedElementsParams& params) {
  switch (params.current_dtype) {
    case DType::f32:
      return dispatch_sent<float>(params);
    case DType::f16:
      return dispatch_sent<f16>(params);
    case DType::bf16:
      return dispatch_sent<bf16>(params);
    default:
      return dispatch_sent<double>(params);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
