// Attention over the cache; see params.h.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention/operands.h"
#include "attention/softmax.h"
#include "common/parallel.h"
#include "common/products.h"
#include "paged_attention/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kRows = 48;     // of a task: complete register tiles and vectors
constexpr int64_t kRunKeys = 64;  // keys of a block that are multiplied at once

// Unnormalized results of rows: sum_key 2^(score - maximum) value, and the sum of the weights.
struct Sums {
  Sums(float* memory, int64_t rows, int64_t value_dim)
      : values(memory), maximum(values + rows * value_dim), total(maximum + rows) {}
  static int64_t size(int64_t rows, int64_t value_dim) { return rows * (value_dim + 2); }

  float* values;           // [rows, value_dim]
  float *maximum, *total;  // [rows]
};

// Rows [first, first + count) of a key-value head of a sequence, row = query * group + g.
class RowGroup {
 public:
  RowGroup(const PagedAttention& p, int64_t sequence, int64_t kv_head, int64_t first, int64_t count)
      : sequence(sequence),
        kv_head(kv_head),
        count(count),
        first_(first),
        group_(p.heads / p.kv_heads),
        first_token_(p.query_start_loc[sequence]),
        first_position_(p.seq_lens[sequence] - p.query_start_loc[sequence + 1] + first_token_),
        window_(p.window) {}

  int64_t token(int64_t r) const { return first_token_ + (first_ + r) / group_; }
  int64_t head(int64_t r) const { return kv_head * group_ + (first_ + r) % group_; }
  // Row r sees the keys [first_key, end_key).
  int64_t first_key(int64_t r) const { return std::max<int64_t>(0, end_key(r) - window_); }
  int64_t end_key(int64_t r) const { return first_position_ + (first_ + r) / group_ + 1; }
  int64_t first_chain() const { return first_key(0) / kChain; }
  int64_t end_chain() const { return (end_key(count - 1) - 1) / kChain + 1; }

  int64_t sequence, kv_head, count;

 private:
  int64_t first_, group_, first_token_, first_position_, window_;
};

template <typename Step>
struct Scratch {
  explicit Scratch(const PagedAttention& p)
      : query(kRows, p.dim, false),
        scores(kRows * kChain),
        weights(scores, kRows * kChain),
        run(std::max(p.dim, p.value_dim) * kRunKeys),
        memory(2 * Sums::size(kRows, p.value_dim)),
        chain(memory, kRows, p.value_dim),
        joined(memory + Sums::size(kRows, p.value_dim), kRows, p.value_dim) {}

  Operand<Step> query;    // [rows, dim]
  bool finite[kRows];     // whether the query is
  Floats scores;          // [rows, keys of a chain]
  Weights<Step> weights;  // the same
  Floats run;             // keys or values of a run where the cache does not have them as steps
  Floats memory;
  Sums chain, joined;
};

// Keys or values of a run, in steps.
template <typename Step>
struct Run {
  const Step* data;
  int64_t stride;
};

template <typename T>
class PagedRows {
  using Step = StepOf<T>;
  using Cached = std::conditional_t<std::is_same_v<T, bf16>, Pair, float>;

 public:
  explicit PagedRows(const PagedAttention& p) : p_(p) {}

  // Sums of the rows over the keys of one chain.
  void attend(const RowGroup& rows, int64_t chain, Scratch<Step>& s, const Sums& out) const {
    const int64_t first = chain * kChain;
    const int64_t begin = std::max(first, rows.first_key(0) / kCacheUnit * kCacheUnit);
    const int64_t end = std::min(first + kChain, rows.end_key(rows.count - 1));
    for_runs(rows, begin, end, [&](const Cached* keys, const Cached*, int64_t j, int64_t n) {
      const int64_t vectors = (n + kWidth - 1) / kWidth;
      const Run<Step> run = in_steps({keys, p_.block_size}, p_.dim, vectors, s);
      multiply_rows(rows.count, vectors, p_.dim / kStep<Step>, s.query.along_dim(0),
                    s.query.dim / kStep<Step>, run, s.scores + (j - first), kChain, false);
    });
    for (int64_t r = 0; r < rows.count; ++r)
      out.maximum[r] = (p_.softcap > 0 ? weigh<true>(rows, r, first, begin, end, s)
                                       : weigh<false>(rows, r, first, begin, end, s));
    add_weights(rows.count, begin - first, end - first, s, out.total);
    for_runs(rows, begin, end, [&](const Cached*, const Cached* values, int64_t j, int64_t n) {
      const Step* weights = s.weights + (j - first) / kStep<Step>;
      const int64_t vectors = p_.value_dim / kWidth, complete = n / kStep<Step>;
      const auto add = [&](const Step* w, int64_t steps, Run<Step> run, bool accumulate) {
        multiply_rows(rows.count, vectors, steps, w, kChain / kStep<Step>, run, out.values,
                      p_.value_dim, accumulate);
      };
      if constexpr (kStep<Step> == 1) {
        add(weights, n, in_steps({values, p_.value_dim}, n, vectors, s), j > begin);
      } else {
        add(weights, complete, {values, p_.value_dim}, j > begin);
        if (n % kStep<Step>) {
          Step* last = reinterpret_cast<Step*>(+s.run);
          for (int64_t d = 0; d < p_.value_dim; ++d)
            last[d].bits = values[complete * p_.value_dim + d].bits & 0xFFFFu;
          add(weights + complete, 1, {last, p_.value_dim}, true);
        }
      }
    });
  }

