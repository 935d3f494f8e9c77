// The backward; see params.h. Chunks come in reverse, and in each of them parts of kPart tokens,
// whose states are recomputed and kept in the second-level cache. Gradients of a state, D:
//
//   D += scale q grad_out^T           grad_q = scale S grad_out
//   grad_u = D^T k                    u = beta (v - S'^T k), S = S' + k u^T
//   grad_k = D u + S' r               r = -beta grad_u (0 without the delta rule)
//   D' = D + k r^T                    grad_g = sum(S' * D')
//   D = exp(g) D'                     of the state before the token
#include <map>

#include "linear_recurrence/block.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kPart = 16;
constexpr int64_t kParts = kChunk / kPart;

HE_SIMD VecF sum_columns(const Columns& c) {
  VecF v = c.part[0];
  for (int j = 1; j < kVectors; ++j) v += c.part[j];
  return v;
}

// Leaves the sum of the lanes of row i in lane i of rows[0].
template <int half>
HE_SIMD void fold_rows(VecF (&rows)[kWidth]) {
  VecI same{}, other{};
  for (int j = 0; j < kWidth; ++j) {
    same[j] = j & half ? kWidth + j : j;
    other[j] = j & half ? kWidth + j - half : j + half;
  }
  for (int i = 0; i < half; ++i) {
    const VecF a = rows[i], b = rows[i + half];
    rows[i] = __builtin_shuffle(a, b, same) + __builtin_shuffle(a, b, other);
  }
  if constexpr (half > 1) fold_rows<half / 2>(rows);
}

// Adds the sum of each row's lanes to `to`, for `count` rows.
void add_row_sums(const VecF* rows, int64_t count, float* to) {
  for_vectors(count, [&](int64_t begin, int64_t size) {
    VecF block[kWidth];
    for (int i = 0; i < kWidth; ++i) block[i] = i < size ? rows[begin + i] : VecF{};
    fold_rows<kWidth / 2>(block);
    store_first(to + begin, load_first(to + begin, size) + block[0], size);
  });
}

// A head of a tree.
template <bool channels, bool delta>
class Walk {
 public:
  explicit Walk(const LinearRecurrenceBackward& p)
      : p_(p),
        dim_(p.k_dim),
        rows_(p),
        state_(dim_),
        starts_(kParts * dim_),
        history_(kPart * dim_),
        gradient_(num_blocks(p) * dim_),
        q_rows_(dim_),
        k_rows_(dim_),
        g_rows_(dim_),
        grad_q_(kChunk * dim_),
        grad_k_(kChunk * dim_),
        grad_g_(kChunk * (channels ? dim_ : 1)) {}

  void run(int64_t tree, int64_t head) {
    head_ = head;
    for (int64_t i = p_.plan->trees[tree + 1]; i-- > p_.plan->trees[tree];) {
      run_segment(p_.plan->order[i]);
    }
  }

 private:
  void run_segment(int64_t index) {
    const Segment& s = p_.plan->segments[index];
    each_block([&](const Block& block, Columns* gradient) {
      const float* last = p_.grad_final ? head_state(p_.grad_final, index, head_, p_) : nullptr;
      read_state(p_, block, last, gradient);
    });
    if (const auto found = of_ends_.find(index); found != of_ends_.end()) {
      for (int64_t i = 0; i < num_blocks(p_) * dim_; ++i) add(gradient_[i], found->second[i]);
      of_ends_.erase(found);
    }
    const int64_t chunks = (s.end - s.begin + kChunk - 1) / kChunk;
    for (int64_t chunk = chunks; chunk-- > 0;) run_chunk(index, chunk);
    if (s.parent >= 0) {
      const auto [of_parent, is_new] = of_ends_.try_emplace(s.parent, num_blocks(p_) * dim_);
      for (int64_t i = 0; i < num_blocks(p_) * dim_; ++i) {
        if (is_new) {
          of_parent->second[i] = gradient_[i];
        } else {
          add(of_parent->second[i], gradient_[i]);
        }
      }
    } else if (p_.grad_initial) {
      each_block([&](const Block& block, Columns* gradient) {
        write_state(p_, block, gradient, head_state(p_.grad_initial, index, head_, p_));
      });
    }
  }

