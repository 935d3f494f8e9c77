// Logits of chosen vocabulary entries. An entry has the bits that decode_linear gives it, whatever
// the other entries are.
#include "common/parallel.h"
#include "decode_linear/tile.h"
#include "sparse_linear/operands.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int kEntries = Shape<1, float>::kOutputs;  // of one row, at a time

template <typename T>
void logits(const SparseLogits& p) {
  static_assert(Shape<1, T>::kOutputs == kEntries && kEntries % kWidth == 0);
  const Operands<T> rows(p);
  parallel_for(p.ends[p.rows], kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    int64_t row = rows.row_of(begin);
    for (int64_t entry = begin; entry < end;) {
      while (entry >= p.ends[row + 1]) ++row;
      const int64_t last = std::min({end, int64_t{p.ends[row + 1]}, entry + kEntries});
      Tile<T> tile{{rows.hidden(row)}, {}, p.width, 0, 0, 0};
      bool is_local[kEntries];
      for (int i = 0; i < kEntries; ++i) {  // those past the end are computed, and not stored
        const T* weight = rows.weight(std::min(entry + i, last - 1));
        is_local[i] = weight;
        tile.weight[i] = weight ? weight : tile.x[0];
      }
      VecF lanes[kEntries];
      float sums[kEntries];
      multiply_tile<1, kEntries>(tile, lanes, false);
      for (int i = 0; i < kEntries; i += kWidth) store(sums + i, join_lanes(lanes + i));
      for (int i = 0; entry < last; ++i, ++entry) p.logits[entry] = is_local[i] ? sums[i] : 0.0f;
    }
  });
}

}  // namespace

void sparse_logits_cpu(const SparseLogits& p) {
  with_factor<float, f16, bf16>(p.dtype, [&](auto type) { logits<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
