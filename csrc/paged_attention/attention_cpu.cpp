// Attention over the cache; see params.h.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention/operands.h"
#include "attention/softmax.h"
#include "common/parallel.h"
#include "common/products.h"
#include "common/tasks.h"
#include "paged_attention/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kRows = 48;     // of a task: complete register tiles and vectors
constexpr int64_t kRunKeys = 64;  // keys of a block that are multiplied at once

// Unnormalized results of rows: sum_key 2^(score - maximum) value, and the sum of the weights.
struct Sums {
  Sums(float* memory, int64_t rows, int64_t value_dim)
      : values(memory), maximum(values + rows * value_dim), total(maximum + rows) {}
  // Complete cache lines: threads write the sums of neighbouring tasks at the same time.
  static int64_t size(int64_t rows, int64_t value_dim) {
    constexpr int64_t kLine = 16;
    return (rows * (value_dim + 2) + kLine - 1) / kLine * kLine;
  }

  void clear(int64_t rows, int64_t value_dim) const {
    std::fill_n(values, rows * value_dim, 0.0f);
    std::fill_n(maximum, rows, kNoMaximum);
    std::fill_n(total, rows, 0.0f);
  }

  float* values;           // [rows, value_dim]
  float *maximum, *total;  // [rows]
};

// Rows [first, first + count) of any key-value head of a sequence, row = query * group + g.
class RowGroup {
 public:
  RowGroup(const PagedAttention& p, int64_t sequence, int64_t first, int64_t count)
      : sequence(sequence),
        count(count),
        first_(first),
        group_(p.heads / p.kv_heads),
        first_token_(p.query_start_loc[sequence]),
        first_position_(p.seq_lens[sequence] - p.query_start_loc[sequence + 1] + first_token_),
        window_(p.window) {}

  int64_t token(int64_t r) const { return first_token_ + (first_ + r) / group_; }
  int64_t head(int64_t kv_head, int64_t r) const {
    return kv_head * group_ + (first_ + r) % group_;
  }
  // Row r sees the keys [first_key, end_key).
  int64_t first_key(int64_t r) const { return std::max<int64_t>(0, end_key(r) - window_); }
  int64_t end_key(int64_t r) const { return first_position_ + (first_ + r) / group_ + 1; }
  int64_t first_chain() const { return first_key(0) / kChain; }
  int64_t end_chain() const { return (end_key(count - 1) - 1) / kChain + 1; }

  int64_t sequence, count;

 private:
  int64_t first_, group_, first_token_, first_position_, window_;
};

template <typename Step>
struct Scratch {
  explicit Scratch(const PagedAttention& p)
      : query(kRows, p.dim, false),
        scores(kRows * kRunKeys),
        weights(scores, kRows * kRunKeys),
        last(p.value_dim),
        memory(2 * Sums::size(kRows, p.value_dim)),
        chain(memory, kRows, p.value_dim),
        joined(memory + Sums::size(kRows, p.value_dim), kRows, p.value_dim) {}

  Operand<Step> query;    // [rows of all heads, dim]
  bool finite[kRows];     // whether the query is
  Floats scores;          // [rows, keys of a run], then the weights
  Weights<Step> weights;  // the same
  Buffer<Pair> last;      // values of the last key where it has no other one in its pair
  PrefetchStream ahead;
  Floats memory;
  Sums chain, joined;
};

template <typename T>
class PagedRows {
  using Step = StepOf<T>;
  using Cached = std::conditional_t<std::is_same_v<T, bf16>, Pair, float>;
  // What multiplies it: rounded to pairs where an instruction multiplies these.
  using Factor = std::conditional_t<std::is_same_v<Step, Cached>, Step, WidePair>;
  static constexpr int64_t kNumbers = sizeof(Cached) / sizeof(T);

  struct Matrix {
    const Cached* data;
    int64_t stride;
  };

 public:
  // Keys [j, j + count) of a head, of one block; none by default.
  struct Run {
    Matrix keys{}, values{};
    int64_t j = 0, count = 0;
  };

  explicit PagedRows(const PagedAttention& p)
      : p_(p), factor_(score_factor(p.softmax_scale, p.softcap)), cap_(p.softcap * kLog2E) {}

  // The queries of a head, to the rows of the scratch from `row` on.
  void load_queries(const RowGroup& rows, int64_t head, int64_t row, Scratch<Step>& s) const {
    for (int64_t r = 0; r < rows.count; ++r)
      s.finite[row + r] = load_row(p_.query.template row<T>(rows.token(r), rows.head(head, r)),
                                   p_.dim, s.query.along_dim(row + r));
  }

