
#include <optional>
#include <tuple>

#include "common/binding.h"
#include "common/huge_pages.h"
#include "logprob/params.h"
#include "logprob/row_math.h"

namespace hybridengine {

namespace {

using OptionalTensor = std::optional<Tensor>;

// RowOptions of kernels/logprob/options.py.
struct Options {
  double temperature;
  OptionalTensor temperatures;
  double logit_scale;
  double softcap;
  int64_t ignore_index;
  OptionalTensor vocab_mask;
  OptionalTensor vocab_range;
};

void check_labels_on_host(const LogitRows& rows) {
  const int64_t total = vocab_total(rows);
  for (int64_t row = 0; row < rows.rows; ++row) {
    HE_CHECK_INDEX(!label_is_bad(rows, row), "token_log_probs: token_ids[", row, "] is ",
                   rows.token_ids[row], ", outside the vocabulary of ", total,
                   "; expected 0 <= id < ", total, " or ignore_index (", rows.ignore_index, ")");
  }
}

const float* optional_row_vector(const OptionalTensor& tensor, const char* name, int64_t rows) {
  if (!tensor) return nullptr;
  check_vector(*tensor, name, kFloat, rows);
  return tensor->data<float>();
}

void fill(LogitRows& p, const Tensor& logits, const Tensor& token_ids, const Options& o) {
  check_same_device("token_log_probs", {{"logits", logits},
                                        {"token_ids", token_ids},
                                        {"temperature", o.temperatures},
                                        {"vocab_mask", o.vocab_mask},
                                        {"vocab_range", o.vocab_range}});
  HE_CHECK_VALUE(logits.dim() == 2 && logits.has_unit_inner_stride(),
                 "token_log_probs: logits has shape ", logits.sizes(), " and strides ",
                 logits.strides(), "; expected [T, V] with inner stride 1");
  p.dtype = float_dtype(logits, "logits");
  HE_CHECK_VALUE(p.dtype != DType::f64,
                 "token_log_probs: logits has dtype float64; expected float32, bfloat16 or "
                 "float16 (backend='reference' takes float64)");
  p.rows = logits.size(0);
  p.vocab = logits.size(1);
  check_vector(token_ids, "token_ids", kLong, p.rows);
  p.logits = logits.data();
  p.row_stride = logits.stride(0);
  p.token_ids = token_ids.data<int64_t>();
  p.ignore_index = o.ignore_index;
  if (o.vocab_range) {
    check_vector(*o.vocab_range, "vocab_range", kLong, 2);
    p.vocab_range = o.vocab_range->data<int64_t>();
    if (logits.is_cpu())
      HE_CHECK_VALUE(p.vocab_range[0] >= 0, "token_log_probs: vocab_range[0] is ", p.vocab_range[0],
                     "; expected the first id of the slice, 0 or more");
  }
  if (o.vocab_mask) {
    HE_CHECK_VALUE(o.vocab_mask->sizes() == logits.sizes() &&
                       o.vocab_mask->scalar_type() == kBool &&
                       o.vocab_mask->has_unit_inner_stride(),
                   "token_log_probs: vocab_mask has shape ", o.vocab_mask->sizes(), " and dtype ",
                   o.vocab_mask->scalar_type(), "; expected bool ", logits.sizes());
    p.vocab_mask = static_cast<const uint8_t*>(o.vocab_mask->data());
    p.mask_stride = o.vocab_mask->stride(0);
  }
  p.temperatures = optional_row_vector(o.temperatures, "temperature", p.rows);
  p.temperature = static_cast<float>(o.temperature);
  p.logit_scale = static_cast<float>(o.logit_scale);
  p.softcap = static_cast<float>(o.softcap);
  p.num_threads = get_num_threads();
}

int32_t* bad_label_flag(const OptionalTensor& bad_label, const Tensor& logits) {
  if (!bad_label) return nullptr;
  check_same_device("token_log_probs", {{"logits", logits}, {"bad_label", bad_label}});
  HE_CHECK_VALUE(bad_label->numel() == 1, "token_log_probs: bad_label has ", bad_label->numel(),
                 " elements; expected one");
  return bad_label->data<int32_t>();
}

// On CUDA the rows are not checked: reading them would synchronize.
void check_row_index(const Tensor& row_index, int64_t num_rows) {
  if (!row_index.is_cpu()) return;
  const int32_t* rows = row_index.data<int32_t>();
  for (int64_t i = 0; i < row_index.numel(); ++i)
    HE_CHECK_INDEX(rows[i] < num_rows, "token_log_probs backward: row_index[", i, "] is ", rows[i],
                   ", but grad_logits has ", num_rows, " rows");
}

void run(LogProbForward& p, const Device& device) {
  if (device.is_cpu()) {
    check_labels_on_host(p);
    return without_gil([&] { log_prob_forward_cpu(p); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    const DeviceGuard guard(device);
    const Tensor slice_sums = empty({p.rows, num_slices(p.vocab), 4}, kFloat, device);
    p.slice_sums = slice_sums.data<float>();
    return check_cuda(log_prob_forward_cuda(p, current_stream(device)), "token_log_probs");
  }
#endif
  no_kernel_for(device, "token_log_probs");
}

// -> log_probs, entropy, row_max, log_sum, sum_p_squared, each [T] (the last one empty if not
// wanted).
std::vector<Tensor> log_prob_forward(const Tensor& logits, const Tensor& token_ids,
                                     const Options& options, bool want_sum_p_squared,
                                     const OptionalTensor& bad_label) {
  LogProbForward p{};
  fill(p, logits, token_ids, options);
  std::vector<Tensor> out;
  for (int i = 0; i < 4; ++i) out.push_back(empty({p.rows}, kFloat, logits.device()));
  out.push_back(empty({want_sum_p_squared ? p.rows : 0}, kFloat, logits.device()));
  p.log_probs = out[0].data<float>();
  p.entropy = out[1].data<float>();
  p.row_max = out[2].data<float>();
  p.log_sum = out[3].data<float>();
  p.sum_p_squared = want_sum_p_squared ? out[4].data<float>() : nullptr;
  p.bad_label = bad_label_flag(bad_label, logits);
  run(p, logits.device());
  return out;
}

// The vocabulary-parallel forward: [T, 5], see LogProbForward::partial.
Tensor log_prob_partial(const Tensor& logits, const Tensor& token_ids, const Options& options,
                        const OptionalTensor& bad_label) {
  LogProbForward p{};
  fill(p, logits, token_ids, options);
  Tensor partial = empty({p.rows, 5}, kFloat, logits.device());
  p.partial = partial.data<float>();
  p.bad_label = bad_label_flag(bad_label, logits);
  run(p, logits.device());
  return partial;
}

// Writes d(loss)/d(logits) into grad_logits, which may be logits itself. With `row_index`, the
// gradient of row t goes to row row_index[t] of grad_logits.
void log_prob_backward(const Tensor& logits, const Tensor& token_ids, const Options& options,
                       const std::vector<Tensor>& row_results, const OptionalTensor& grad_log_probs,
                       const OptionalTensor& grad_entropy, Tensor& grad_logits,
                       const OptionalTensor& row_index) {
  LogProbBackward p{};
  fill(p, logits, token_ids, options);
  HE_CHECK_VALUE(row_results.size() == 4,
                 "token_log_probs backward: expected log_probs, entropy, row_max and log_sum");
  check_same_device("token_log_probs backward", {{"logits", logits},
                                                 {"log_probs", row_results[0]},
                                                 {"entropy", row_results[1]},
                                                 {"row_max", row_results[2]},
                                                 {"log_sum", row_results[3]},
                                                 {"grad_log_probs", grad_log_probs},
                                                 {"grad_entropy", grad_entropy},
                                                 {"grad_logits", grad_logits},
                                                 {"row_index", row_index}});
  p.grad_dtype = float_dtype(grad_logits, "grad_logits");
  HE_CHECK_VALUE(
      grad_logits.dim() == 2 && grad_logits.size(1) == p.vocab &&
          (row_index || grad_logits.size(0) == p.rows) &&
          (p.grad_dtype == p.dtype || (p.dtype == DType::f32 && p.grad_dtype != DType::f64)) &&
          grad_logits.has_unit_inner_stride(),
      "token_log_probs backward: grad_logits has shape ", grad_logits.sizes(), " and dtype ",
      grad_logits.scalar_type(), "; expected ", logits.sizes(), ", inner stride 1 and dtype ",
      logits.scalar_type(), " (or a 16-bit dtype for float32 logits)");
  const char* names[] = {"log_probs", "entropy", "row_max", "log_sum"};
  for (int i = 0; i < 4; ++i) check_vector(row_results[i], names[i], kFloat, p.rows);
  p.log_probs = row_results[0].data<float>();
  p.entropy = row_results[1].data<float>();
  p.row_max = row_results[2].data<float>();
  p.log_sum = row_results[3].data<float>();
  p.grad_log_probs = optional_row_vector(grad_log_probs, "grad_log_probs", p.rows);
  p.grad_entropy = optional_row_vector(grad_entropy, "grad_entropy", p.rows);
  p.grad_logits = grad_logits.data();
  p.grad_stride = grad_logits.stride(0);
  if (row_index) {
    check_vector(*row_index, "row_index", kInt, p.rows);
    check_row_index(*row_index, grad_logits.size(0));
    p.row_index = row_index->data<int32_t>();
  }
  if (logits.device().is_cpu()) {
    if (p.grad_logits != p.logits && grad_logits.is_contiguous()) {
      prefer_huge_pages(p.grad_logits, grad_logits.nbytes());
    }
    return without_gil([&] { log_prob_backward_cpu(p); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (logits.device().is_cuda()) {
    const DeviceGuard guard(logits.device());
    return check_cuda(log_prob_backward_cuda(p, current_stream(logits.device())),
                      "token_log_probs backward");
  }
#endif
  no_kernel_for(logits.device(), "token_log_probs backward");
}

}  // namespace

void register_logprob(py::module_& m) {
  py::class_<Options>(m, "LogProbOptions")
      .def(py::init<double, OptionalTensor, double, double, int64_t, OptionalTensor,
                    OptionalTensor>(),
           py::arg("temperature"), py::arg("temperatures"), py::arg("logit_scale"),
           py::arg("softcap"), py::arg("ignore_index"), py::arg("vocab_mask"),
           py::arg("vocab_range"));
  m.def("log_prob_forward", &log_prob_forward, py::arg("logits"), py::arg("token_ids"),
        py::arg("options"), py::arg("want_sum_p_squared"), py::arg("bad_label"));
  m.def("log_prob_partial", &log_prob_partial, py::arg("logits"), py::arg("token_ids"),
        py::arg("options"), py::arg("bad_label"));
  m.def("log_prob_backward", &log_prob_backward, py::arg("logits"), py::arg("token_ids"),
        py::arg("options"), py::arg("row_results"), py::arg("grad_log_probs"),
        py::arg("grad_entropy"), py::arg("grad_logits"), py::arg("row_index"));
}

}  // namespace hybridengine