  void load_queries(const RowGroup& rows, Scratch<Step>& s) const {
    for (int64_t r = 0; r < rows.count; ++r)
      s.finite[r] =
          load_row(row_of<T>(p_.query, rows.token(r), rows.head(r)), p_.dim, s.query.along_dim(r));
  }

  // Joins the chains of the rows, results_of(chain) each, and stores what they give.
  template <typename ResultsOf>
  void finish(const RowGroup& rows, Scratch<Step>& s, const ResultsOf& results_of) const {
    const Sums& sums = s.joined;
    std::fill_n(sums.values, rows.count * p_.value_dim, 0.0f);
    std::fill_n(sums.maximum, rows.count, kNoMaximum);
    std::fill_n(sums.total, rows.count, 0.0f);
    for (int64_t c = rows.first_chain(); c < rows.end_chain(); ++c) {
      const Sums chain = results_of(c);
      for (int64_t r = 0; r < rows.count; ++r) join(r, sums, chain);
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      if (!s.finite[r]) sums.total[r] = std::numeric_limits<float>::quiet_NaN();
      T* out =
          static_cast<T*>(p_.out) + rows.token(r) * p_.out_stride + rows.head(r) * p_.value_dim;
      store_row(out, sums.values + r * p_.value_dim, p_.value_dim, 1.0f / sums.total[r]);
    }
  }

 private:
  // Calls body(keys, values, j, n) for the keys [begin, end), n keys at j of one block at a time.
  template <typename Body>
  void for_runs(const RowGroup& rows, int64_t begin, int64_t end, const Body& body) const {
    const int32_t* table = p_.block_table + rows.sequence * p_.table_stride;
    for (int64_t j = begin, n; j < end; j += n) {
      const int64_t offset = j % p_.block_size;
      n = std::min({p_.block_size - offset, kRunKeys, end - j});
      const T* keys = static_cast<const T*>(p_.data) + table[j / p_.block_size] * p_.block_stride +
                      rows.kv_head * p_.head_stride;
      const T* values = keys + p_.block_size * p_.dim + offset * p_.value_dim;
      body(reinterpret_cast<const Cached*>(keys) + offset, reinterpret_cast<const Cached*>(values),
           j, n);
    }
  }

  // `count` numbers along the sum, a multiple of a step of the cache or followed by others.
  static Run<Step> in_steps(Run<Cached> run, int64_t count, int64_t vectors, Scratch<Step>& s) {
    if constexpr (std::is_same_v<Step, Cached>) {
      return run;
    } else {
      const int64_t stride = vectors * kWidth;
      for (int64_t i = 0; i < (count + 1) / 2; ++i) {
        for (int64_t v = 0; v < stride; v += kWidth) {
          const VecU bits = load_steps(run.data + i * run.stride + v);
          store(s.run + 2 * i * stride + v, (VecF)(bits << 16));
          store(s.run + (2 * i + 1) * stride + v, (VecF)(bits & 0xFFFF0000u));
        }
      }
      return {s.run, stride};
    }
  }

  // c[m, n] (+)= sum_k a[m, k] b[k, n] for any number of rows.
  static void multiply_rows(int64_t rows, int64_t vectors, int64_t steps, const Step* a,
                            int64_t lda, Run<Step> b, float* c, int64_t ldc, bool accumulate) {
    for (int64_t r = 0; r < rows; r += kGroup)
      multiply<Layout::rows>(std::min<int64_t>(kGroup, rows - r), vectors, steps, a + r * lda, lda,
                             b.data, b.stride, c + r * ldc, ldc, accumulate);
  }

  // Makes the weights of a row's scores; returns their maximum.
  template <bool kCapped>
  float weigh(const RowGroup& rows, int64_t r, int64_t first, int64_t begin, int64_t end,
              Scratch<Step>& s) const {
    const float factor = score_factor(p_.softmax_scale, p_.softcap), cap = p_.softcap * kLog2E;
    const int64_t first_key = rows.first_key(r), end_key = rows.end_key(r);
    float* scores = s.scores + r * kChain - first;
    VecF most = splat(kNoMaximum);
    for (int64_t j = begin; j < end; j += kWidth) {
      VecF x = score_of<kCapped>(load(scores + j), factor, cap);
      if (j < first_key || j + kWidth > end_key) {
        VecI visible;
        for (int lane = 0; lane < kWidth; ++lane)
          visible[lane] = -(first_key <= j + lane && j + lane < end_key);
        x = select(visible, x, splat(kMasked));
      }
      store(scores + j, x);
      most = max(x, most);
    }
    const VecF maximum = floor(splat(largest(most)));
    for (int64_t j = begin; j < end; j += kWidth) {
      const VecF weight = weight_of(load(scores + j), maximum);
      store(scores + j, weight);
      if constexpr (kStep<Step> > 1)
        store_rounded(s.weights + (r * kChain + j - first) / kStep<Step>, weight);
    }
    return maximum[0];
  }

