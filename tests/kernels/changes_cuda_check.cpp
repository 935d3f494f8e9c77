// The CUDA kernels of take_changed on the CPU, and what they share with the CPU kernel.
#include <vector>

#include "changes_cuda.cu"

using namespace hybridengine;

// arrays: for each tensor the addresses of mask and source. Returns the number of changes; writes
// them if there are `indices`, for which `ends` holds the result of the call without.
extern "C" int64_t take_on_cpu(void* const* arrays, const int64_t* numels, int64_t num_tensors,
                               int64_t* ends, void* indices, uint16_t* values, int wide_indices) {
  ChangesParams params{};
  std::vector<ChangedTensor> tensors;
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensors.push_back({static_cast<uint32_t*>(arrays[2 * i]),
                       static_cast<uint16_t*>(arrays[2 * i + 1]), numels[i], params.num_chunks});
    params.num_chunks += num_chunks_of(numels[i]);
  }
  std::vector<int32_t> counts(params.num_chunks);
  params.tensors = tensors.data();
  params.num_tensors = num_tensors;
  params.counts = counts.data();
  params.ends = ends;
  params.indices = indices;
  params.values = values;
  params.wide_indices = wide_indices;
  if (indices) return take_changed_cuda(params, nullptr);
  count_changed_cuda(params, nullptr);
  int64_t total = 0;
  for (int64_t i = 0; i < params.num_chunks; ++i) ends[i] = total += counts[i];
  return total;
}

// The index that the element of bit `bit` of the word at `first` gets.
extern "C" int64_t index_of(int64_t first, int bit) {
  int64_t index;
  uint16_t value, source = 1;
  const uint16_t* begin =
      reinterpret_cast<const uint16_t*>(reinterpret_cast<intptr_t>(&source) - 2 * (first + bit));
  take_word(1u << bit, first, begin, 0, &index, &value);
  return value == source ? index : -1;
}

extern "C" void locate(const int64_t* numels, int64_t num_tensors, int64_t chunk, int64_t* found) {
  std::vector<ChangedTensor> tensors(num_tensors);
  int64_t chunks = 0;
  for (int64_t i = 0; i < num_tensors; ++i) {
    tensors[i].numel = numels[i];
    tensors[i].first_chunk = chunks;
    chunks += num_chunks_of(numels[i]);
  }
  const TensorChunk at = locate_chunk(tensors.data(), num_tensors, chunk);
  found[0] = at.tensor;
  found[1] = at.begin;
  found[2] = at.end;
}
