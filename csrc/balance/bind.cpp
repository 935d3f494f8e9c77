#include "balance/budget.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

constexpr int64_t kMaxTotal = int64_t{1} << 60;  // twice the difference of two sums fits
constexpr int64_t kMaxBins = 1 << 20;

void check_lengths(const Arguments& given, const std::vector<int64_t>& lengths, int64_t longest) {
  int64_t total = 0, i = 0;
  for (const int64_t length : lengths) {
    const Name name("lengths", i++);
    given.expect(0 <= length && length <= kMaxTotal - total, name, " is ", length,
                 "; expected 0 or more, and a sum of at most 2^60");
    given.expect(length <= longest, name, " is ", length, ", above max_tokens ", longest,
                 "; raise the budget or truncate the sequence");
    total += length;
  }
}

Bins balance_checked(const std::vector<int64_t>& lengths, int64_t num_bins, bool equal_count) {
  const Arguments given("balance");
  given.number("num_bins", num_bins, 1, kMaxBins);
  check_lengths(given, lengths, kMaxTotal);
  py::gil_scoped_release no_gil;
  return balance(lengths, num_bins, equal_count);
}

Bins balance_by_tokens(const std::vector<int64_t>& lengths, int64_t max_tokens, int64_t min_bins,
                       int64_t multiple_of) {
  const Arguments given("balance_by_tokens");
  max_tokens = std::min(given.number("max_tokens", max_tokens, 1, INT64_MAX), kMaxTotal);
  given.number("min_bins", min_bins, 0, kMaxBins);
  given.number("multiple_of", multiple_of, 1, kMaxBins);
  check_lengths(given, lengths, max_tokens);
  py::gil_scoped_release no_gil;
  return balance_by_budget(lengths, max_tokens, min_bins, multiple_of);
}

}  // namespace

void register_balance(py::module_& m) {
  def(m, "balance", &balance_checked, "lengths num_bins equal_count");
  def(m, "balance_by_tokens", &balance_by_tokens, "lengths max_tokens min_bins multiple_of");
}

}  // namespace hybridengine