  Run first_run(const RowGroup& rows, int64_t chain, int64_t head) const {
    // Vectors of keys begin at multiples of their size.
    const int64_t seen = rows.first_key(0) / kCacheUnit * kCacheUnit;
    return run_at(rows, head, std::max(chain * kChain, seen), end_of(rows, chain));
  }

  // Sums over the keys of one chain, for the heads [head, end_head), whose queries are loaded. A
  // block has the heads one after the other: it is read as it lies in memory. `following` is what
  // is read next, and prefetched.
  template <typename SumsOf>
  void attend(const RowGroup& rows, int64_t chain, int64_t head, int64_t end_head, Scratch<Step>& s,
              const Run& following, const SumsOf& sums_of) const {
    for (int64_t h = head; h < end_head; ++h) sums_of(h).clear(rows.count, p_.value_dim);
    const int64_t end = end_of(rows, chain);
    Run run = first_run(rows, chain, head);
    for (int64_t h = head; run.j < end;) {
      const int64_t next_head = h + 1 < end_head ? h + 1 : head;
      const int64_t next = next_head > h ? run.j : run.j + run.count;
      const Run next_run = next < end ? run_at(rows, next_head, next, end) : following;
      prefetch(next_run, s.ahead);
      add_run(rows, (h - head) * rows.count, run, s, sums_of(h));
      if (next >= end) return;
      run = next_run, h = next_head;
    }
  }

  // Joins the chains of the rows of a head, sums_of(chain) each, and stores what they give.
  template <typename SumsOf>
  void finish(const RowGroup& rows, int64_t head, Scratch<Step>& s, const SumsOf& sums_of) const {
    const Sums& sums = s.joined;
    sums.clear(rows.count, p_.value_dim);
    for (int64_t c = rows.first_chain(); c < rows.end_chain(); ++c) {
      const Sums chain = sums_of(c);
      for (int64_t r = 0; r < rows.count; ++r) join(r, sums, chain);
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      if (!s.finite[r]) sums.total[r] = std::numeric_limits<float>::quiet_NaN();
      const int64_t query_head = rows.head(head, r);
      const RowEnd end(sums.maximum[r], sums.total[r], p_.sinks, query_head);
      T* out = static_cast<T*>(p_.out) + rows.token(r) * p_.out_stride + query_head * p_.value_dim;
      store_row(out, sums.values + r * p_.value_dim, p_.value_dim, end.factor);
    }
  }

 private:
  static int64_t end_of(const RowGroup& rows, int64_t chain) {
    return std::min((chain + 1) * kChain, rows.end_key(rows.count - 1));
  }

  Run run_at(const RowGroup& rows, int64_t head, int64_t j, int64_t end) const {
    const int64_t offset = j % p_.block_size;
    const int32_t block = p_.block_table[rows.sequence * p_.table_stride + j / p_.block_size];
    const T* keys =
        static_cast<const T*>(p_.data) + block * p_.block_stride + head * p_.head_stride;
    const T* values = keys + p_.block_size * p_.dim + offset * p_.value_dim;
    return {{reinterpret_cast<const Cached*>(keys) + offset, p_.block_size},
            {reinterpret_cast<const Cached*>(values), p_.value_dim},
            j,
            std::min({p_.block_size - offset, kRunKeys, end - j})};
  }

  // Lets the next steps prefetch a run: a block from its first keys to its last values; of a block
  // of several runs, between whose keys others lie, the values alone.
  void prefetch(const Run& run, PrefetchStream& ahead) const {
    const Cached* begin = p_.block_size > kRunKeys ? run.values.data : run.keys.data;
    const Cached* end = run.values.data + run.count / kNumbers * p_.value_dim;
    ahead.begin(begin, (end - begin) * sizeof(Cached));
  }

