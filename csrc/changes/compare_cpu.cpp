// mark_changed on the CPU: casts a tile into the cache, compares it with what was sent a word of
// the mask at a time, and writes back the words that differ.
#include "changes/params.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kTile = 2048;
constexpr int64_t kGrain = 512;  // words of a thread, at least
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

// A bit for each of the `count` elements that differ.
uint32_t differing(const uint16_t* now, const uint16_t* then, int64_t count) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; ++i) bits |= uint32_t{now[i] != then[i]} << i;
  return bits;
}

// The same for all elements of a word.
HE_SIMD uint32_t differing(const uint16_t* now, const uint16_t* then) {
#if defined(__AVX512BW__)
  return _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(now), _mm512_loadu_si512(then));
#elif defined(__AVX2__)
  const auto load = [](const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  };
  const __m256i low = _mm256_cmpeq_epi16(load(now), load(then));
  const __m256i high = _mm256_cmpeq_epi16(load(now + 16), load(then + 16));
  // Lanes of 128 bits are packed each for itself: low, high, low, high.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(packed));
#else
  return std::memcmp(now, then, kMaskBits * sizeof *now) ? differing(now, then, kMaskBits) : 0;
#endif
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
    uint32_t bits[kTile / kMaskBits];
    int changed[kTile / kMaskBits], num_changed = 0;  // words, without a branch: it is mispredicted
    const int num_words = static_cast<int>(num_mask_words(count));
    for (int i = 0; i < num_words; ++i) {
      const int64_t first = i * kMaskBits, size = count - first;
      bits[i] = size >= kMaskBits ? differing(now + first, then + first)
                                  : differing(now + first, then + first, size);
      changed[num_changed] = i;
      num_changed += bits[i] != 0;
    }
    for (int k = 0; k < num_changed; ++k) {
      const int64_t first = changed[k] * kMaskBits, left = count - first;
      p.mask[at / kMaskBits + changed[k]] |= bits[changed[k]];
      std::memcpy(then + first, now + first,
                  (left < kMaskBits ? left : kMaskBits) * sizeof(uint16_t));
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

}  // namespace

void mark_changed_cpu(const CompareParams& p) {
  with_float64(p.current_dtype, [&](auto current) {
    using S = decltype(current);
    p.sent_dtype == DType::bf16 ? compare<S, bf16>(p) : compare<S, f16>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
