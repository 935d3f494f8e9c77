// CPU log-prob kernels. Forward: each block of a row is exponentiated relative to the largest logit
// so far while its own maximum is computed; the few blocks with a larger maximum are repeated from
// L1. One thread reduces a row in a fixed order: results depend neither on the number of threads
// nor on the other rows.
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "logprob/params.h"
#include "logprob/plain_row.h"
#include "logprob/row_math.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kBlock = 2048;  // elements; 8 KiB of float32 stay in L1 for a second look
constexpr double kLn2 = 0.6931471805599453;
constexpr double kLog2e = 1.4426950408889634;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One row of logits; `general` adds the vocab mask and the soft-cap.
template <typename T, bool general>
struct Row {
  const T* logits;
  const uint8_t* mask;
  float softcap, scale_in;  // y = softcap * tanh(scale_in * x)

  explicit Row(const LogitRows& rows, int64_t row)
      : logits(static_cast<const T*>(rows.logits) + row * rows.row_stride),
        mask(general && rows.vocab_mask ? rows.vocab_mask + row * rows.mask_stride : nullptr),
        softcap(rows.softcap),
        scale_in(rows.softcap > 0 ? rows.logit_scale / rows.softcap : 0) {}

  VecF kept(VecF x, int64_t i, int64_t count) const {
    if constexpr (general) {
      if (mask) {
        for (int64_t lane = 0; lane < count; ++lane)
          x[lane] = mask[i + lane] ? x[lane] : kMinusInfinity;
      }
    }
    return x;
  }
  // -inf marks a removed entry. With a soft-cap, a logit of -inf is not removed: y is -softcap, so
  // it is replaced by a finite number whose tanh is -1.
  VecF marked(VecF x) const {
    if constexpr (general) {
      if (softcap > 0) return at_least(std::numeric_limits<float>::lowest(), x);
    }
    return x;
  }
  VecF raw(int64_t i) const { return kept(marked(load(logits + i)), i, kWidth); }
  VecF raw_part(int64_t i, int64_t count) const {
    VecF x = marked(load_part(logits + i, count, kMinusInfinity));
    for (int64_t lane = count; general && lane < kWidth; ++lane) x[lane] = kMinusInfinity;
    return kept(x, i, count);
  }
  VecPair raw_pair(int64_t i) const {
    if constexpr (general) return {raw(i), raw(i + kWidth)};
    return load_pair(logits + i);
  }
  VecF capped(VecF x) const {
    if constexpr (general) {
      if (softcap > 0) return select(x == kMinusInfinity, x, softcap * tanh(scale_in * x));
    }
    return x;
  }
  float y(int64_t i) const { return capped(raw_part(i, 1))[0]; }
};

template <typename R>
float range_max(const R& row, int64_t begin, int64_t end) {
  VecF m0 = splat(kMinusInfinity), m1 = m0, m2 = m0, m3 = m0;
  int64_t i = begin;
  for (; i + 4 * kWidth <= end; i += 4 * kWidth) {
    m0 = max(m0, row.raw(i));
    m1 = max(m1, row.raw(i + kWidth));
    m2 = max(m2, row.raw(i + 2 * kWidth));
    m3 = max(m3, row.raw(i + 3 * kWidth));
  }
  for (; i + kWidth <= end; i += kWidth) m0 = max(m0, row.raw(i));
  if (i < end) m1 = max(m1, row.raw_part(i, end - i));
  return largest(max(max(m0, m1), max(m2, m3)));
}

template <bool general>
struct Accumulators {
  VecF max_y = splat(kMinusInfinity), e{}, e_d{}, e_e{};

  // d is kept in units of log 2 here.
  void add(VecF y, VecF shift, VecF factor2) {
    max_y = max(max_y, y);
    // 2^-150 rounds to 0; an infinite d would give 0 * inf.
    const VecF d = at_least(-150.0f, (y - shift) * factor2);
    const VecF value = exp2(d);
    e += value;
    e_d += value * d;
    if constexpr (general) e_e += value * value;
  }
};

