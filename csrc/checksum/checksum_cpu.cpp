// The sum is one modulo 2^64, so threads may add their parts in any order.
#include <cstring>

#include "checksum/word_sums.h"
#include "common/parallel.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int kLoads = 2;
constexpr int64_t kGrain = 1 << 16;  // words of a thread, at least

uint32_t word_at(const char* data, int64_t i, int64_t num_bytes = sizeof(uint32_t)) {
  uint32_t word = 0;
  std::memcpy(&word, data + i * sizeof word, num_bytes);
  return word;
}

// The sum of (2 i - 1) x[i] over words [begin, end).
uint64_t sum_of_words(const char* data, int64_t begin, int64_t end) {
  using Sums = WordSums<kLoads>;
  const char* first = data + begin * sizeof(uint32_t);
  const int64_t rows = (end - begin) / Sums::kRow;
  Sums sums;
  for (int64_t row = 0; row < rows; ++row) {
    for (int load = 0; load < kLoads; ++load) {
      Lanes pairs;
      std::memcpy(&pairs, first + (row * kLoads + load) * sizeof pairs, sizeof pairs);
      sums.add(load, pairs);
    }
  }
  uint64_t total = sums.total(begin, rows);
  for (int64_t i = begin + rows * Sums::kRow; i < end; ++i) total += weighted(i, word_at(data, i));
  return total;
}

}  // namespace

void bit_checksum_cpu(const ChecksumParams& p) {
  const int64_t words = p.num_bytes / sizeof(uint32_t), rest = p.num_bytes % sizeof(uint32_t);
  parallel_for(words, kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    __atomic_fetch_add(p.checksum, sum_of_words(p.data, begin, end), __ATOMIC_RELAXED);
  });
  if (rest) *p.checksum += weighted(words, word_at(p.data, words, rest));
  if (p.num_bytes) *p.checksum += kFirstWord * word_at(p.data, 0, words ? sizeof(uint32_t) : rest);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
