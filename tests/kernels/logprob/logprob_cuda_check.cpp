// The CUDA log-prob kernels on the CPU.
#include <vector>

#include "logprob_cuda.cu"

using namespace hybridengine;

// results: log_probs and entropy, [2, rows], then row_stats [rows, 2 or 3]; gradients: [2, rows].
// partial: [rows, 5] or null; then there are no other results.
extern "C" int run_on_cpu(const void* logits, int64_t row_stride, int64_t rows, int64_t vocab,
                          int dtype, const int64_t* token_ids, const int64_t* vocab_range,
                          const uint8_t* vocab_mask, const float* temperatures, double logit_scale,
                          double softcap, bool squares, const float* gradients, float* results,
                          float* partial, int32_t* bad_label, void* grad_logits, int grad_dtype,
                          int64_t grad_stride) {
  LogitRows common{};
  common.logits = logits;
  common.row_stride = row_stride;
  common.rows = rows;
  common.vocab = vocab;
  common.dtype = static_cast<DType>(dtype);
  common.token_ids = token_ids;
  common.ignore_index = -100;
  common.vocab_range = vocab_range;
  common.vocab_mask = vocab_mask;
  common.mask_stride = vocab;
  common.temperatures = temperatures;
  common.logit_scale = static_cast<float>(logit_scale);
  common.softcap = static_cast<float>(softcap);
  LogProbForward f{};
  LogProbBackward b{};
  static_cast<LogitRows&>(f) = static_cast<LogitRows&>(b) = common;
  b.log_probs = f.log_probs = results;
  b.entropy = f.entropy = results + rows;
  b.row_stats = f.row_stats = results + 2 * rows;
  b.stats_width = f.stats_width = squares ? 3 : 2;
  f.partial = partial;
  f.bad_label = bad_label;
  std::vector<float> slice_sums(rows * num_slices(vocab) * 4 + 1);
  f.slice_sums = slice_sums.data();
  const int error = log_prob_forward_cuda(f, nullptr);
  if (error || partial) return error;
  b.grad_log_probs = gradients;
  b.grad_entropy = gradients + rows;
  b.grad_logits = grad_logits;
  b.grad_dtype = static_cast<DType>(grad_dtype);
  b.grad_stride = grad_stride;
  return log_prob_backward_cuda(b, nullptr);
}