  void add_run(const RowGroup& rows, int64_t row, const Run& run, Scratch<Step>& s,
               const Sums& sums) const {
    const int64_t vectors = (run.count + kWidth - 1) / kWidth;
    multiply_rows(rows.count, vectors, p_.dim, s.query.along_dim(row), s.query.dim, run.keys,
                  s.scores, kRunKeys, false, s.ahead);
    for (int64_t r = 0; r < rows.count; ++r)
      p_.softcap > 0 ? weigh<true>(rows, r, run, s, sums) : weigh<false>(rows, r, run, s, sums);
    add_weights(rows.count, run.count, s, sums.total);
    const auto add = [&](int64_t begin, int64_t count, Matrix values) {
      multiply_rows(rows.count, p_.value_dim / kWidth, count, s.weights + begin / kStep<Step>,
                    kRunKeys, values, sums.values, p_.value_dim, true, s.ahead);
    };
    const int64_t odd = run.count % kNumbers;
    add(0, run.count - odd, run.values);
    if constexpr (kNumbers > 1) {
      if (!odd) return;
      // The other number of a pair is of no key of the sequence, and may be NaN.
      const Pair* last = run.values.data + run.count / 2 * p_.value_dim;
      for (int64_t d = 0; d < p_.value_dim; ++d) s.last[d].bits = last[d].bits & 0xFFFFu;
      add(run.count - odd, kNumbers, {s.last, p_.value_dim});
    }
  }

  // c[m, n] (+)= sum_k a[m, k] b[k, n] over `count` numbers k, for any number of rows of `a_size`
  // numbers.
  static void multiply_rows(int64_t rows, int64_t vectors, int64_t count, const Step* a,
                            int64_t a_size, Matrix b, float* c, int64_t ldc, bool accumulate,
                            PrefetchStream& ahead) {
    const Factor* factors = reinterpret_cast<const Factor*>(a);
    const int64_t lda = a_size / kNumbers;
    // Tiles of about as many rows each: one of a single row would take as long as one of four.
    const int64_t tiles = (rows + kGroup - 1) / kGroup;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t r = rows * i / tiles;
      multiply<Layout::rows>(rows * (i + 1) / tiles - r, vectors, count / kNumbers,
                             factors + r * lda, lda, b.data, b.stride, c + r * ldc, ldc, accumulate,
                             ahead);
    }
  }

  // Makes the weights of a row's scores, by a maximum that may grow.
  template <bool kCapped>
  void weigh(const RowGroup& rows, int64_t r, const Run& run, Scratch<Step>& s,
             const Sums& sums) const {
    const int64_t first = rows.first_key(r) - run.j, end = rows.end_key(r) - run.j;
    float* scores = s.scores + r * kRunKeys;
    VecF most = splat(sums.maximum[r]);
    for (int64_t j = 0; j < run.count; j += kWidth) {
      VecF x = score_of<kCapped>(load(scores + j), factor_, cap_);
      if (j < first || j + kWidth > end) {
        VecI visible;
        for (int lane = 0; lane < kWidth; ++lane)
          visible[lane] = -(first <= j + lane && j + lane < end);
        x = select(visible, x, splat(kMasked));
      }
      store(scores + j, x);
      most = max(x, most);
    }
    VecF maximum = splat(sums.maximum[r]);
    const bool grows = lane_bits(floor(most) > maximum) != 0;
    if (grows) maximum = floor(splat(largest(most)));
    for (int64_t j = 0; j < run.count; j += kWidth) {
      const VecF weight = weight_of(load(scores + j), maximum);
      store(scores + j, weight);
      if constexpr (kStep<Step> > 1)
        store_rounded(s.weights + (r * kRunKeys + j) / kStep<Step>, weight);
    }
    if (!grows) return;
    const float decay = scale_down(splat(1.0f), splat(sums.maximum[r]) - maximum)[0];
    float* values = sums.values + r * p_.value_dim;
    for (int64_t d = 0; d < p_.value_dim; ++d) values[d] *= decay;
    sums.total[r] *= decay;
    sums.maximum[r] = maximum[0];
  }

  // total[r] += the weights of the keys of a run, in ascending order.
  static void add_weights(int64_t rows, int64_t keys, Scratch<Step>& s, float* total) {
    constexpr int kSums = 8;  // rows at a time: each is a chain of additions
    for (int64_t r = 0; r < rows; r += kSums) {
      const float* weights[kSums];
      float sums[kSums];
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        const int64_t row = std::min(r + i, rows - 1);
        weights[i] = s.scores + row * kRunKeys, sums[i] = total[row];
      }
      for (int64_t j = 0; j < keys; ++j) {
        s.ahead();
#pragma GCC unroll 8
        for (int i = 0; i < kSums; ++i) sums[i] += weights[i][j];
      }
      std::copy_n(sums, std::min<int64_t>(kSums, rows - r), total + r);
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
  const float factor_, cap_;
};

