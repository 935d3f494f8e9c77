#include <pybind11/stl.h>

#include "balance/budget.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

void check_lengths(const char* op, const std::vector<int64_t>& lengths) {
  int64_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i)
    TORCH_CHECK_VALUE(lengths[i] >= 0 && !__builtin_add_overflow(total, lengths[i], &total), op,
                      ": lengths[", i, "] is ", lengths[i],
                      "; expected 0 or more, and a sum that fits 64 bits");
}

Bins balance_checked(const std::vector<int64_t>& lengths, int64_t num_bins, bool equal_count) {
  TORCH_CHECK_VALUE(num_bins > 0, "balance: num_bins is ", num_bins, "; expected at least 1");
  check_lengths("balance", lengths);
  py::gil_scoped_release no_gil;
  return balance(lengths, num_bins, equal_count);
}

Bins balance_by_tokens(const std::vector<int64_t>& lengths, int64_t max_tokens, int64_t min_bins,
                       int64_t multiple_of) {
  const char* op = "balance_by_tokens";
  TORCH_CHECK_VALUE(max_tokens > 0, op, ": max_tokens is ", max_tokens, "; expected at least 1");
  TORCH_CHECK_VALUE(multiple_of > 0, op, ": multiple_of is ", multiple_of, "; expected at least 1");
  check_lengths(op, lengths);
  for (size_t i = 0; i < lengths.size(); ++i)
    TORCH_CHECK_VALUE(lengths[i] <= max_tokens, op, ": lengths[", i, "] is ", lengths[i],
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
