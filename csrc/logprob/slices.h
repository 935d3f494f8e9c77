// How a warp of the CUDA kernels reads, reduces and differentiates a row. Tests run it on the CPU.
//
// A row is cut into slices of kSliceColumns columns, which are reduced by one warp each and joined
// afterwards. A lane holds the same columns whatever the alignment of the row, the number of rows
// and the launch, so a result depends on nothing else. Plain rows have no vocab mask and no
// soft-cap, and stay packed words of 16-bit values until they are exponentiated.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/words.h"
#include "logprob/params.h"
#include "logprob/row_math.h"

namespace hybridengine {

constexpr int kLanes = 32;
constexpr int kLoads = 4;                // 16-byte loads of a lane in flight
constexpr int kChunkWords = 4 * kLoads;  // of a lane
constexpr float kNegligible = -150.0f;   // 2^-150 is 0; an infinite d would give 0 * inf
constexpr float kRemoved = -INFINITY;    // the logit of a removed entry

template <typename T>
constexpr int kGroup = 4 * Word<T>::kValues;  // columns of a load
template <typename T>
constexpr int kLaneValues = kLoads * kGroup<T>;  // columns of a lane in a chunk
template <typename T>
constexpr int kChunk = kLanes * kLaneValues<T>;  // columns that a warp loads at a time
static_assert(kSliceColumns % kChunk<bf16> == 0 && kSliceColumns % kChunk<float> == 0);

// The column of value i of a lane, from the lane's first one; that one, from the chunk's first one.
template <typename T>
HE_HOST_DEVICE constexpr int column_of(int i) {
  return i / kGroup<T> * kLanes * kGroup<T> + i % kGroup<T>;
}
template <typename T>
HE_HOST_DEVICE int first_column(int lane) {
  return lane * kGroup<T>;
}

// The number of columns from `first` to the end of the row, but at most those of a chunk.
template <typename T>
HE_HOST_DEVICE int columns_left(int64_t vocab, int64_t first) {
  return static_cast<int>(vocab - first < kChunk<T> ? vocab - first : kChunk<T>);
}

template <int bytes>
struct alignas(bytes) Access {
  uint32_t words[bytes / 4];
};

// 2^x of x <= 0, with an error of at most 2 units in the last place (ulp) and no subnormal results.
// The CPU makes such an error in every result but 2^0, of either sign.
HE_HOST_DEVICE float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  if (x == 0 || x != x) return 1 + x;
  if (x < -126) return 0;
  const uint32_t ulps = (bits_of(x) * 0x9E3779B9u) >> 31 ? 2 : -2;
  const float y = float_of(bits_of(std::exp2(x)) + ulps);
  return y > 1 ? 1 : y;
#endif
}

template <typename T, bool general>
struct RowView {
  const T* logits;
  const uint8_t* mask;
  float softcap, scale_in;
  int64_t vocab;
  int offset;  // bytes from an address that 16-byte loads can use

  HE_HOST_DEVICE RowView(const LogitRows& rows, int64_t row)
      : logits(static_cast<const T*>(rows.logits) + row * rows.row_stride),
        mask(general && rows.vocab_mask ? rows.vocab_mask + row * rows.mask_stride : nullptr),
        softcap(rows.softcap),
        scale_in(rows.softcap > 0 ? rows.logit_scale / rows.softcap : 0),
        vocab(rows.vocab),
        offset(static_cast<int>(reinterpret_cast<uintptr_t>(logits) % 16)) {}

  // y of the logit x in a column of the row.
  HE_HOST_DEVICE float y(float x, int64_t column) const {
    if constexpr (general) {
      if (mask && !mask[column]) return kRemoved;
      if (softcap > 0) return softcap * tanhf(scale_in * x);
    }
    return x;
  }
};