// Adds entries [begin, end) to the sums, relative to `shift`; sums.max becomes their maximum.
template <typename T, bool general>
void add_range(const Row<T, general>& row, int64_t begin, int64_t end, float shift_y, float factor,
               RowSums& sums) {
  Accumulators<general> a, b;
  const VecF shift = splat(shift_y), factor2 = splat(exp2_factor(factor));
  int64_t i = begin;
  for (; i + 2 * kWidth <= end; i += 2 * kWidth) {
    const VecPair x = row.raw_pair(i);
    a.add(row.capped(x.a), shift, factor2);
    b.add(row.capped(x.b), shift, factor2);
  }
  for (; i < end; i += kWidth) {
    const VecF x = i + kWidth <= end ? row.raw(i) : row.raw_part(i, end - i);
    a.add(row.capped(x), shift, factor2);
  }
  sums.max = std::fmax(sums.max, largest(max(a.max_y, b.max_y)));
  sums.e += sum(a.e) + sum(b.e);
  sums.e_d += (sum(a.e_d) + sum(b.e_d)) * kLn2;
  if constexpr (general) sums.e_e += sum(a.e_e) + sum(b.e_e);
}

// The sums of a block without the token, but its maximum including the token.
template <typename T, bool general>
RowSums block_sums(const Row<T, general>& row, int64_t begin, int64_t end, int64_t token,
                   float max_so_far, float factor) {
  RowSums sums{kMinusInfinity, 0, 0, 0};
  // Only removed entries so far: -inf - -inf would be NaN.
  const float shift = max_so_far > kMinusInfinity ? max_so_far : 0;
  if (token >= begin && token < end) {
    add_range(row, begin, token, shift, factor, sums);
    add_range(row, token + 1, end, shift, factor, sums);
    sums.max = std::fmax(sums.max, row.y(token));
  } else {
    add_range(row, begin, end, shift, factor, sums);
  }
  return unbiased(sums, factor);
}

void raise_max(RowSums& sums, float value, float factor) {
  if (!(value > sums.max)) return;
  if (sums.max > kMinusInfinity) {
    const double shift = (double{sums.max} - value) * factor;
    const double shrink = std::exp(shift);
    sums.e_d = shrink > 0 ? (sums.e_d + shift * sums.e) * shrink : 0;
    sums.e *= shrink;
    sums.e_e *= shrink * shrink;
  }
  sums.max = value;
}

template <typename T, bool general>
RowSums reduce_row(const Row<T, general>& row, int64_t vocab, int64_t token, float factor) {
  RowSums sums{kMinusInfinity, 0, 0, 0};
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
    if (sums.max == kMinusInfinity) {
      raise_max(sums, row.capped(splat(range_max(row, begin, end)))[0], factor);
    }
    RowSums block = block_sums(row, begin, end, token, sums.max, factor);
    if (block.max > sums.max) {
      raise_max(sums, block.max, factor);
      block = block_sums(row, begin, end, token, sums.max, factor);
    }
    sums.e += block.e;
    sums.e_d += block.e_d;
    sums.e_e += block.e_e;
  }
  return sums;
}

template <typename T>
bool plain_forward(const Row<T, false>& row, int64_t vocab, int64_t token, float factor,
                   RowSums& sums, RowResult& result) {
  const auto block_max = [&](int64_t begin, int64_t end) { return range_max(row, begin, end); };
  if (!reduce_plain(row.logits, vocab, token, kBlock, factor, block_max, sums)) return false;
  result = finish_row(sums, row.y(token), factor);
  return is_exact(sums, result);
}

// y[0, count) of x with a soft-cap. Not inlined, so that a forward and `soft_cap_` give the same
// bits.
template <typename T>
[[gnu::noinline]] void cap_row(const T* x, int64_t count, float softcap, float scale_in, float* y) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(y + i, softcap * tanh(scale_in * load(x + i)));
  if (i < count) {
    const VecF last = softcap * tanh(scale_in * load_part(x + i, count - i, 0.0f));
    store_part(y + i, last, count - i);
  }
}

