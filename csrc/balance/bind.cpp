#include <pybind11/stl.h>

#include "balance/partition.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

Bins balance_checked(const std::vector<int64_t>& lengths, int64_t num_bins, bool equal_count) {
  TORCH_CHECK_VALUE(num_bins > 0, "balance: num_bins is ", num_bins, "; expected at least 1");
  for (size_t i = 0; i < lengths.size(); ++i)
    TORCH_CHECK_VALUE(lengths[i] >= 0, "balance: lengths[", i, "] is ", lengths[i],
                      "; expected 0 or more");
  py::gil_scoped_release no_gil;
  return balance(lengths, num_bins, equal_count);
}

}  // namespace

void register_balance(py::module_& m) {
  m.def("balance", &balance_checked, py::arg("lengths"), py::arg("num_bins"),
        py::arg("equal_count"));
}

}  // namespace hybridengine
