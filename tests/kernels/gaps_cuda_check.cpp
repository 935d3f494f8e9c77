// The CUDA kernels of encode_gaps and decode_gaps on the CPU, with the sums that bind.cpp makes.
#include <algorithm>
#include <vector>

#include "gaps_cuda.cu"

using namespace hybridengine;

namespace {

void add_up(std::vector<int64_t>& sums, int64_t columns) {
  for (size_t i = columns; i < sums.size(); ++i) sums[i] += sums[i - columns];
}

}  // namespace

// Returns the bytes of the gaps in fields of `width` bytes; writes them if there is `out`.
extern "C" int64_t encode_on_cpu(const int64_t* positions, int64_t count, int64_t start, int width,
                                 uint8_t* out) {
  std::vector<int64_t> sums(chunks_of(count) * kMaxGapWidth);
  EncodeGapsParams params{positions, count, start, sums.data(), out};
  count_escapes_cuda(params, nullptr);
  add_up(sums, kMaxGapWidth);
  const int64_t bytes = width * (count + sums[sums.size() - kMaxGapWidth + width - 1]);
  if (out) {
    std::fill_n(out, bytes, 0xFF);
    write_gaps_cuda(params, width, nullptr);
  }
  return bytes;
}

// Returns the number of positions; writes the first `count`.
extern "C" int64_t decode_on_cpu(const uint8_t* bytes, int64_t num_fields, int64_t start,
                                 int64_t count, int width, int64_t* positions) {
  std::vector<int64_t> sums(chunks_of(num_fields) * 2);
  DecodeGapsParams params{bytes, num_fields, start, count, sums.data(), positions};
  count_fields_cuda(params, width, nullptr);
  add_up(sums, 2);
  read_gaps_cuda(params, width, nullptr);
  return sums.back();
}