  void run_chunk(int64_t segment, int64_t chunk) {
    const Segment& s = p_.plan->segments[segment];
    const int64_t begin = s.begin + chunk * kChunk, count = std::min(kChunk, s.end - begin);
    const float* start = chunk == 0 ? start_of(p_, segment, head_)
                                    : head_state(p_.states, s.border_slot + chunk - 1, head_, p_);
    rows_.load_tokens(begin, count, head_);
    std::fill_n(&grad_q_[0], count * dim_, 0.0f);
    std::fill_n(&grad_k_[0], count * dim_, 0.0f);
    std::fill_n(&grad_g_[0], count * (channels ? dim_ : 1), 0.0f);
    std::fill_n(grad_beta_, count, 0.0f);
    each_block([&](const Block& block, Columns* gradient) {
      read_state(p_, block, start, state_);
      const int64_t parts = (count + kPart - 1) / kPart;
      for (int64_t part = 0; part < parts; ++part) {
        std::copy_n(&state_[0], dim_, &starts_[part * dim_]);
        if (part + 1 < parts) replay(begin, part * kPart, kPart, block, false);
      }
      for (int64_t part = parts; part-- > 0;) {
        const int64_t first = part * kPart, tokens = std::min(kPart, count - first);
        std::copy_n(&starts_[part * dim_], dim_, &state_[0]);
        replay(begin, first, tokens, block, true);
        for (int64_t t = tokens; t-- > 0;) step_back(begin, first + t, t, block, gradient);
      }
    });
    write_rows(begin, count);
  }

  // Runs tokens [first, first + count) of the chunk that begins at `begin` on state_, which ends
  // in the state after them, or with `keep` has each token's decayed state in history_.
  void replay(int64_t begin, int64_t first, int64_t count, const Block& block, bool keep) {
    Columns* to = keep ? &history_[0] : &state_[0];
    Columns seen = decay_state<channels, delta>(dim_, rows_.token(first), state_, to);
    for (int64_t t = 0; t < count; ++t) {
      const Columns v = load_row(p_.dtype, block, p_.v, begin + first + t, head_);
      updates_[t] = update_of<delta>(rows_.beta[first + t], v, seen);
      for (int j = 0; j < kVectors; ++j) {
        errors_[t].part[j] = delta ? v.part[j] - seen.part[j] : v.part[j];
      }
      const Token token = rows_.token(first + t);
      const Columns* from = keep ? &history_[t * dim_] : &state_[0];
      Columns none;
      if (t + 1 < count) {
        update_rows<channels, delta, true, false>(
            dim_, token, rows_.token(first + t + 1), updates_[t], from,
            keep ? &history_[(t + 1) * dim_] : &state_[0], none, seen);
      } else if (!keep) {
        update_rows<channels, delta, false, false>(dim_, token, token, updates_[t], from, state_,
                                                   none, seen);
      }
    }
  }

  // Token t of the part, which is token `row` of the chunk that begins at `begin`.
  void step_back(int64_t begin, int64_t row, int64_t t, const Block& block, Columns* gradient) {
    const Token token = rows_.token(row);
    const Columns* state = &history_[t * dim_];
    const Columns grad_out = load_row(p_.dtype, block, p_.grad_out, begin + row, head_);
    const Columns update = updates_[t];
    Sums sums{};
    for (int64_t i = 0; i < dim_; ++i) {
      const VecF q = splat(token.q[i]), k = splat(token.k[i]);
      VecF of_q{};
      for (int j = 0; j < kVectors; ++j) {
        const VecF d = gradient[i].part[j] + q * grad_out.part[j];
        sums.of[0].part[j] += d * k;
        if (p_.grad_q) of_q += (state[i].part[j] + k * update.part[j]) * grad_out.part[j];
        gradient[i].part[j] = d;
      }
      q_rows_[i] = of_q;
    }
    const Columns of_update = sums.of[0];
    const float beta = rows_.beta[row];
    Columns of_v, of_seen{}, of_beta;
    for (int j = 0; j < kVectors; ++j) {
      of_v.part[j] = of_update.part[j] * beta;
      of_beta.part[j] = of_update.part[j] * errors_[t].part[j];
      if constexpr (delta) of_seen.part[j] = -of_v.part[j];
    }
    VecF of_g{};
    for (int64_t i = 0; i < dim_; ++i) {
      const VecF k = splat(token.k[i]), a = decay_of<channels>(token, i);
      VecF of_k{}, of_channel{};
      for (int j = 0; j < kVectors; ++j) {
        const VecF d = gradient[i].part[j], s = state[i].part[j];
        if (p_.grad_k) {
          of_k += d * update.part[j];
          if constexpr (delta) of_k += s * of_seen.part[j];
        }
        const VecF before = delta ? d + k * of_seen.part[j] : d;
        if (p_.grad_g) of_channel += s * before;
        gradient[i].part[j] = before * a;
      }
      k_rows_[i] = of_k;
      if constexpr (channels) {
        g_rows_[i] = of_channel;
      } else {
        of_g += of_channel;
      }
    }
    if (p_.grad_q) add_row_sums(q_rows_, dim_, &grad_q_[row * dim_]);
    if (p_.grad_k) add_row_sums(k_rows_, dim_, &grad_k_[row * dim_]);
    if constexpr (channels) {
      if (p_.grad_g) add_row_sums(g_rows_, dim_, &grad_g_[row * dim_]);
    } else {
      grad_g_[row] += static_cast<float>(sum(of_g));
    }
    grad_beta_[row] += static_cast<float>(sum(sum_columns(of_beta)));
    if (p_.grad_v) store_row(p_.dtype, block, p_.grad_v, index_of(begin + row) * p_.v_dim, of_v);
  }