// Sequences of few rows have tasks of one chain and several heads, to occupy many threads and to
// read blocks as they lie in memory; others have tasks of kRows rows of one head.
struct Tasks {
  struct Task {
    int64_t rows;            // index in `groups`
    int64_t head, end_head;  // key-value heads
    int64_t chain;           // -1: all
  };

  explicit Tasks(const PagedAttention& p) : p(p) {
    const int64_t group = p.heads / p.kv_heads;
    for (int64_t i = 0; i < p.sequences; ++i) {
      const int64_t count = (p.query_start_loc[i + 1] - p.query_start_loc[i]) * group;
      for (int64_t first = 0; first < count; first += kRows) {
        groups.emplace_back(p, i, first, std::min(kRows, count - first));
        results.push_back(count <= kRows ? results_size : -1);
        if (count > kRows) continue;
        results_size += (groups.back().end_chain() - groups.back().first_chain()) * p.kv_heads *
                        Sums::size(count, p.value_dim);
        num_chains += groups.back().end_chain() - groups.back().first_chain();
      }
    }
    // The last rows of a sequence see most keys: they come first, for balance.
    for (int64_t i = groups.size() - 1; i >= 0; --i) {
      for (int64_t head = 0; head < p.kv_heads && results[i] < 0; ++head)
        all.push_back({i, head, head + 1, -1});
    }
    for (int64_t i = 0; i < static_cast<int64_t>(groups.size()); ++i) {
      if (results[i] >= 0) add_chains(i);
    }
  }

  void add_chains(int64_t i) {
    const int64_t parts = std::min(p.kv_heads, 4 * p.num_threads / num_chains + 1);
    const int64_t heads = std::min(kRows / groups[i].count, (p.kv_heads + parts - 1) / parts);
    for (int64_t chain = groups[i].first_chain(); chain < groups[i].end_chain(); ++chain) {
      for (int64_t head = 0; head < p.kv_heads; head += heads)
        all.push_back({i, head, std::min(p.kv_heads, head + heads), chain});
    }
  }

  // Of a chain and a head of groups[i].
  Sums result(float* memory, int64_t i, int64_t chain, int64_t head) const {
    const int64_t count = groups[i].count;
    const int64_t at = (chain - groups[i].first_chain()) * p.kv_heads + head;
    return {memory + results[i] + at * Sums::size(count, p.value_dim), count, p.value_dim};
  }

  const PagedAttention& p;
  std::vector<RowGroup> groups;
  std::vector<int64_t>
      results;  // of each group; -1: tasks have all chains and store what they give
  std::vector<Task> all;
  int64_t num_chains = 0, results_size = 0;
};

template <typename T>
void attention(const PagedAttention& p) {
  using Step = StepOf<T>;
  const PagedRows<T> paged(p);
  const Tasks tasks(p);
  const Floats results(tasks.results_size);
  const int64_t count = tasks.all.size();
  for_each_task_ahead<Scratch<Step>>(p, count, [&](int64_t i, int64_t next, Scratch<Step>& s) {
    const auto [index, head, end_head, chain] = tasks.all[i];
    const RowGroup& rows = tasks.groups[index];
    for (int64_t h = head; h < end_head; ++h)
      paged.load_queries(rows, h, (h - head) * rows.count, s);
    if (chain >= 0) {
      typename PagedRows<T>::Run following;
      if (next < count) {
        const Tasks::Task& task = tasks.all[next];
        following = paged.first_run(tasks.groups[task.rows], task.chain, task.head);
      }
      paged.attend(rows, chain, head, end_head, s, following,
                   [&](int64_t h) { return tasks.result(results, index, chain, h); });
      return;
    }
    paged.finish(rows, head, s, [&](int64_t c) {
      paged.attend(rows, c, head, end_head, s, {}, [&](int64_t) { return s.chain; });
      return s.chain;
    });
  });
  for_each_task<Scratch<Step>>(p, tasks.groups.size(), [&](int64_t i, auto& s) {
    for (int64_t head = 0; head < p.kv_heads && tasks.results[i] >= 0; ++head) {
      paged.load_queries(tasks.groups[i], head, 0, s);
      paged.finish(tasks.groups[i], head, s,
                   [&](int64_t chain) { return tasks.result(results, i, chain, head); });
    }
  });
}

}  // namespace

void paged_attention_cpu(const PagedAttention& p) {
  with_factor<float, bf16>(p.dtype, [&](auto type) { attention<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
