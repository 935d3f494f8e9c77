// Block quantization on the CPU: threads take equal numbers of slices, or of blocks, which stay in
// the first cache between the two steps.
#include <algorithm>

#include "common/parallel.h"
#include "common/simd.h"
#include "strided_copy/quantize.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kGrain = 4;  // slices or blocks of a thread, at least

typedef uint8_t VecB __attribute__((vector_size(kWidth)));

template <typename S, typename E>
HE_SIMD VecF load_as(const S* p) {
  if constexpr (__is_same(S, E) || __is_same(E, float)) {
    return load(p);
  } else {
    E rounded[kWidth];
    store(rounded, load(p));
    return load(rounded);
  }
}

// The lowest byte of every lane.
HE_SIMD VecB low_bytes(VecU v) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // where the compiler would take lane by lane
  const __m256i in_halves = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0C080400));
  const __m256i first_of_halves = _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0);
  const __m256i joined = _mm256_permutevar8x32_epi32(in_halves, first_of_halves);
  const int64_t bits = _mm_cvtsi128_si64(_mm256_castsi256_si128(joined));
  VecB bytes;
  std::memcpy(&bytes, &bits, sizeof bytes);
  return bytes;
#else
  return __builtin_convertvector(v, VecB);
#endif
}

// As to_e4m3, without branches.
HE_SIMD void store_e4m3(uint8_t* p, VecF v) {
  const VecU sign = (VecU)v & 0x80000000u;
  const VecU magnitude = (VecU)v ^ sign;
  const VecU small = (VecU)((VecF)magnitude + float_of(kE4m3Rounder)) - kE4m3Rounder;
  const VecU normal = (magnitude - (120u << 23) + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
  const VecI ordered = (VecI)magnitude;  // without the sign bit: signed comparisons are cheaper
  VecU rounded = ordered < static_cast<int32_t>(kE4m3Normal) ? small : normal;
  rounded = ordered >= static_cast<int32_t>(kE4m3Overflow) ? VecU{} + 0x7Fu : rounded;
  const VecB bytes = low_bytes(rounded | sign >> 24);
  std::memcpy(p, &bytes, sizeof bytes);
}

// Calls run(src, dst, count) for every run along the innermost dimension of a row.
template <typename Run>
void for_each_run(const CopyRow& row, const Run& run) {
  const int64_t length = row.size[kCopyDims - 1], total = num_elements(row);
  for (int64_t begin = 0; begin < total; begin += length) {
    const CopyPlace place = locate(row, begin);
    run(place.src, place.dst, length);
  }
}

// Bits of the largest magnitude of runs.
template <typename S, typename E>
class AbsMax {
 public:
  void add(const S* in, int64_t step, int64_t count) {
    int64_t i = 0;
    for (; step == 1 && i + kWidth <= count; i += kWidth) {
      const VecI bits = (VecI)load_as<S, E>(in + i) & 0x7FFFFFFF;
      lanes_ = bits > lanes_ ? bits : lanes_;
    }
    for (; i < count; ++i)
      rest_ = std::max(rest_, magnitude_bits(engine_value<S, E>(in[i * step])));
  }

  uint32_t bits() const {
    uint32_t most = rest_;
    for (int i = 0; i < kWidth; ++i) most = std::max(most, static_cast<uint32_t>(lanes_[i]));
    return most;
  }

 private:
  VecI lanes_ = {};
  uint32_t rest_ = 0;
};

template <typename S, typename E>
void quantize_run(const S* in, int64_t src_step, uint8_t* out, int64_t dst_step, int64_t count,
                  float factor) {
  int64_t i = 0;
  if (src_step == 1 && dst_step == 1)
    for (; i + kWidth <= count; i += kWidth)
      store_e4m3(out + i, load_as<S, E>(in + i) * splat(factor));
  for (; i < count; ++i) out[i * dst_step] = to_e4m3(engine_value<S, E>(in[i * src_step]) * factor);
}

// Threads share the entry of a block that several slices lie in.
void raise_to(int32_t* entry, int32_t value) {
  int32_t known = __atomic_load_n(entry, __ATOMIC_RELAXED);
  while (known < value && !__atomic_compare_exchange_n(entry, &known, value, true, __ATOMIC_RELAXED,
                                                       __ATOMIC_RELAXED)) {
  }
}

template <typename Body>
void for_each_row(const QuantizeParams& p, const Body& body) {
  parallel_for(p.num_rows, kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(p.rows[i]);
  });
}

}  // namespace

void block_absmax_cpu(const QuantizeParams& p) {
  by_dtypes(p, [&](auto source, auto engine) {
    using S = decltype(source);
    for_each_row(p, [&](const CopyRow& row) {
      const S* src = reinterpret_cast<const S*>(p.sources[row.src]) + row.src_offset;
      AbsMax<S, decltype(engine)> absmax;
      for_each_run(row, [&](int64_t from, int64_t, int64_t count) {
        absmax.add(src + from, row.src_stride[kCopyDims - 1], count);
      });
      raise_to(p.absmax + row.block, static_cast<int32_t>(absmax.bits()));
    });
  });
}

void block_quantize_cpu(const QuantizeParams& p) {
  by_dtypes(p, [&](auto source, auto engine) {
    using S = decltype(source);
    for_each_row(p, [&](const CopyRow& row) {
      const S* src = reinterpret_cast<const S*>(p.sources[row.src]) + row.src_offset;
      auto* dst = reinterpret_cast<uint8_t*>(p.destinations[row.dst]) + row.dst_offset;
      const float factor = 1.0f / p.scale[row.block];
      for_each_run(row, [&](int64_t from, int64_t to, int64_t count) {
        quantize_run<S, decltype(engine)>(src + from, row.src_stride[kCopyDims - 1], dst + to,
                                          row.dst_stride[kCopyDims - 1], count, factor);
      });
    });
  });
}

void quantize_matrices_cpu(const QuantizeMatricesParams& p) {
  with_float(p.dtype, [&](auto type) {
    using S = decltype(type);
    parallel_for(num_blocks(p), kGrain, p.num_threads, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        const MatrixBlock block = matrix_block(p, static_cast<uint32_t>(number));
        const S* in = static_cast<const S*>(p.weight) + block.offset;
        AbsMax<S, S> absmax;
        for (int row = 0; row < block.rows; ++row)
          absmax.add(in + row * p.columns, 1, block.columns);
        p.scale[number] = block_scale(absmax.bits());
        const float factor = 1.0f / p.scale[number];
        for (int row = 0; row < block.rows; ++row)
          quantize_run<S, S>(in + row * p.columns, 1, p.quantized + block.offset + row * p.columns,
                             1, block.columns, factor);
      }
    });
  });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
