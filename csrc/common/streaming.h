// Non-temporal copies and fills. An ordinary store reads a cache line before it overwrites it,
// which is a third more traffic for a copy. For results that are too large to stay in the cache.
// Included only by *_cpu.cpp files.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hybridengine::HYBRIDENGINE_ISA {

#if defined(__AVX512F__)
typedef __m512i Line;
static inline void stream(char* p, Line v) { _mm512_stream_si512(reinterpret_cast<Line*>(p), v); }
#elif defined(__AVX2__)
typedef __m256i Line;
static inline void stream(char* p, Line v) { _mm256_stream_si256(reinterpret_cast<Line*>(p), v); }
#elif defined(__x86_64__)
typedef __m128i Line;
static inline void stream(char* p, Line v) { _mm_stream_si128(reinterpret_cast<Line*>(p), v); }
#else
typedef uint64_t Line;
static inline void stream(char* p, Line v) { std::memcpy(p, &v, sizeof v); }
#endif

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMinStreamBytes = 512;      // bytes; shorter copies are mostly unaligned ends
constexpr int64_t kStreamedBytes = 16 << 20;  // results of this size bypass the caches

// Call once per thread after its last streaming store, to order it before later stores.
static inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

static inline int64_t bytes_to_line(const char* p) {
  return -reinterpret_cast<intptr_t>(p) & (kCacheLine - 1);
}

static inline void stream_copy(char* destination, const char* source, int64_t bytes) {
  int64_t i = bytes_to_line(destination);
  std::memcpy(destination, source, i);
  for (; i + kCacheLine <= bytes; i += kCacheLine) {
    Line lines[kCacheLine / sizeof(Line)];
    std::memcpy(lines, source + i, kCacheLine);
    for (uint64_t j = 0; j < kCacheLine / sizeof(Line); ++j)
      stream(destination + i + j * sizeof(Line), lines[j]);
  }
  std::memcpy(destination + i, source + i, bytes - i);
}

static inline void stream_zeros(char* destination, int64_t bytes) {
  int64_t i = bytes_to_line(destination);
  std::memset(destination, 0, i);
  for (; i + kCacheLine <= bytes; i += sizeof(Line)) stream(destination + i, Line{});
  std::memset(destination + i, 0, bytes - i);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
