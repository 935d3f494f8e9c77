// The forward; see params.h.
#include "linear_recurrence/block.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// A head of a tree, for a range of blocks of columns: the unit of work of a thread.
template <bool channels, bool delta>
class Walk {
 public:
  Walk(const LinearRecurrenceForward& p) : p_(p), rows_(p), state_(num_blocks(p) * p.k_dim) {}

  void run(int64_t tree, int64_t head, int64_t first_block, int64_t end_block) {
    head_ = head, first_block_ = first_block, end_block_ = end_block;
    for (int64_t i = p_.plan->trees[tree]; i < p_.plan->trees[tree + 1]; ++i) {
      run_segment(p_.plan->order[i]);
    }
  }

 private:
  void run_segment(int64_t index) {
    const Segment& s = p_.plan->segments[index];
    each_block([&](const Block& block, Columns* state) {
      const float* start = start_of(p_, index, head_);
      read_state(p_, block, start, state);
    });
    for (int64_t begin = s.begin; begin < s.end; begin += kChunk) {
      if (begin > s.begin && s.border_slot >= 0) {
        keep(p_.states, s.border_slot + (begin - s.begin) / kChunk - 1);
      }
      const int64_t count = std::min(kChunk, s.end - begin);
      rows_.load_tokens(begin, count, head_);
      each_block(
          [&](const Block& block, Columns* state) { run_chunk(begin, count, block, state); });
    }
    if (s.end_slot >= 0) keep(p_.states, s.end_slot);
    if (p_.final_states) keep(p_.final_states, index);
    if (p_.slots) write_to(cached_state(p_, index, head_));
  }

  void run_chunk(int64_t begin, int64_t count, const Block& block, Columns* state) {
    Columns seen = decay_state<channels, delta>(p_.k_dim, rows_.token(0), state, state);
    for (int64_t t = 0; t < count; ++t) {
      const Columns v = load_row(p_.dtype, block, p_.v, begin + t, head_);
      const Columns update = update_of<delta>(rows_.beta[t], v, seen);
      const Token token = rows_.token(t);
      Columns out;
      if (t + 1 < count) {
        update_rows<channels, delta, true, true>(p_.k_dim, token, rows_.token(t + 1), update, state,
                                                 state, out, seen);
      } else {
        update_rows<channels, delta, false, true>(p_.k_dim, token, token, update, state, state, out,
                                                  seen);
      }
      const int64_t index = (begin + t) * p_.v_heads + head_;
      store_row(p_.dtype, block, p_.out, index * p_.v_dim, out);
    }
  }

  void keep(float* states, int64_t slot) { write_to(head_state(states, slot, head_, p_)); }

  void write_to(float* to) {
    each_block([&](const Block& block, Columns* state) { write_state(p_, block, state, to); });
  }

  template <typename Body>
  void each_block(const Body& body) {
    for (int64_t i = first_block_; i < end_block_; ++i) {
      body(block_of(p_, i), state_ + i * p_.k_dim);
    }
  }

  const LinearRecurrenceForward& p_;
  ChunkRows rows_;
  Buffer<Columns> state_;  // [blocks, k_dim]
  int64_t head_ = 0, first_block_ = 0, end_block_ = 0;
};

template <bool channels, bool delta>
void run(const LinearRecurrenceForward& p) {
  const int64_t trees = std::ssize(p.plan->trees) - 1, blocks = num_blocks(p);
  // Few heads for many threads: a head's columns are split, which changes no bit.
  const int64_t parts =
      std::clamp<int64_t>(2 * p.num_threads / std::max<int64_t>(trees * p.v_heads, 1), 1, blocks);
  for_each_task<Walk<channels, delta>>(p, trees * p.v_heads * parts, [&](int64_t task, auto& walk) {
    const int64_t part = task % parts, head = task / parts % p.v_heads;
    walk.run(task / parts / p.v_heads, head, blocks * part / parts, blocks * (part + 1) / parts);
  });
}

}  // namespace

void linear_recurrence_cpu(const LinearRecurrenceForward& p) {
  with_options(p, [&](auto channels, auto delta) { run<channels(), delta()>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
