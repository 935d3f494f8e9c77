// The CUDA kernel of adamw_ on the CPU, and what it shares with the CPU kernel.
#include <vector>

#include "adamw_cuda.cu"

using namespace hybridengine;

// arrays: for each tensor the addresses of param, grad, exp_avg, exp_avg_sq, step, changed.
extern "C" int update_on_cpu(void* const* arrays, const int64_t* numels, int64_t num_tensors,
                             const double* numbers, const float* grad_factor, int grad_dtype,
                             int engine_dtype) {
  AdamwParams params{};
  std::vector<AdamwTensor> tensors;
  for (int64_t i = 0; i < num_tensors; ++i, arrays += 6) {
    tensors.push_back({static_cast<float*>(arrays[0]), arrays[1], static_cast<float*>(arrays[2]),
                       static_cast<float*>(arrays[3]), static_cast<const float*>(arrays[4]),
                       static_cast<uint32_t*>(arrays[5]), nullptr, numels[i], params.num_chunks});
    params.num_chunks += num_chunks_of(numels[i]);
  }
  params.tensors = tensors.data();
  params.num_tensors = num_tensors;
  params.options = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], grad_factor};
  params.grad_dtype = static_cast<DType>(grad_dtype);
  params.marks_changes = engine_dtype >= 0;
  params.engine_dtype = static_cast<DType>(engine_dtype);
  return adamw_cuda(params, nullptr);
}

extern "C" void locate(const int64_t* numels, int64_t num_tensors, int64_t chunk, int64_t* found) {
  std::vector<AdamwTensor> tensors(num_tensors);
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

extern "C" double power(double base, int64_t exponent) { return integer_power(base, exponent); }
