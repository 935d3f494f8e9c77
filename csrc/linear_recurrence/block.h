// A block of columns of a head's state, and the rows of a chunk of tokens that meet it. Included
// only by *_cpu.cpp files.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/aligned_buffer.h"
#include "common/parallel.h"
#include "common/simd.h"
#include "linear_recurrence/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

// Vectors of a row of a block: with k_dim = 128 a block takes 16 KiB.
constexpr int kVectors = kWidth == 16 ? 2 : 4;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr float kNormEps = 1e-6f;

// Calls body(begin, count) for the vectors of a row; the last one may have fewer elements.
template <typename Body>
HE_SIMD void for_vectors(int64_t size, const Body& body) {
  for (int64_t i = 0; i < size; i += kWidth) body(i, std::min<int64_t>(kWidth, size - i));
}

template <typename T>
HE_SIMD VecF load_first(const T* p, int64_t count) {
  return count == kWidth ? load(p) : load_part(p, count, 0.0f);
}

template <typename T>
HE_SIMD void store_first(T* p, VecF v, int64_t count) {
  if (count == kWidth) {
    store(p, v);
  } else {
    store_part(p, v, count);
  }
}

struct Columns {
  VecF part[kVectors];
};

struct Block {
  int64_t begin, count;  // columns; lanes past the last one are 0

  template <typename T>
  Columns load_from(const T* row) const {
    Columns c{};
    for (int j = 0; j < kVectors && j * kWidth < count; ++j) {
      c.part[j] = load_first(row + begin + j * kWidth, vector_size(j));
    }
    return c;
  }
  template <typename T>
  void store_to(T* row, const Columns& c) const {
    for (int j = 0; j < kVectors && j * kWidth < count; ++j) {
      store_first(row + begin + j * kWidth, c.part[j], vector_size(j));
    }
  }

 private:
  int64_t vector_size(int j) const { return std::min<int64_t>(kWidth, count - j * kWidth); }
};

// Columns of a row of type `dtype`. The type is not known to the compiler: a row is read or written
// once for all rows of the state, and every kernel would otherwise be compiled once per type.
[[gnu::noinline]] inline Columns load_row(DType dtype, const Block& block, const HeadRows& rows,
                                          int64_t token, int64_t head) {
  return with_float(
      dtype, [&](auto type) { return block.load_from(rows.row<decltype(type)>(token, head)); });
}

[[gnu::noinline]] inline void store_row(DType dtype, const Block& block, void* rows, int64_t begin,
                                        const Columns& c) {
  with_float(dtype,
             [&](auto type) { block.store_to(static_cast<decltype(type)*>(rows) + begin, c); });
}

inline int64_t num_blocks(const LinearRecurrence& p) { return (p.v_dim + kColumns - 1) / kColumns; }

inline Block block_of(const LinearRecurrence& p, int64_t index) {
  return {index * kColumns, std::min(kColumns, p.v_dim - index * kColumns)};
}

// The state [k_dim, v_dim] of a head in a tensor of states.
template <typename T>
T* head_state(T* states, int64_t index, int64_t head, const LinearRecurrence& p) {
  return states + (index * p.v_heads + head) * p.k_dim * p.v_dim;
}

inline void read_state(const LinearRecurrence& p, const Block& block, const float* from,
                       Columns* state) {
  for (int64_t i = 0; i < p.k_dim; ++i) {
    state[i] = from ? block.load_from(from + i * p.v_dim) : Columns{};
  }
}

inline void write_state(const LinearRecurrence& p, const Block& block, const Columns* state,
                        float* to) {
  for (int64_t i = 0; i < p.k_dim; ++i) block.store_to(to + i * p.v_dim, state[i]);
}

// The cached state of the sequence of a segment.
inline float* cached_state(const LinearRecurrence& p, int64_t segment, int64_t head) {
  return p.cache + p.slots[segment] * p.cache_stride + head * p.k_dim * p.v_dim;
}

// The state from which a segment starts; null where it is 0.
inline const float* start_of(const LinearRecurrence& p, int64_t segment, int64_t head) {
  const Segment& s = p.plan->segments[segment];
  if (p.slots) return cached_state(p, segment, head);
  if (s.parent >= 0) return head_state(p.states, p.plan->segments[s.parent].end_slot, head, p);
  return p.initial ? head_state(p.initial, segment, head, p) : nullptr;
}

// The rows of one token.
struct Token {
  const float *q, *k, *decay;
};

// q (with the scale), k, decay and beta of up to kChunk tokens of a head, in float32.
class ChunkRows {
 public:
  explicit ChunkRows(const LinearRecurrence& p)
      : p_(p), decays_(p.g_channels ? p.k_dim : 1), rows_(kChunk * (2 * p.k_dim + decays_)) {}