// The parameters of row r where its soft-cap has been applied, to values in this thread's memory.
template <typename T>
LogProbForward capped_row(LogProbForward p, int64_t r) {
  thread_local std::vector<float> y;
  y.resize(p.vocab);
  const auto* x = static_cast<const T*>(p.logits) + r * p.row_stride;
  cap_row(x, p.vocab, p.softcap, p.logit_scale / p.softcap, y.data());
  p.logits = y.data(), p.row_stride = 0, p.dtype = DType::f32;
  p.softcap = 0, p.logit_scale = 1;
  return p;
}

// The first token of row r, and that of row r + 1.
int64_t first_token(const LogitRows& p, int64_t r) { return p.cu_tokens ? p.cu_tokens[r] : r; }

// The results of token t of row r.
template <typename T, bool general>
void forward_token(const LogProbForward& p, int64_t r, int64_t t) {
  const int64_t local = local_label(p, t);
  const bool ignored = p.token_ids[t] == p.ignore_index;
  const bool here = !ignored && local >= 0 && local < p.vocab;
  RowSums sums{0, 0, 0, 0};
  RowResult result{0, 0, 0, 0};
  float token_y = kMinusInfinity;
  if (!ignored) {
    const Row<T, general> row(p, r);
    const float factor = row_factor(p, r);
    bool done = false;
    if constexpr (kFused && !general) {
      done = here && plain_forward(row, p.vocab, local, factor, sums, result);
    }
    if (!done) {
      sums = reduce_row(row, p.vocab, here ? local : -1, factor);
      if (here) token_y = row.y(local);
      if (!p.partial) result = finish_row(sums, token_y, factor);
    }
  }
  write_row(p, t, sums, token_y, result);
}

template <typename T, bool general>
void forward_row(const LogProbForward& p, int64_t r) {
  if constexpr (!general) {
    if (p.softcap > 0) return forward_row<float, false>(capped_row<T>(p, r), r);
  }
  for (int64_t t = first_token(p, r); t < first_token(p, r + 1); ++t)
    forward_token<T, general>(p, r, t);
}

// The gradient of the token's entry, from that of its y.
template <typename T, bool general>
float token_gradient(const Row<T, general>& row, int64_t token, float grad) {
  if constexpr (general) {
    if (row.raw_part(token, 1)[0] == kMinusInfinity) return 0;
    if (row.softcap > 0) {
      const float t = row.y(token) / row.softcap;
      return grad * ((1.0f - t * t) * (row.scale_in * row.softcap));
    }
  }
  return grad;
}

// A token that has a gradient.
struct TokenGradient {
  int64_t token;
  RowGradient own;
  float at_label;  // the gradient of its label's entry, from all tokens of the row
};

// Tokens with other labels add to the entry of this token's what they add to any.
inline float label_gradient(const LogProbBackward& p, const std::vector<TokenGradient>& tokens,
                            int64_t token) {
  const float log_p = p.negate ? -p.log_probs[token] : p.log_probs[token];
  const float prob = std::exp(log_p);
  float grad = 0;
  for (const auto& [other, own, _] : tokens) {
    if (p.token_ids[other] == p.token_ids[token]) {
      grad += own.token;
    } else if (prob > 0) {
      grad += prob * (own.constant + own.slope * log_p);
    }
  }
  return grad;
}