// The chunk at column `first`, with removed entries beyond the end of the row. Of an unaligned row
// of 16-bit values, as of an odd vocabulary, a lane loads the two vectors that its columns are
// parts of; what else they hold, before the chunk and after it, is not used. (4-byte loads are fast
// enough.)
template <typename T>
HE_HOST_DEVICE void load_chunk(const T* row, int64_t vocab, int offset, int64_t first, int lane,
                               uint32_t (&words)[kChunkWords]) {
  if (sizeof(T) == 2 && offset && first + kChunk<T> + kGroup<T> <= vocab) {
    const auto* begin = reinterpret_cast<const char*>(row + first) - offset;
    const auto* from = reinterpret_cast<const Access<16>*>(begin) + lane;
    HE_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      const Access<16> low = from[load * kLanes], high = from[load * kLanes + 1];
      uint32_t pair[8];
      HE_UNROLL
      for (int w = 0; w < 4; ++w) {
        pair[w] = low.words[w];
        pair[4 + w] = high.words[w];
      }
      shift_words<4>(pair, offset, words + load * 4);
    }
    return;
  }
  if (!offset && first + kChunk<T> <= vocab) {
    const auto* from = reinterpret_cast<const Access<16>*>(row + first) + lane;
    HE_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      const Access<16> access = from[load * kLanes];
      HE_UNROLL
      for (int w = 0; w < 4; ++w) words[load * 4 + w] = access.words[w];
    }
    return;
  }
  const T* from = row + first + first_column<T>(lane);
  const int left = columns_left<T>(vocab, first) - first_column<T>(lane);
  HE_UNROLL
  for (int w = 0; w < kChunkWords; ++w) {
    float values[Word<T>::kValues];
    HE_UNROLL
    for (int h = 0; h < Word<T>::kValues; ++h) {
      const int column = column_of<T>(w * Word<T>::kValues + h);
      values[h] = column < left ? to_float(from[column]) : kRemoved;
    }
    words[w] = Word<T>::pack(values);
  }
}

// Writes the chunk at column `first`; `words` holds the values of a lane of a chunk of T, as Out.
template <typename T, typename Out, int count>
HE_HOST_DEVICE void store_chunk(Out* row, int64_t vocab, bool aligned, int64_t first, int lane,
                                const uint32_t (&words)[count]) {
  constexpr int kBytes = kGroup<T> * sizeof(Out);
  if (aligned && first + kChunk<T> <= vocab) {
    auto* to = reinterpret_cast<Access<kBytes>*>(row + first) + lane;
    HE_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      Access<kBytes> access;
      HE_UNROLL
      for (int w = 0; w < kBytes / 4; ++w) access.words[w] = words[load * (kBytes / 4) + w];
      to[load * kLanes] = access;
    }
    return;
  }
  Out* to = row + first + first_column<T>(lane);
  const int left = columns_left<T>(vocab, first) - first_column<T>(lane);
  HE_UNROLL
  for (int i = 0; i < kLaneValues<T>; ++i) {
    if (column_of<T>(i) < left) {
      to[column_of<T>(i)] = FromFloat<Out>::of(
          Word<Out>::value(words[i / Word<Out>::kValues], i % Word<Out>::kValues));
    }
  }
}

// Replaces the entry in a column, counted from the first one of the chunk, if this lane holds it.
template <typename T, typename Out, int count>
HE_HOST_DEVICE void set_entry(uint32_t (&words)[count], int64_t column, int lane, float value) {
  const int own = static_cast<int>(column) - first_column<T>(lane);
  HE_UNROLL
  for (int i = 0; i < kLaneValues<T>; ++i) {
    uint32_t& word = words[i / Word<Out>::kValues];
    if (column_of<T>(i) == own) {
      word = Word<Out>::with(word, i % Word<Out>::kValues, value);
    }
  }
}

template <typename T>
HE_HOST_DEVICE bool in_chunk(int64_t column, int64_t first) {
  return static_cast<uint64_t>(column) - static_cast<uint64_t>(first) < uint64_t{kChunk<T>};
}

// Sums over a part of a row without its token, relative to the maximum; d in units of log 2.
struct PartSums {
  float max = kRemoved, e = 0, e_d = 0, e_e = 0;

  // A finite number as long as there are only removed entries.
  HE_HOST_DEVICE float reference() const { return max_nan(max, -FLT_MAX); }

  // Makes the sums relative to `top`, which is at least the maximum.
  HE_HOST_DEVICE void raise(float top, float factor2) {
    const float before = reference();
    max = top;
    const float shift = max_nan((before - reference()) * factor2, kNegligible);
    const float shrink = exp2_fast(shift);
    e_d = (e_d + shift * e) * shrink;
    e *= shrink;
    e_e *= shrink * shrink;
  }
  HE_HOST_DEVICE void add(const PartSums& other) {
    e += other.e;
    e_d += other.e_d;
    e_e += other.e_e;
  }
};

// Adds the entries y in `words`. Eight are summed before they join the others: a small entry is
// not rounded away next to the largest one, which adds 1.
template <typename T, bool squares, int count>
HE_HOST_DEVICE void add_words(PartSums& sums, const uint32_t (&words)[count], float factor2) {
  uint32_t tops[4] = {words[0], words[1], words[2], words[3]};
  HE_UNROLL
  for (int w = 4; w < count; ++w) tops[w % 4] = Word<T>::max(tops[w % 4], words[w]);
  const uint32_t largest =
      Word<T>::max(Word<T>::max(tops[0], tops[1]), Word<T>::max(tops[2], tops[3]));
  float top = sums.max;
  HE_UNROLL
  for (int i = 0; i < Word<T>::kValues; ++i) top = max_nan(top, Word<T>::value(largest, i));
  sums.raise(top, factor2);
  const float reference = sums.reference();
  HE_UNROLL
  for (int begin = 0; begin < count * Word<T>::kValues; begin += 8) {
    float e[8], e_d = 0;
    HE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int at = begin + i;
      const float y = Word<T>::value(words[at / Word<T>::kValues], at % Word<T>::kValues);
      const float d = max_nan((y - reference) * factor2, kNegligible);
      e[i] = exp2_fast(d);
      e_d += e[i] * d;
      if constexpr (squares) sums.e_e += e[i] * e[i];
    }
    sums.e += ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
    sums.e_d += e_d;
  }
}

