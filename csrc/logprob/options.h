// RowOptions of kernels/logprob/options.py.
#pragma once

#include <optional>

#include "common/tensor.h"

namespace hybridengine {

struct LogProbOptions {
  double temperature;
  std::optional<Tensor> temperatures;
  double logit_scale;
  double softcap;
  int64_t ignore_index;
  std::optional<Tensor> vocab_mask;
  std::optional<Tensor> vocab_range;
  bool negate;
};

}  // namespace hybridengine
