// Masks of changed elements: bit i % 32 of word i / 32 is element i; bits past the end are
// ignored.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/tensor_chunks.h"

namespace hybridengine {

constexpr int64_t kMaskBits = 32;
constexpr int64_t kWordsPerChunk = kTensorChunk / kMaskBits;
static_assert(kTensorChunk % kMaskBits == 0);  // no two chunks share a word

HE_HOST_DEVICE int64_t num_mask_words(int64_t numel) { return (numel + kMaskBits - 1) / kMaskBits; }

HE_HOST_DEVICE int num_set_bits(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __popc(word);
#else
  return __builtin_popcount(word);
#endif
}

HE_HOST_DEVICE int lowest_set_bit(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __ffs(static_cast<int>(word)) - 1;
#else
  return __builtin_ctz(word);
#endif
}

// The bits of a word whose first element is the `left`-th before the end of the tensor.
HE_HOST_DEVICE uint32_t bits_before_end(uint32_t word, int64_t left) {
  return left < kMaskBits ? word & ((1u << left) - 1) : word;
}

// Writes the index of every set bit of a word, and the value of that element, to entries `at`, ...
// first: the element of bit 0.
template <typename Index>
HE_HOST_DEVICE void take_word(uint32_t word, int64_t first, const uint16_t* source, int64_t at,
                              Index* indices, uint16_t* values) {
  for (; word; word &= word - 1, ++at) {
    const int64_t i = first + lowest_set_bit(word);
    indices[at] = static_cast<Index>(i);
    values[at] = source[i];
  }
}

}  // namespace hybridengine