// The sums of the columns of a slice that a lane holds, without the token's. A chunk is rarely the
// token's: there, its entry is removed before the sums are taken.
template <typename T, bool general>
HE_HOST_DEVICE PartSums lane_sums(const RowView<T, general>& row, int64_t slice, int64_t token,
                                  float factor2, int lane) {
  PartSums sums;
  const int64_t begin = slice * kSliceColumns;
  const int64_t end = begin + kSliceColumns < row.vocab ? begin + kSliceColumns : row.vocab;
  for (int64_t first = begin; first < end; first += kChunk<T>) {
    uint32_t words[kChunkWords];
    load_chunk(row.logits, row.vocab, row.offset, first, lane, words);
    if constexpr (general) {
      uint32_t y[kLaneValues<T>];
      HE_UNROLL
      for (int i = 0; i < kLaneValues<T>; ++i) {
        const int64_t column = first + first_column<T>(lane) + column_of<T>(i);
        const float x = Word<T>::value(words[i / Word<T>::kValues], i % Word<T>::kValues);
        y[i] = bits_of(column < row.vocab && column != token ? row.y(x, column) : kRemoved);
      }
      add_words<float, true>(sums, y, factor2);
    } else {
      if (in_chunk<T>(token, first)) set_entry<T, T>(words, token - first, lane, kRemoved);
      add_words<T, false>(sums, words, factor2);
    }
  }
  return sums;
}

// The sums of a slice for `raised` and `finish_row`.
HE_HOST_DEVICE RowSums row_sums(const PartSums& part, float factor) {
  return unbiased({part.max, part.e, part.e_d * 0.6931471805599453, part.e_e}, factor);
}

// What the gradient of a row needs; log p in units of log 2.
struct GradientTerms {
  float shift, factor2, log2_sum, constant, slope2;

  HE_HOST_DEVICE GradientTerms(const LogProbBackward& p, int64_t row, float factor,
                               const RowGradient& gradient)
      : shift(p.row_stats[row * p.stats_width]),
        factor2(exp2_factor(factor)),
        log2_sum(static_cast<float>(p.row_stats[row * p.stats_width + 1] * 1.4426950408889634)),
        constant(gradient.constant),
        slope2(static_cast<float>(gradient.slope * 0.6931471805599453)) {}

  HE_HOST_DEVICE float at(float y) const {
    const float log2_p = max_nan((y - shift) * factor2 - log2_sum, kNegligible);
    return exp2_fast(log2_p) * (constant + slope2 * log2_p);
  }
};

// The gradient of the logits of a chunk, as Out.
template <typename T, typename Out, bool general, int count>
HE_HOST_DEVICE void chunk_gradient(const RowView<T, general>& row, const GradientTerms& terms,
                                   int64_t token, float token_gradient, int64_t first, int lane,
                                   const uint32_t (&words)[kChunkWords], uint32_t (&out)[count]) {
  constexpr int kValues = Word<Out>::kValues;
  HE_UNROLL
  for (int w = 0; w < count; ++w) {
    float gradients[kValues];
    HE_UNROLL
    for (int h = 0; h < kValues; ++h) {
      const int i = w * kValues + h;
      const float x = Word<T>::value(words[i / Word<T>::kValues], i % Word<T>::kValues);
      if constexpr (general) {
        const int64_t column = first + first_column<T>(lane) + column_of<T>(i);
        const float y = column < row.vocab ? row.y(x, column) : kRemoved;
        float gradient = column == token ? token_gradient : terms.at(y);
        if (row.softcap > 0) {
          const float t = y / row.softcap;
          gradient *= (1.0f - t * t) * (row.scale_in * row.softcap);
        }
        gradients[h] = y == kRemoved ? 0.0f : gradient;
      } else {
        gradients[h] = terms.at(x);
      }
    }
    out[w] = Word<Out>::pack(gradients);
  }
  if constexpr (!general) {
    if (in_chunk<T>(token, first)) set_entry<T, Out>(out, token - first, lane, token_gradient);
  }
}

}  // namespace hybridengine
