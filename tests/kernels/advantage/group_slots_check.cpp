// group_slots.h without a GPU: rows pass in the order given, as threads of a launch might.
#include <vector>

#include "advantage/group_slots.h"

using namespace hybridengine;

struct Plain {
  static void add(uint64_t* at, uint64_t value) { *at += value; }
  static void max(uint64_t* at, uint64_t value) { *at = *at < value ? value : *at; }
  static uint64_t swap(uint64_t* at, uint64_t expected, uint64_t desired) {
    const uint64_t old = *at;
    if (old == expected) *at = desired;
    return old;
  }
};

extern "C" void group_advantages(const float* rewards, const int64_t* group_ids,
                                 const float* lengths, const int64_t* order, int64_t num_rows,
                                 int estimator, bool norm_by_std, double epsilon,
                                 float* advantages) {
  int64_t table_size = 16;
  while (table_size < 2 * num_rows) table_size *= 2;
  std::vector<GroupSlot> slots(table_size, GroupSlot{});
  std::vector<int64_t> slot_of(num_rows);
  const EstimatorOptions options{static_cast<Estimator>(estimator), norm_by_std, epsilon};
  const GroupRows p{rewards,
                    group_ids,
                    lengths,
                    slots.data(),
                    slot_of.data(),
                    table_size,
                    options.leaves_one_out()};
  for (int64_t i = 0; i < num_rows; ++i) enter_group<Plain>(p, order[i]);
  for (int64_t i = 0; i < num_rows; ++i) measure_row<Plain>(p, order[i]);
  for (int64_t i = 0; i < num_rows; ++i) add_row<Plain>(p, order[i]);
  for (int64_t i = 0; i < num_rows; ++i) advantages[i] = finished_row(p, i, options);
}
