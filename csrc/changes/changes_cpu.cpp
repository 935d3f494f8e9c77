// Chunks are counted, then written at the places that the counts give: the result does not depend
// on the number of threads.
#include <cstring>

#include "changes/params.h"
#include "common/parallel.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kGrain = 16;  // chunks of a thread, at least
constexpr int64_t kPairBits = 2 * kMaskBits;

// Calls body(begin, end) for groups of chunks, those of a thread in order.
template <typename Body>
void for_each_group(const ChangesParams& p, const Body& body) {
  parallel_for(p.num_chunks, kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kGrain) body(begin, begin + kGrain < end ? begin + kGrain : end);
  });
}

// Writes the indices of a chunk, and clears its masks. Returns whether there are `count` of them.
template <typename Index>
bool take_indices(const ChangedTensor& tensor, const TensorChunk& in, Index* indices,
                  int64_t count) {
  uint32_t* words = tensor.mask + in.begin / kMaskBits;
  const int64_t num_bytes = num_mask_words(in.end - in.begin) * sizeof *words;
  uint64_t pairs[kWordsPerChunk / 2] = {};
  std::memcpy(pairs, words, num_bytes);
  std::memset(words, 0, num_bytes);
  if (const int64_t rest = (in.end - in.begin) % kPairBits)
    pairs[(in.end - in.begin) / kPairBits] &= (uint64_t{1} << rest) - 1;
  int marked[kWordsPerChunk / 2], num_marked = 0;  // listed without a branch: it is mispredicted
  for (int i = 0; i < kWordsPerChunk / 2; ++i) {
    marked[num_marked] = i;
    num_marked += pairs[i] != 0;
  }
  for (int k = 0; k < num_marked; ++k) {
    const int64_t first = in.begin + marked[k] * kPairBits;
    uint64_t pair = pairs[marked[k]];
    count -= __builtin_popcountll(pair);
    if (count < 0) return false;
    for (; pair; pair &= pair - 1) {
      const int64_t index = first + __builtin_ctzll(pair);
      __builtin_prefetch(tensor.source + index);
      *indices++ = static_cast<Index>(index);
    }
  }
  return count == 0;
}

// All indices of a group, then its values, whose scattered reads wait for memory together.
template <typename Index>
void take_all(const ChangesParams& p) {
  auto* indices = static_cast<Index*>(p.indices);
  const auto first_of = [&](int64_t chunk) { return chunk ? p.ends[chunk - 1] : 0; };
  for_each_group(p, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const TensorChunk in = locate_chunk(p.tensors, p.num_tensors, chunk);
      const int64_t first = first_of(chunk), count = p.ends[chunk] - first;
      if (!count || take_indices(p.tensors[in.tensor], in, indices + first, count)) continue;
      __atomic_store_n(p.disagrees, 1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const TensorChunk in = locate_chunk(p.tensors, p.num_tensors, chunk);
      const uint16_t* source = p.tensors[in.tensor].source;
      for (int64_t k = first_of(chunk); k < p.ends[chunk]; ++k) p.values[k] = source[indices[k]];
    }
  });
}

}  // namespace

void count_changed_cpu(const ChangesParams& p) {
  for_each_group(p, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const TensorChunk in = locate_chunk(p.tensors, p.num_tensors, chunk);
      const uint32_t* words = p.tensors[in.tensor].mask + in.begin / kMaskBits;
      const int64_t num_words = num_mask_words(in.end - in.begin);
      int32_t count = 0;
      for (int64_t i = 0; i < num_words; ++i) count += num_set_bits(words[i]);
      if (const int64_t past_end = num_words * kMaskBits - (in.end - in.begin)) {
        const uint32_t last = words[num_words - 1];
        count -= num_set_bits(last) - num_set_bits(bits_before_end(last, kMaskBits - past_end));
      }
      p.counts[chunk] = count;
    }
  });
}

void take_changed_cpu(const ChangesParams& p) {
  p.wide_indices ? take_all<int64_t>(p) : take_all<int32_t>(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