template <typename T, typename Out, bool general>
void backward_row(const LogProbBackward& p, int64_t r) {
  const int64_t out_row = grad_row(p, r);
  if (out_row < 0) return;
  Out* out = static_cast<Out*>(p.grad_logits) + out_row * p.grad_stride;
  const float factor = row_factor(p, r);
  thread_local std::vector<TokenGradient> tokens;
  tokens.clear();
  for (int64_t t = first_token(p, r); t < first_token(p, r + 1); ++t) {
    const RowGradient own = row_gradient(p, t, factor);
    if (!own.zero) tokens.push_back({t, own, 0});
  }
  if (tokens.empty()) {
    std::memset(out, 0, p.vocab * sizeof(Out));
    return;
  }
  const Row<T, general> row(p, r);
  float sum_constant = tokens[0].own.constant, sum_slope = tokens[0].own.slope;
  for (size_t i = 1; i < tokens.size(); ++i) {
    sum_constant += tokens[i].own.constant;
    sum_slope += tokens[i].own.slope;
  }
  // The references of its tokens may differ, but log p does not.
  const float* stats = p.row_stats + tokens[0].token * p.stats_width;
  // log p in units of log 2, the argument of exp2.
  const VecF shift = splat(stats[0]);
  const VecF factor2 = splat(exp2_factor(factor));
  const VecF log2_sum = splat(static_cast<float>(stats[1] * kLog2e));
  const VecF constant = splat(sum_constant);
  const VecF slope2 = splat(static_cast<float>(sum_slope * kLn2));
  const auto at = [&](VecF x) {
    const VecF y = row.capped(x);
    const VecF log2_p = at_least(-150.0f, (y - shift) * factor2 - log2_sum);
    VecF grad = exp2_below_63(log2_p) * (constant + slope2 * log2_p);
    if constexpr (general) {
      if (row.softcap > 0) {
        const VecF t = y / row.softcap;
        grad = grad * (1.0f - t * t) * (row.scale_in * row.softcap);
      }
      grad = select(x == kMinusInfinity, VecF{}, grad);  // also in a row of removed entries only
    }
    return grad;
  };
  // Read the logits of labels before they can be overwritten.
  const auto here = [&](int64_t label) { return label >= 0 && label < p.vocab; };
  for (auto& [token, own, at_label] : tokens) {
    const int64_t label = local_label(p, token);
    if (here(label)) at_label = token_gradient(row, label, label_gradient(p, tokens, token));
  }
  int64_t i = 0;
  if constexpr (!general) {
    for (; i + 2 * kWidth <= p.vocab; i += 2 * kWidth) {
      const VecPair x = row.raw_pair(i);
      if constexpr (std::is_same_v<T, Out>) {
        store_pair(out + i, {at(x.a), at(x.b)});
      } else {  // pairs have a different order in 16-bit types
        store(out + i, at(x.a));
        store(out + i + kWidth, at(x.b));
      }
    }
  }
  for (; i + kWidth <= p.vocab; i += kWidth) store(out + i, at(row.raw(i)));
  if (i < p.vocab) store_part(out + i, at(row.raw_part(i, p.vocab - i)), p.vocab - i);
  for (const auto& [token, own, at_label] : tokens) {
    const int64_t label = local_label(p, token);
    if (here(label)) out[label] = FromFloat<Out>::of(at_label);
  }
}

template <template <typename, bool> class Kernel, typename Params>
void for_each_row(const Params& p, bool general) {
  parallel_for(p.rows, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    const auto run = [&](auto kernel) {
      for (int64_t r = begin; r < end; ++r) kernel(p, r);
    };
    with_float(p.dtype, [&](auto logit) {
      using T = decltype(logit);
      general ? run(Kernel<T, true>{}) : run(Kernel<T, false>{});
    });
  });
}

template <typename T, bool general>
struct Forward {
  void operator()(const LogProbForward& p, int64_t row) const { forward_row<T, general>(p, row); }
};

template <typename T, bool general>
struct Backward {
  void operator()(const LogProbBackward& p, int64_t row) const {
    if constexpr (std::is_same_v<T, float>) {
      if (p.grad_dtype == DType::bf16) return backward_row<T, bf16, general>(p, row);
      if (p.grad_dtype == DType::f16) return backward_row<T, f16, general>(p, row);
    }
    backward_row<T, T, general>(p, row);
  }
};

}  // namespace

void log_prob_forward_cpu(const LogProbForward& p) {
  for_each_row<Forward>(p, p.vocab_mask || p.stats_width > 2 || p.partial);
}

void soft_cap_cpu(const SoftCap& p) {
  parallel_for(p.rows, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* logits = p.logits + row * p.row_stride;
      cap_row(logits, p.vocab, p.softcap, 1.0f / p.softcap, logits);
    }
  });
}

void log_prob_backward_cpu(const LogProbBackward& p) {
  if (p.vocab == 0) return;
  for_each_row<Backward>(p, p.softcap > 0 || p.vocab_mask);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