  void load_tokens(int64_t begin, int64_t count, int64_t head) {
    const int64_t shared = head / (p_.v_heads / p_.k_heads);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = begin + t;
      inverse_q[t] = load_row(p_.q, token, shared, q(t), p_.scale);
      inverse_k[t] = load_row(p_.k, token, shared, k(t), 1.0f);
      const float* g = p_.g + (token * p_.v_heads + head) * decays_;
      for_vectors(decays_, [&](int64_t i, int64_t count) {
        store_first(decay(t) + i, exp(load_first(g + i, count)), count);
      });
      beta[t] = p_.beta ? p_.beta[token * p_.v_heads + head] : 1.0f;
    }
  }

  Token token(int64_t t) { return {q(t), k(t), decay(t)}; }

  float* q(int64_t t) { return rows_ + t * p_.k_dim; }
  float* k(int64_t t) { return rows_ + (kChunk + t) * p_.k_dim; }
  float* decay(int64_t t) { return rows_ + 2 * kChunk * p_.k_dim + t * decays_; }

  float beta[kChunk], inverse_q[kChunk], inverse_k[kChunk];  // inverse norms; 1 without l2_norm

 private:
  float load_row(const HeadRows& x, int64_t token, int64_t head, float* row, float scale) const {
    return with_float(p_.dtype, [&](auto type) {
      return convert_row(x.row<decltype(type)>(token, head), row, scale);
    });
  }

  template <typename T>
  float convert_row(const T* from, float* row, float scale) const {
    float inverse = 1.0f;
    if (p_.l2_norm) {
      VecF squares{};
      for_vectors(p_.k_dim, [&](int64_t i, int64_t count) {
        const VecF x = load_first(from + i, count);
        squares += x * x;
      });
      inverse = 1.0f / std::sqrt(static_cast<float>(sum(squares)) + kNormEps);
    }
    for_vectors(p_.k_dim, [&](int64_t i, int64_t count) {
      store_first(row + i, load_first(from + i, count) * inverse * scale, count);
    });
    return inverse;
  }

  const LinearRecurrence& p_;
  int64_t decays_;
  Buffer<float> rows_;
};

template <bool channels>
HE_SIMD VecF decay_of(const Token& token, int64_t i) {
  return splat(token.decay[channels ? i : 0]);
}

// sums[i % 2] add row i: two chains, in an order that k_dim alone fixes.
struct Sums {
  Columns of[2];
  Columns total() const {
    Columns c;
    for (int j = 0; j < kVectors; ++j) c.part[j] = of[0].part[j] + of[1].part[j];
    return c;
  }
};

// Decays the state for a token and returns state^T k, which only the delta rule reads.
template <bool channels, bool delta>
Columns decay_state(int64_t k_dim, const Token& next, const Columns* from, Columns* to) {
  Sums seen{};
  for (int64_t i = 0; i < k_dim; ++i) {
    const VecF a = decay_of<channels>(next, i), k = splat(next.k[i]);
    for (int j = 0; j < kVectors; ++j) {
      const VecF s = from[i].part[j] * a;
      if constexpr (delta) seen.of[i & 1].part[j] += s * k;
      to[i].part[j] = s;
    }
  }
  return seen.total();
}

// Adds k update^T to the state, which is decayed already; out = state^T q if wanted. The state is
// then decayed for the token `next`, if there is one, and for the delta rule seen = state^T k of
// that token.
template <bool channels, bool delta, bool with_next, bool with_out>
HE_SIMD void update_rows(int64_t k_dim, const Token& token, const Token& next,
                         const Columns& update, const Columns* from, Columns* to, Columns& out,
                         Columns& seen) {
  Sums outs{}, seens{};
  const auto row = [&](int64_t i, Columns& out_sum,
                       Columns& seen_sum) __attribute__((always_inline)) {
    const VecF k = splat(token.k[i]), q = with_out ? splat(token.q[i]) : VecF{};
    const VecF a = with_next ? decay_of<channels>(next, i) : VecF{};
    const VecF next_k = with_next && delta ? splat(next.k[i]) : VecF{};
    for (int j = 0; j < kVectors; ++j) {
      VecF s = from[i].part[j] + k * update.part[j];
      if constexpr (with_out) out_sum.part[j] += s * q;
      if constexpr (with_next) {
        s = s * a;
        if constexpr (delta) seen_sum.part[j] += s * next_k;
      }
      to[i].part[j] = s;
    }
  };
  int64_t i = 0;
  for (; i + 2 <= k_dim; i += 2) {
    row(i, outs.of[0], seens.of[0]);
    row(i + 1, outs.of[1], seens.of[1]);
  }
  if (i < k_dim) row(i, outs.of[0], seens.of[0]);
  if constexpr (with_out) out = outs.total();
  if constexpr (with_next && delta) seen = seens.total();
}

// beta (v - seen), or without the delta rule beta v.
template <bool delta>
HE_SIMD Columns update_of(float beta, const Columns& v, const Columns& seen) {
  Columns c;
  for (int j = 0; j < kVectors; ++j) {
    c.part[j] = (delta ? v.part[j] - seen.part[j] : v.part[j]) * beta;
  }
  return c;
}

// Calls run(channels, delta) with the options of a recurrence as constants.
template <typename Run>
void with_options(const LinearRecurrence& p, const Run& run) {
  const auto with_bool = [](bool value, const auto& body) {
    value ? body(std::true_type{}) : body(std::false_type{});
  };
  with_bool(p.g_channels,
            [&](auto channels) { with_bool(p.delta, [&](auto delta) { run(channels, delta); }); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
