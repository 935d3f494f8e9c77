// Chunks are counted, then written at the places that the counts give: the result does not depend
// on the number of threads.
#include "changes/params.h"
#include "common/parallel.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kGrain = 16;  // chunks of a thread, at least

template <typename Body>
void for_each_chunk(const ChangesParams& p, const Body& body) {
  parallel_for(p.num_chunks, kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      body(chunk, locate_chunk(p.tensors, p.num_tensors, chunk));
  });
}

// All indices of a chunk, then its values, whose scattered reads are in flight by then.
template <typename Index>
void take_all(const ChangesParams& p) {
  for_each_chunk(p, [&](int64_t chunk, const TensorChunk& in) {
    const ChangedTensor& tensor = p.tensors[in.tensor];
    auto* indices = static_cast<Index*>(p.indices);
    const int64_t begin = chunk ? p.ends[chunk - 1] : 0, limit = p.ends[chunk];
    if (limit == begin) return;
    int64_t end = begin;
    bool agrees = true;
    for (int64_t i = in.begin; i < in.end; i += kMaskBits) {
      uint32_t& mask = tensor.mask[i / kMaskBits];
      if (!mask) continue;
      uint32_t word = bits_before_end(mask, in.end - i);
      agrees = num_set_bits(word) <= limit - end;
      if (!agrees) break;
      for (; word; word &= word - 1) {
        const int64_t index = i + lowest_set_bit(word);
        __builtin_prefetch(tensor.source + index);
        indices[end++] = static_cast<Index>(index);
      }
      mask = 0;
    }
    if (!agrees || end != limit) __atomic_store_n(p.disagrees, 1, __ATOMIC_RELAXED);
    for (int64_t k = begin; k < end; ++k) p.values[k] = tensor.source[indices[k]];
  });
}

}  // namespace

void count_changed_cpu(const ChangesParams& p) {
  for_each_chunk(p, [&](int64_t chunk, const TensorChunk& in) {
    const uint32_t* words = p.tensors[in.tensor].mask + in.begin / kMaskBits;
    const int64_t num_words = num_mask_words(in.end - in.begin);
    int32_t count = 0;
    for (int64_t i = 0; i < num_words; ++i) {
      if (words[i]) count += num_set_bits(words[i]);
    }
    if (const int64_t past_end = num_words * kMaskBits - (in.end - in.begin)) {
      const uint32_t last = words[num_words - 1];
      count -= num_set_bits(last) - num_set_bits(bits_before_end(last, kMaskBits - past_end));
    }
    p.counts[chunk] = count;
  });
}

void take_changed_cpu(const ChangesParams& p) {
  p.wide_indices ? take_all<int64_t>(p) : take_all<int32_t>(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
