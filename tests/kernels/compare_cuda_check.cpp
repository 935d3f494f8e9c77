// The CUDA kernel of mark_changed_ on the CPU.
#include "compare_cuda.cu"

using namespace hybridengine;

extern "C" int run_on_cpu(const void* current, void* sent, uint32_t* mask, int64_t numel,
                          int current_dtype, int sent_dtype) {
  CompareParams params{};
  params.current = current;
  params.sent = sent;
  params.mask = mask;
  params.numel = numel;
  params.current_dtype = static_cast<DType>(current_dtype);
  params.sent_dtype = static_cast<DType>(sent_dtype);
  return mark_changed_cuda(params, nullptr);
}
