// Writes keys and values to the cache; see params.h.
#include <cmath>

#include "attention/operands.h"
#include "common/parallel.h"
#include "paged_attention/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

template <typename T>
bool is_finite(const T* row, int64_t count) {
  VecF zero{};  // NaN where an element is not finite
  for (int64_t i = 0; i < count; i += kWidth) zero += load(row + i) * 0.0f;
  return lane_bits(zero != zero) == 0;
}

template <typename T>
void write(const PagedWrite& p) {
  constexpr int64_t kNumbers = sizeof(float) / sizeof(T);  // of a step
  const T zero{}, nan = FromFloat<T>::of(NAN);
  // Neighbours write to the same cache lines: every thread gets tokens that follow each other.
  parallel_for(p.tokens, kCacheUnit, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (p.slot_mapping[t] < 0) continue;
      const int64_t block = p.slot_mapping[t] / p.block_size;
      const int64_t offset = p.slot_mapping[t] % p.block_size;
      for (int64_t head = 0; head < p.kv_heads; ++head) {
        const T *key = p.key.template row<T>(t, head), *value = p.value.template row<T>(t, head);
        const bool finite = is_finite(key, p.dim) && is_finite(value, p.value_dim);
        T* keys = static_cast<T*>(p.data) + block * p.block_stride + head * p.head_stride;
        T* values = keys + p.block_size * p.dim;
        values += offset / kNumbers * kNumbers * p.value_dim + offset % kNumbers;
        for (int64_t d = 0; d < p.dim; d += kNumbers) {
          T* step = keys + d * p.block_size + offset * kNumbers;
          for (int64_t i = 0; i < kNumbers; ++i) step[i] = finite ? key[d + i] : zero;
        }
        if (!finite) keys[offset * kNumbers] = nan;
        for (int64_t d = 0; d < p.value_dim; ++d) values[d * kNumbers] = finite ? value[d] : zero;
      }
    }
  });
}

}  // namespace

void paged_write_cpu(const PagedWrite& p) {
  with_factor<float, bf16>(p.dtype, [&](auto type) { write<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