  // Writes the gradients of the tokens' rows, which now have the sums over all columns.
  void write_rows(int64_t begin, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t index = index_of(begin + t), width = channels ? dim_ : 1;
      write_row(&grad_q_[t * dim_], rows_.q(t), rows_.inverse_q[t], p_.scale,
                at(p_.grad_q, index * dim_));
      write_row(&grad_k_[t * dim_], rows_.k(t), rows_.inverse_k[t], 1.0f,
                at(p_.grad_k, index * dim_));
      if (p_.grad_g) std::copy_n(&grad_g_[t * width], width, p_.grad_g + index * width);
      if (p_.grad_beta) p_.grad_beta[index] = grad_beta_[t];
    }
  }

  // row = scale x / |x|: the gradient of x, given that of the row; none where `to` is null.
  void write_row(const float* gradient, const float* row, float inverse, float scale, float* to) {
    if (!to) return;
    float along = 0.0f;
    if (p_.l2_norm) {
      VecF products{};
      for_vectors(dim_, [&](int64_t i, int64_t count) {
        products += load_first(gradient + i, count) * load_first(row + i, count);
      });
      along = static_cast<float>(sum(products)) / scale;
    }
    for_vectors(dim_, [&](int64_t i, int64_t count) {
      const VecF direct = load_first(gradient + i, count) * scale;
      store_first(to + i, (direct - load_first(row + i, count) * along) * inverse, count);
    });
  }

  static float* at(float* rows, int64_t offset) { return rows ? rows + offset : nullptr; }

  int64_t index_of(int64_t token) const { return token * p_.v_heads + head_; }

  static void add(Columns& to, const Columns& c) {
    for (int j = 0; j < kVectors; ++j) to.part[j] += c.part[j];
  }

  template <typename Body>
  void each_block(const Body& body) {
    for (int64_t i = 0; i < num_blocks(p_); ++i) body(block_of(p_, i), &gradient_[i * dim_]);
  }

  const LinearRecurrenceBackward& p_;
  const int64_t dim_;
  ChunkRows rows_;
  Buffer<Columns> state_, starts_, history_;  // [k_dim], [parts, k_dim], [tokens of a part, k_dim]
  Buffer<Columns> gradient_;                  // [blocks, k_dim], of the state
  Buffer<VecF> q_rows_, k_rows_, g_rows_;     // [k_dim], to be summed over their lanes
  Buffer<float> grad_q_, grad_k_, grad_g_;    // of the chunk's tokens
  float grad_beta_[kChunk];
  Columns updates_[kPart], errors_[kPart];
  std::map<int64_t, Buffer<Columns>> of_ends_;  // what children add to their parent's last state
  int64_t head_ = 0;
};

template <bool channels, bool delta>
void run(const LinearRecurrenceBackward& p) {
  const int64_t trees = std::ssize(p.plan->trees) - 1;
  for_each_task<Walk<channels, delta>>(p, trees * p.v_heads, [&](int64_t task, auto& walk) {
    walk.run(task / p.v_heads, task % p.v_heads);
  });
}

}  // namespace

void linear_recurrence_backward_cpu(const LinearRecurrenceBackward& p) {
  with_options(p, [&](auto channels, auto delta) { run<channels(), delta()>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
