// A buffer that is larger than any memory, in each of some threads.
#include "common/aligned_buffer.h"
#include "common/parallel.h"

using namespace hybridengine;

extern "C" bool raises_bad_alloc(int threads) {
  try {
    parallel_for(threads, 1, threads,
                 [](int64_t, int64_t) { const Buffer<double> buffer(int64_t{1} << 58); });
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}