  // total[r] = the sum of the weights of the keys [begin, end) of a chain, in ascending order.
  static void add_weights(int64_t rows, int64_t begin, int64_t end, const Scratch<Step>& s,
                          float* total) {
    for (int64_t r = 0; r < rows; r += kWidth) {
      VecF sums{};
      for (int64_t j = begin; j < end; j += kWidth) {
        VecU block[kWidth];
        for (int i = 0; i < kWidth; ++i)
          block[i] = (VecU)load(s.scores + std::min(r + i, rows - 1) * kChain + j);
        swap_blocks<1>(block);
        for (int i = 0; i < kWidth; ++i) sums += (VecF)block[i];
      }
      const int64_t count = std::min<int64_t>(kWidth, rows - r);
      for (int64_t i = 0; i < count; ++i) total[r + i] = sums[i];
    }
  }

  // Adds a chain of row r. The factors are powers of two.
  void join(int64_t r, const Sums& sums, const Sums& chain) const {
    const float maximum = std::max(sums.maximum[r], chain.maximum[r]);
    const float before = scale_down(splat(1.0f), splat(sums.maximum[r] - maximum))[0];
    const float now = scale_down(splat(1.0f), splat(chain.maximum[r] - maximum))[0];
    sums.maximum[r] = maximum;
    sums.total[r] = sums.total[r] * before + chain.total[r] * now;
    float* values = sums.values + r * p_.value_dim;
    const float* others = chain.values + r * p_.value_dim;
    for (int64_t d = 0; d < p_.value_dim; ++d) values[d] = values[d] * before + others[d] * now;
  }

  const PagedAttention& p_;
};

// A sequence of few rows has tasks of one chain each, for many threads; others of kRows rows.
struct Tasks {
  struct Chain {
    int64_t rows, chain;  // index in `of_chains`
  };

  explicit Tasks(const PagedAttention& p) : value_dim(p.value_dim) {
    const int64_t group = p.heads / p.kv_heads;
    for (int64_t i = 0; i < p.sequences; ++i) {
      const int64_t count = (p.query_start_loc[i + 1] - p.query_start_loc[i]) * group;
      for (int64_t first = 0; first < count; first += kRows) {
        for (int64_t head = 0; head < p.kv_heads; ++head)
          add({p, i, head, first, std::min(kRows, count - first)}, count <= kRows);
      }
    }
  }

  void add(const RowGroup& rows, bool few) {
    if (!few) {
      complete.push_back(rows);
      return;
    }
    results.push_back(results_size - rows.first_chain() * Sums::size(rows.count, value_dim));
    for (int64_t c = rows.first_chain(); c < rows.end_chain(); ++c) {
      chains.push_back({static_cast<int64_t>(of_chains.size()), c});
      results_size += Sums::size(rows.count, value_dim);
    }
    of_chains.push_back(rows);
  }

  Sums result(float* memory, int64_t rows, int64_t chain) const {
    const int64_t count = of_chains[rows].count;
    return {memory + results[rows] + chain * Sums::size(count, value_dim), count, value_dim};
  }

  std::vector<RowGroup> complete, of_chains;
  std::vector<Chain> chains;
  std::vector<int64_t> results;  // of chain 0 of each of `of_chains`
  int64_t results_size = 0;
  int64_t value_dim;
};

template <typename T>
void attention(const PagedAttention& p) {
  using Step = StepOf<T>;
  const PagedRows<T> paged(p);
  const Tasks tasks(p);
  const Floats results(tasks.results_size);
  const int64_t complete = tasks.complete.size();
  // The last rows of a sequence see most keys: they come first, for balance.
  for_each_task<Scratch<Step>>(p, complete + tasks.chains.size(), [&](int64_t i, auto& s) {
    if (i < complete) {
      const RowGroup& rows = tasks.complete[complete - 1 - i];
      paged.load_queries(rows, s);
      paged.finish(rows, s, [&](int64_t chain) {
        paged.attend(rows, chain, s, s.chain);
        return s.chain;
      });
    } else {
      const auto [index, chain] = tasks.chains[i - complete];
      paged.load_queries(tasks.of_chains[index], s);
      paged.attend(tasks.of_chains[index], chain, s, tasks.result(results, index, chain));
    }
  });
  for_each_task<Scratch<Step>>(p, tasks.of_chains.size(), [&](int64_t i, auto& s) {
    paged.load_queries(tasks.of_chains[i], s);
    paged.finish(tasks.of_chains[i], s,
                 [&](int64_t chain) { return tasks.result(results, i, chain); });
  });
}

}  // namespace

void paged_attention_cpu(const PagedAttention& p) {
  p.dtype == DType::bf16 ? attention<bf16>(p) : attention<float>(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
