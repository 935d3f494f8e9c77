#include "common/binding.h"
#include "common/huge_pages.h"
#include "logprob/options.h"
#include "logprob/params.h"
#include "logprob/row_math.h"

namespace hybridengine {

namespace {

using Options = LogProbOptions;

void check_labels_on_host(const LogitRows& rows) {
  const int64_t total = vocab_total(rows);
  for (int64_t t = 0; t < rows.tokens; ++t) {
    HE_CHECK_INDEX(!label_is_bad(rows, t), "token_log_probs: token_ids[", t, "] is ",
                   rows.token_ids[t], ", outside the vocabulary of ", total,
                   "; expected 0 <= id < ", total, " or ignore_index (", rows.ignore_index, ")");
  }
}

Arguments fill(LogitRows& p, const char* op, In logits, In token_ids, const Options& o,
               OptionalIn cu_tokens = {}) {
  const Arguments given(op, "logits", logits);
  p.dtype = given.dtype("logits", logits.scalar_type());  // backend="reference" takes float64
  p.logits = given.data("logits", logits, kFloats, {&p.rows, &p.vocab}, &p.row_stride);
  p.token_ids = given.data<int64_t>("token_ids", token_ids, {&p.tokens});
  if (cu_tokens) {
    given.on_cpu();
    int64_t rows;
    p.cu_tokens = given.ends("cu_tokens", cu_tokens, &rows, p.tokens, "tokens", true);
    given.expect(rows == p.rows, "cu_tokens has ", rows + 1, " entries; expected ", p.rows + 1);
  } else {
    given.data<int64_t>("token_ids", token_ids, {p.rows});
  }
  p.ignore_index = o.ignore_index;
  p.vocab_range = given.data<int64_t>("vocab_range", o.vocab_range, {2});
  if (p.vocab_range && logits.is_cpu())
    given.number("vocab_range[0], the first id of the slice", p.vocab_range[0], 0, INT64_MAX);
  p.vocab_mask = static_cast<const uint8_t*>(
      given.data("vocab_mask", o.vocab_mask, kBool, {p.rows, p.vocab}, &p.mask_stride));
  p.temperatures = given.data<float>("temperature", o.temperatures, {p.rows});
  p.temperature = static_cast<float>(o.temperature);
  p.logit_scale = static_cast<float>(o.logit_scale);
  p.softcap = static_cast<float>(o.softcap);
  p.negate = o.negate;
  return given;
}

void run_forward(const Arguments& given, LogProbForward& p, OptionalIn bad_label) {
  p.bad_label = given.data<int32_t>("bad_label", bad_label, {1});
  Tensor slice_sums;
  if (given.device().is_cpu()) {
    check_labels_on_host(p);
  } else {
    slice_sums = given.make(p.slice_sums, {p.rows, num_slices(p.vocab), 4});
  }
  given.run(p, log_prob_forward_cpu, HE_CUDA(log_prob_forward_cuda));
}

// -> log_probs and entropy, each [T], and row_stats [T, 2], or [T, 3] with sum_p_squared. With
// `cu_tokens`, row r of the logits has the tokens from cu_tokens[r] to cu_tokens[r + 1].
std::vector<Tensor> log_prob_forward(In logits, In token_ids, const Options& options,
                                     bool want_sum_p_squared, OptionalIn bad_label,
                                     OptionalIn cu_tokens) {
  LogProbForward p{};
  const Arguments given = fill(p, "token_log_probs", logits, token_ids, options, cu_tokens);
  p.stats_width = want_sum_p_squared ? 3 : 2;
  std::vector<Tensor> out{given.make(p.log_probs, {p.tokens}), given.make(p.entropy, {p.tokens}),
                          given.make(p.row_stats, {p.tokens, p.stats_width})};
  run_forward(given, p, bad_label);
  return out;
}

// The vocabulary-parallel forward: [T, 5], see LogProbForward::partial.
Tensor log_prob_partial(In logits, In token_ids, const Options& options, OptionalIn bad_label) {
  LogProbForward p{};
  const Arguments given = fill(p, "token_log_probs", logits, token_ids, options);
  Tensor partial = given.make(p.partial, {p.rows, 5});
  run_forward(given, p, bad_label);
  return partial;
}

// Writes d(loss)/d(logits) into grad_logits, which may be logits itself. With `row_index`, the
// gradient of row r goes to row row_index[r] of grad_logits. cu_tokens: as in log_prob_forward.
void log_prob_backward(In logits, In token_ids, const Options& options,
                       const std::vector<Tensor>& row_results, OptionalIn grad_log_probs,
                       OptionalIn grad_entropy, Tensor& grad_logits, OptionalIn row_index,
                       OptionalIn cu_tokens) {
  LogProbBackward p{};
  const Arguments given =
      fill(p, "token_log_probs backward", logits, token_ids, options, cu_tokens);
  given.expect(row_results.size() == 3, "expected log_probs, entropy and row_stats");
  p.log_probs = given.data<float>("log_probs", row_results[0], {p.tokens});
  p.entropy = given.data<float>("entropy", row_results[1], {p.tokens});
  p.row_stats = given.data<float>("row_stats", row_results[2], {p.tokens, &p.stats_width});
  given.number("row_stats: its width", p.stats_width, 2, 3);
  p.grad_log_probs = given.data<float>("grad_log_probs", grad_log_probs, {p.tokens});
  p.grad_entropy = given.data<float>("grad_entropy", grad_entropy, {p.tokens});
  p.row_index = given.data<int32_t>("row_index", row_index, {p.rows});
  const ScalarType type = logits.scalar_type();  // that of the gradient, or any for float32
  const Types types = type == kFloat ? Types(kFloats) : Types(type);
  int64_t rows = p.rows;
  const Dim rows_of_grad = row_index ? Dim(&rows) : Dim(rows);
  p.grad_logits =
      given.data("grad_logits", grad_logits, types, {rows_of_grad, p.vocab}, &p.grad_stride);
  p.grad_dtype = dtype_of(grad_logits.scalar_type());
  for (int64_t i = 0; p.row_index && logits.is_cpu() && i < p.rows; ++i)  // on a GPU unread
    HE_CHECK_INDEX(p.row_index[i] < rows, given.op(), ": row_index[", i, "] is ", p.row_index[i],
                   ", but grad_logits has ", rows, " rows");
  if (logits.is_cpu() && p.grad_logits != p.logits && grad_logits.is_contiguous())
    prefer_huge_pages(p.grad_logits, grad_logits.nbytes());
  given.run(p, log_prob_backward_cpu, HE_CUDA(log_prob_backward_cuda));
}

// Applies a soft-cap to float32 logits [T, V] on a CPU, in place.
void soft_cap_(In logits, double softcap) {
  SoftCap p{};
  const Arguments given("soft_cap_", "logits", logits);
  given.on_cpu();
  p.logits = given.data<float>("logits", logits, {&p.rows, &p.vocab}, &p.row_stride);
  given.expect(softcap > 0, "softcap is ", softcap, "; expected a number above 0");
  p.softcap = static_cast<float>(softcap);
  if (logits.numel() > 0) given.run(p, soft_cap_cpu);
}

}  // namespace

void register_logprob(py::module_& m) {
  py::class_<Options>(m, "LogProbOptions")
      .def(py::init<double, std::optional<Tensor>, double, double, int64_t, std::optional<Tensor>,
                    std::optional<Tensor>, bool>(),
           py::arg("temperature"), py::arg("temperatures"), py::arg("logit_scale"),
           py::arg("softcap"), py::arg("ignore_index"), py::arg("vocab_mask"),
           py::arg("vocab_range"), py::arg("negate"));
  def(m, "log_prob_forward", &log_prob_forward,
      "logits token_ids options want_sum_p_squared bad_label cu_tokens");
  def(m, "soft_cap_", &soft_cap_, "logits softcap");
  def(m, "log_prob_partial", &log_prob_partial, "logits token_ids options bad_label");
  def(m, "log_prob_backward", &log_prob_backward,
      "logits token_ids options row_results grad_log_probs grad_entropy grad_logits row_index "
      "cu_tokens");
}

}  // namespace hybridengine
