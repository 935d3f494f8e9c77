#include <algorithm>
#include <vector>

#include "common/binding.h"
#include "common/parallel.h"
#include "logprob/options.h"
#include "logprob/params.h"
#include "sparse_linear/params.h"

namespace hybridengine {

namespace {

Arguments fill(SparseRows& p, int64_t& entries, In hidden, In weight, In ids, In ends,
               int64_t first_id) {
  const Arguments given("sparse_linear_token_log_probs", "hidden", hidden);
  given.on_cpu();
  const ScalarType type = hidden.scalar_type();
  int64_t rows = 0;
  p.dtype = given.dtype("hidden", type);
  p.hidden = given.rows("hidden", hidden, type, {&p.rows, &p.width});
  p.weight = given.rows("weight", weight, type, {&p.vocab, p.width});
  p.ids = given.data<int32_t>("kept_ids", ids, {&entries});
  p.ends = given.ends("cu_kept", ends, &rows, entries, "kept_ids", true);
  given.expect(rows == p.rows, "cu_kept is for ", rows, " rows; expected ", p.rows);
  p.first_id = given.number("first_id", first_id, 0, INT32_MAX);  // as ids are int32
  return given;
}

Tensor sparse_logits(In hidden, In weight, In ids, In ends, int64_t first_id) {
  SparseLogits p{};
  int64_t entries = 0;
  const Arguments given = fill(p, entries, hidden, weight, ids, ends, first_id);
  Tensor logits = given.make(p.logits, {entries});
  given.run(p, sparse_logits_cpu);
  return logits;
}

// -> log_probs and entropy [T]: those that token_log_probs has of a vocabulary of the row's entries
// alone, in their order. logits: [K], of the entries. Options have no mask and no range.
std::vector<Tensor> sparse_log_probs(In logits, In ids, In ends, In token_ids,
                                     const LogProbOptions& options) {
  const Arguments given("sparse_linear_token_log_probs", "logits", logits);
  given.on_cpu();
  LogProbForward all{};
  int64_t entries = 0;
  const float* first = given.data<float>("logits", logits, {&entries});
  const int32_t* of_entry = given.data<int32_t>("kept_ids", ids, {entries});
  const int32_t* end = given.ends("cu_kept", ends, &all.rows, entries, "kept_ids", true);
  const int64_t* tokens = given.data<int64_t>("token_ids", token_ids, {all.rows});
  const float* of_row = given.data<float>("temperature", options.temperatures, {all.rows});
  all.dtype = DType::f32;
  all.temperature = static_cast<float>(options.temperature);
  all.logit_scale = static_cast<float>(options.logit_scale);
  all.softcap = static_cast<float>(options.softcap);
  all.negate = options.negate;
  all.ignore_index = -1;
  all.num_threads = 1;
  all.stats_width = 2;
  std::vector<Tensor> out{given.make(all.log_probs, {all.rows}),
                          given.make(all.entropy, {all.rows})};
  const Tensor stats = given.make(all.row_stats, {all.rows, all.stats_width});
  const int threads = get_num_threads();
  without_gil([&] {
    parallel_for(all.rows, 64, threads, [&](int64_t begin, int64_t last) {
      for (int64_t row = begin; row < last; ++row) {
        LogProbForward p = all;
        const int32_t *from = of_entry + end[row], *to = of_entry + end[row + 1];
        const int32_t* found = std::lower_bound(from, to, tokens[row]);
        // Past the row's end: log-prob -inf.
        int64_t place = found < to && *found == tokens[row] ? found - from : to - from;
        if (tokens[row] == options.ignore_index) place = -1;
        p.rows = 1;
        p.vocab = p.row_stride = to - from;
        p.logits = first + end[row];
        p.token_ids = &place;
        p.temperatures = of_row ? of_row + row : nullptr;
        p.log_probs += row, p.entropy += row, p.row_stats += row * p.stats_width;
        log_prob_forward_cpu(p);
      }
    });
  });
  return out;
}

Tensor sparse_hidden_grad(In hidden, In weight, In ids, In ends, int64_t first_id, In grad_logits) {
  SparseHiddenGrad p{};
  int64_t entries = 0;
  const Arguments given = fill(p, entries, hidden, weight, ids, ends, first_id);
  p.grad_logits = given.data<float>("grad_logits", grad_logits, {entries});
  Tensor grad = given.make(p.hidden_grad, {p.rows, p.width}, hidden.scalar_type());
  given.run(p, sparse_hidden_grad_cpu);
  return grad;
}

// Sorts the entries by id (counting sort, stable) and runs the kernel over them.
void add_weight_grad(SparseWeightGrad& p, int64_t entries) {
  std::vector<int64_t> begin(p.vocab + 1, 0);
  const auto local = [&](int64_t i) { return p.ids[i] - p.first_id; };
  const auto is_local = [&](int64_t i) { return local(i) >= 0 && local(i) < p.vocab; };
  for (int64_t i = 0; i < entries; ++i) begin[is_local(i) ? local(i) + 1 : 0] += is_local(i);
  for (int64_t id = 0; id < p.vocab; ++id) begin[id + 1] += begin[id];
  std::vector<int32_t> entry(begin[p.vocab]);
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t i = 0; i < entries; ++i) {
    if (is_local(i)) entry[next[local(i)]++] = static_cast<int32_t>(i);
  }
  p.entry = entry.data();
  p.begin = begin.data();
  sparse_weight_grad_cpu(p);
}

// Into `out`, which is of the weight's dtype, or float32 to add to.
void sparse_weight_grad(In hidden, In weight, In ids, In ends, int64_t first_id, In grad_logits,
                        Tensor& out, bool accumulate) {
  SparseWeightGrad p{};
  int64_t entries = 0;
  const Arguments given = fill(p, entries, hidden, weight, ids, ends, first_id);
  const ScalarType type = accumulate ? kFloat : weight.scalar_type();
  p.grad_logits = given.data<float>("grad_logits", grad_logits, {entries});
  p.weight_grad = given.data("main_grad", out, type, {p.vocab, p.width});
  p.grad_dtype = dtype_of(type);
  p.accumulate = accumulate;
  p.num_threads = get_num_threads();
  without_gil([&] { add_weight_grad(p, entries); });
}

}  // namespace

void register_sparse_linear(py::module_& m) {
  def(m, "sparse_logits", &sparse_logits, "hidden weight ids ends first_id");
  def(m, "sparse_log_probs", &sparse_log_probs, "logits ids ends token_ids options");
  def(m, "sparse_hidden_grad", &sparse_hidden_grad, "hidden weight ids ends first_id grad_logits");
  def(m, "sparse_weight_grad", &sparse_weight_grad,
      "hidden weight ids ends first_id grad_logits out accumulate");
}

}  // namespace hybridengine
