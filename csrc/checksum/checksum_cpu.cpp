// The sum is one modulo 2^64, so threads may add their parts in any order. Vectors hold the sums of
// x and of its prefixes: the weights cost no multiplication.
#include <cstring>

#include "checksum/params.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int kLanes = kWidth / 2;         // 64 bits each
constexpr int kLoads = 2;                  // whose sums do not wait for each other
constexpr int kRow = 2 * kLanes * kLoads;  // words
constexpr int64_t kGrain = 1 << 16;        // words of a thread, at least

typedef uint64_t Lanes __attribute__((vector_size(kLanes * 8)));

uint32_t word_at(const char* data, int64_t i, int64_t num_bytes = sizeof(uint32_t)) {
  uint32_t word = 0;
  std::memcpy(&word, data + i * sizeof word, num_bytes);
  return word;
}

// Of one word of each row and lane: the sums of x and of its prefixes.
struct Column {
  Lanes sum = {}, prefixes = {};
  void add(Lanes x) { prefixes += sum += x; }
};

// The sum of (2 i - 1) x[i] over words [begin, end).
uint64_t sum_of_words(const char* data, int64_t begin, int64_t end) {
  const char* first = data + begin * sizeof(uint32_t);
  const int64_t rows = (end - begin) / kRow;
  Column columns[kLoads][2];  // of the even and the odd words
  for (int64_t row = 0; row < rows; ++row) {
    for (int load = 0; load < kLoads; ++load) {
      Lanes pairs;
      std::memcpy(&pairs, first + (row * kLoads + load) * sizeof pairs, sizeof pairs);
      columns[load][0].add(pairs & 0xFFFFFFFFu);
      columns[load][1].add(pairs >> 32);
    }
  }
  uint64_t total = 0;
  for (int i = 0; i < kRow; ++i) {
    const Column& column = columns[i / (2 * kLanes)][i % 2];
    const uint64_t sum = column.sum[i / 2 % kLanes];
    const uint64_t row_times_x = rows * sum - column.prefixes[i / 2 % kLanes];
    total += weighted(begin + i, sum) + 2 * kRow * row_times_x;
  }
  for (int64_t i = begin + rows * kRow; i < end; ++i) total += weighted(i, word_at(data, i));
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
