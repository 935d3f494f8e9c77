#include <pybind11/stl.h>

#include "balance/budget.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

constexpr int64_t kMaxTotal = int64_t{1} << 60;  // twice the difference of two sums fits
constexpr int64_t kMaxBins = 1 << 20;

void check_lengths(const char* op, const std::vector<int64_t>& lengths) {
  int64_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i)
    HE_CHECK_VALUE(
        lengths[i] >= 0 && !__builtin_add_overflow(total, lengths[i], &total) && total <= kMaxTotal,
        op, ": lengths[", i, "] is ", lengths[i],
        "; expected 0 or more, and a sum of at most 2^60");
}

void check_bins(const char* op, const char* name, int64_t value, int64_t least) {
  HE_CHECK_VALUE(value >= least && value <= kMaxBins, op, ": ", name, " is ", value, "; expected ",
                 least, " to 2^20");
}

Bins balance_checked(const std::vector<int64_t>& lengths, int64_t num_bins, bool equal_count) {
  check_bins("balance", "num_bins", num_bins, 1);
  check_lengths("balance", lengths);
  py::gil_scoped_release no_gil;
  return balance(lengths, num_bins, equal_count);
}

Bins balance_by_tokens(const std::vector<int64_t>& lengths, int64_t max_tokens, int64_t min_bins,
                       int64_t multiple_of) {
  const char* op = "balance_by_tokens";
  HE_CHECK_VALUE(max_tokens > 0, op, ": max_tokens is ", max_tokens, "; expected at least 1");
  max_tokens = std::min(max_tokens, kMaxTotal);
  check_bins(op, "min_bins", std::max<int64_t>(min_bins, 0), 0);
  check_bins(op, "multiple_of", multiple_of, 1);
  check_lengths(op, lengths);
  for (size_t i = 0; i < lengths.size(); ++i)
    HE_CHECK_VALUE(lengths[i] <= max_tokens, op, ": lengths[", i, "] is ", lengths[i],
                   ", above max_tokens ", max_tokens,
                   "; raise the budget or truncate the sequence");
  py::gil_scoped_release no_gil;
  return balance_by_budget(lengths, max_tokens, min_bins, multiple_of);
}

}  // namespace

void register_balance(py::module_& m) {
  m.def("balance", &balance_checked, py::arg("lengths"), py::arg("num_bins"),
        py::arg("equal_count"));
  m.def("balance_by_tokens", &balance_by_tokens, py::arg("lengths"), py::arg("max_tokens"),
        py::arg("min_bins"), py::arg("multiple_of"));
}

}  // namespace hybridengine
