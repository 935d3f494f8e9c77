// Chunks are counted, then written at the places that the counts give: the result does not depend
// on the number of threads.
#include "changes/dispatch.h"
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
template <typename S, typename D, typename Index>
void take_all(const ChangesParams& p) {
  for_each_chunk(p, [&](int64_t chunk, const TensorChunk& in) {
    const ChangedTensor& tensor = p.tensors[in.tensor];
    const auto* source = static_cast<const S*>(tensor.source);
    auto* indices = static_cast<Index*>(p.indices);
    auto* values = static_cast<D*>(p.values);
    const int64_t begin = chunk ? p.ends[chunk - 1] : 0;
    int64_t end = begin;
    for (int64_t i = in.begin; i < in.end; i += kMaskBits) {
      uint32_t& mask = tensor.mask[i / kMaskBits];
      for (uint32_t word = mask; word; word &= word - 1) {
        const int64_t index = i + lowest_set_bit(word);
        __builtin_prefetch(source + index);
        indices[end++] = static_cast<Index>(index);
      }
      mask = 0;
    }
    for (int64_t k = begin; k < end; ++k) values[k] = convert<S, D>(source[indices[k]]);
  });
}

}  // namespace

void count_changed_cpu(const ChangesParams& p) {
  for_each_chunk(p, [&](int64_t chunk, const TensorChunk& in) {
    int32_t count = 0;
    for (int64_t i = in.begin; i < in.end; i += kMaskBits)
      count += num_set_bits(p.tensors[in.tensor].mask[i / kMaskBits]);
    p.counts[chunk] = count;
  });
}

void take_changed_cpu(const ChangesParams& p) {
  by_dtypes(p, [&](auto source, auto value, auto index) {
    take_all<decltype(source), decltype(value), decltype(index)>(p);
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
