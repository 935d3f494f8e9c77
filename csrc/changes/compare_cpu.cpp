// mark_changed on the CPU: casts a tile into the cache, compares it with what was sent a word of
// the mask at a time, and writes back the words that differ.
#include "changes/params.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kTile = 2048;
constexpr int64_t kGrain = 512;  // words of a thread, at least
constexpr int kPacked = 4;       // elements in 64 bits
static_assert(kTile % kMaskBits == 0);

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

// Whether any of the elements of one word differ.
HE_SIMD bool differ(const uint16_t* now, const uint16_t* then) {
  constexpr int kWords = kMaskBits / kPacked;
  uint64_t a[kWords], b[kWords], any = 0;
  std::memcpy(a, now, sizeof a);
  std::memcpy(b, then, sizeof b);
  for (int i = 0; i < kWords; ++i) any |= a[i] ^ b[i];
  return any != 0;
}

// A bit for each of the elements that differ. Apart from the loop that finds none in most words.
__attribute__((noinline)) uint32_t differing(const uint16_t* now, const uint16_t* then,
                                             int64_t count) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= uint32_t{now[i] != then[i]} << i;
  return bits;
}

template <typename S, typename D>
void compare_range(const CompareParams& p, int64_t begin, int64_t end) {
  const S* current = static_cast<const S*>(p.current);
  auto* sent = static_cast<uint16_t*>(p.sent);
  D tile[kTile];
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = end - at < kTile ? end - at : kTile;
    const auto* now = reinterpret_cast<const uint16_t*>(cast_tile(current + at, tile, count));
    uint16_t* then = sent + at;
    for (int64_t i = 0; i < count; i += kMaskBits) {
      const int64_t size = count - i < kMaskBits ? count - i : kMaskBits;
      if (size == kMaskBits && !differ(now + i, then + i)) continue;
      const uint32_t bits = differing(now + i, then + i, size);
      if (!bits) continue;
      p.mask[(at + i) / kMaskBits] |= bits;
      std::memcpy(then + i, now + i, size * sizeof(uint16_t));
    }
  }
}

template <typename S, typename D>
void compare(const CompareParams& p) {
  parallel_for(num_mask_words(p.numel), kGrain, p.num_threads, [&](int64_t first, int64_t last) {
    const int64_t end = last * kMaskBits;
    compare_range<S, D>(p, first * kMaskBits, end < p.numel ? end : p.numel);
  });
}

template <typename S>
void dispatch_sent(const CompareParams& p) {
  if (p.sent_dtype == DType::bf16) return compare<S, bf16>(p);
  compare<S, f16>(p);
}

}  // namespace

void mark_changed_cpu(const CompareParams& p) {
  switch (p.current_dtype) {
    case DType::f32:
      return dispatch_sent<float>(p);
    case DType::f16:
      return dispatch_sent<f16>(p);
    case DType::bf16:
      return dispatch_sent<bf16>(p);
    default:
      return dispatch_sent<double>(p);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
