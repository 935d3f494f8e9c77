// The CUDA kernel of changed_elements on the CPU.
#include "changed_cuda.cu"

using namespace hybridengine;

extern "C" int run_on_cpu(const void* current, void* sent, uint32_t* mask, int64_t size,
                          int current_dtype, int sent_dtype) {
  ChangedElementsParams params{};
  params.current = current;
  params.sent = sent;
  params.mask = mask;
  params.size = size;
  params.current_dtype = static_cast<DType>(current_dtype);
  params.sent_dtype = static_cast<DType>(sent_dtype);
  return mark_changed_cuda(params, nullptr);
}
