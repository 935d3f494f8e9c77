// The checksum of a range of words (checksum/params.h) by vectors, included by *_cpu.cpp files.
// Lanes hold the sums of x and of its prefixes, so that the weights cost no multiplication.
#pragma once

#include "checksum/params.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

typedef uint64_t Lanes __attribute__((vector_size(kWidth * 4)));

constexpr int kLanes = kWidth / 2;  // 64 bits each

// A row is kLoads vectors of kWidth words, whose sums do not wait for each other.
template <int kLoads>
class WordSums {
 public:
  static constexpr int kRow = kLoads * kWidth;  // words

  inline __attribute__((always_inline)) void add(int load, Lanes pairs) {
    columns_[load][0].add(pairs & 0xFFFFFFFFu);
    columns_[load][1].add(pairs >> 32);
  }

  // The sum of (2 i - 1) x[i] over the words of `rows` rows, the first of which has number `begin`.
  uint64_t total(int64_t begin, int64_t rows) const {
    uint64_t total = 0;
    for (int i = 0; i < kRow; ++i) {
      const Column& column = columns_[i / kWidth][i % 2];
      const uint64_t sum = column.sum[i / 2 % kLanes];
      const uint64_t row_times_x = rows * sum - column.prefixes[i / 2 % kLanes];
      total += weighted(begin + i, sum) + 2 * kRow * row_times_x;
    }
    return total;
  }

 private:
  // Of one word of each row and lane: the sums of x and of its prefixes.
  struct Column {
    Lanes sum = {}, prefixes = {};
    inline __attribute__((always_inline)) void add(Lanes x) { prefixes += sum += x; }
  };
  Column columns_[kLoads][2];  // of the even and the odd words
};

}  // namespace hybridengine::HYBRIDENGINE_ISA
