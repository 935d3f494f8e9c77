#include <algorithm>
#include <tuple>

#include "common/binding.h"
#include "sampling/params.h"

namespace hybridengine {

namespace {

// (tokens int64 [rows], log_probs float32 [rows], num_kept int32 [rows], kept_ids int32 [K]); the
// last one is empty unless `return_kept_ids`.
std::tuple<Tensor, Tensor, Tensor, Tensor> sample_tokens(
    const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
    const Tensor& min_p, const Tensor& seeds, const Tensor& positions, bool return_kept_ids) {
  const char* op = "sample_tokens";
  check_same_device(op, {{"logits", logits},
                         {"temperature", temperature},
                         {"top_k", top_k},
                         {"top_p", top_p},
                         {"min_p", min_p},
                         {"seeds", seeds},
                         {"positions", positions}});
  if (!logits.device().is_cpu()) no_kernel_for(logits.device(), op);
  HE_CHECK_VALUE(logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) < (int64_t{1} << 31) &&
                     logits.has_unit_inner_stride(),
                 op, ": logits has shape ", logits.sizes(), " and strides ", logits.strides(),
                 "; expected [rows, vocab] with 0 < vocab < 2^31 and inner stride 1");
  SampleTokens p{};
  p.dtype = float_dtype(logits, "logits");
  HE_CHECK_VALUE(p.dtype != DType::f64, op,
                 ": logits has dtype float64; expected float32, bfloat16 or float16");
  p.logits = logits.data(), p.row_stride = logits.stride(0);
  p.rows = logits.size(0), p.vocab = logits.size(1);
  for (const NamedTensor& one : {NamedTensor("temperature", temperature),
                                 NamedTensor("top_p", top_p), NamedTensor("min_p", min_p)}) {
    check_vector(*one.tensor, one.name, kFloat, p.rows);
  }
  check_vector(top_k, "top_k", kInt, p.rows);
  check_vector(seeds, "seeds", kLong, p.rows);
  check_vector(positions, "positions", kLong, p.rows);
  p.temperature = temperature.data<float>(), p.top_k = top_k.data<int32_t>();
  p.top_p = top_p.data<float>(), p.min_p = min_p.data<float>();
  p.seeds = seeds.data<int64_t>(), p.positions = positions.data<int64_t>();
  Tensor tokens = empty({p.rows}, kLong), log_probs = empty({p.rows}, kFloat);
  Tensor num_kept = empty({p.rows}, kInt);
  p.tokens = tokens.data<int64_t>(), p.log_probs = log_probs.data<float>();
  p.num_kept = num_kept.data<int32_t>();
  std::vector<std::vector<int32_t>> kept(return_kept_ids ? p.rows : 0);
  p.kept_ids = return_kept_ids ? kept.data() : nullptr;
  p.num_threads = get_num_threads();
  without_gil([&] { sample_tokens_cpu(p); });
  int64_t count = 0;
  for (const auto& ids : kept) count += std::ssize(ids);
  Tensor kept_ids = empty({count}, kInt);
  int32_t* target = kept_ids.data<int32_t>();
  for (const auto& ids : kept) target = std::copy(ids.begin(), ids.end(), target);
  return {tokens, log_probs, num_kept, kept_ids};
}

}  // namespace

void register_sampling(py::module_& m) {
  m.def("sample_tokens", &sample_tokens, py::arg("logits"), py::arg("temperature"),
        py::arg("top_k"), py::arg("top_p"), py::arg("min_p"), py::arg("seeds"),
        py::arg("positions"), py::arg("return_kept_ids"));
}

}  // namespace hybridengine
