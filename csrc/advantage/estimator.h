// The advantage of a response, given its group: shared by the CPU and the CUDA kernel.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

// In the order of GROUP_ESTIMATORS in kernels/advantage/group.py.
enum class Estimator : int32_t {
  grpo,      // (r - mean) / (std + epsilon)         arXiv 2402.03300, section 4.1.2
  mean,      // r - mean                             arXiv 2503.20783 (Dr. GRPO)
  rloo,      // r - mean of the others               arXiv 2402.14740, eq. 7
  pass_k,    // the best: (r - second) / scale       arXiv 2503.19595, section 3
  max_mean,  // the best: (r - mean) / scale
  opo,       // r - length-weighted mean             arXiv 2505.23585, eq. 8
  grpo_loo,  // (r - mean) / (std + epsilon) of the others; NeMo-RL's leave-one-out baseline
};

// Sums of d = r - shift over some rewards, one of which is shift.
struct ShiftedSums {
  double sum;
  double sum_square;

  HE_HOST_DEVICE void add(double d) {
    sum += d;
    sum_square += d * d;
  }

  // The sum of squared deviations from the mean of n rewards; it loses the bits of n, no more.
  HE_HOST_DEVICE double squared_deviations(double n) const {
    const double square = sum_square - sum * sum / n;
    return square > 0 ? square : 0;
  }
};

// Sums over a group of d = r - shift, where shift is a reward of the group: exact where all rewards
// are equal, and without cancellation.
struct GroupStats {
  double shift;
  double sum;         // of d
  double sum_square;  // of d * d
  double length;      // of the response lengths (opo)
  double length_sum;  // of length * d (opo)
  float best;
  float second;      // best but one; -inf in a group of one
  int64_t best_row;  // the first of the best
  int64_t count;
  float lowest;        // grpo_loo, and those that follow
  int64_t lowest_row;  // the first of the lowest
  // Without the best reward, shifted by the second; without the lowest one, shifted by the best.
  ShiftedSums others_of_best, others_of_lowest;
};

struct EstimatorOptions {
  Estimator estimator;
  bool norm_by_std;  // pass_k, max_mean, grpo_loo
  double epsilon;

  // Whether the std of the others of a reward is needed.
  HE_HOST_DEVICE bool leaves_one_out() const {
    return estimator == Estimator::grpo_loo && norm_by_std;
  }
};

// The std of the other rewards of a group of `n`, 0 where they are equal.
//
// Without one reward, the sums of the group cancel where it dominates them. Only the reward that is
// farthest from the mean can (two cannot have nearly all squares of the deviations): the best or
// the lowest one, whose others have sums of their own.
HE_HOST_DEVICE double std_of_others(double reward, int64_t row, const GroupStats& group, double n) {
  if (n < 3) return 0;
  const double d = reward - group.shift;
  ShiftedSums others{group.sum - d, group.sum_square - d * d};
  if (row == group.best_row) others = group.others_of_best;
  if (row == group.lowest_row) others = group.others_of_lowest;
  return sqrt(others.squared_deviations(n - 1) / (n - 2));
}

HE_HOST_DEVICE double advantage_of(double reward, int64_t row, const GroupStats& group,
                                   const EstimatorOptions& options) {
  // A group of one has mean 0 and std 1, as in verl.
  const bool alone = group.count == 1;
  const double n = static_cast<double>(group.count);
  const double mean = alone ? 0 : group.shift + group.sum / n;
  const double square = group.sum_square - group.sum * group.sum / n;
  const double std = alone ? 1 : sqrt((square > 0 ? square : 0) / (n - 1));
  const double scale = options.norm_by_std ? std + options.epsilon : 1;
  const bool is_best = row == group.best_row;
  switch (options.estimator) {
    case Estimator::grpo:
      return (reward - mean) / (std + options.epsilon);
    case Estimator::mean:
      return reward - mean;
    case Estimator::rloo:
      return alone ? reward : (reward - mean) * (n / (n - 1));
    case Estimator::pass_k:
      return is_best ? (reward - (alone ? 0 : static_cast<double>(group.second))) / scale : 0;
    case Estimator::max_mean:
      return is_best ? (reward - mean) / scale : 0;
    case Estimator::grpo_loo: {
      if (alone) return reward;
      const double advantage = (reward - mean) * (n / (n - 1));
      const double others = options.norm_by_std ? std_of_others(reward, row, group, n) : 0;
      return others > 0 ? advantage / (others + options.epsilon) : advantage;
    }
    case Estimator::opo:
      if (alone || group.length <= 0) return reward;
      return reward - group.shift - group.length_sum / group.length;
  }
  return 0;
}

HE_HOST_DEVICE void add_member(GroupStats& group, float reward, double length, int64_t row) {
  const double d = static_cast<double>(reward) - group.shift;
  group.sum += d;
  group.sum_square += d * d;
  group.length += length;
  group.length_sum += length * d;
  group.count += 1;
  if (reward > group.best || (reward == group.best && row < group.best_row)) {
    group.second = group.best;
    group.best = reward;
    group.best_row = row;
  } else if (reward > group.second) {
    group.second = reward;
  }
  if (reward < group.lowest) {
    group.lowest = reward;
    group.lowest_row = row;
  }
}

// For grpo_loo, once all members are added.
HE_HOST_DEVICE void add_other(GroupStats& group, float reward, int64_t row) {
  const double r = reward;
  if (row != group.best_row) group.others_of_best.add(r - group.second);
  if (row != group.lowest_row) group.others_of_lowest.add(r - group.best);
}

HE_HOST_DEVICE GroupStats empty_group(float shift) {
  GroupStats group{};
  group.shift = shift;
  group.best = group.second = -INFINITY;
  group.lowest = INFINITY;
  group.best_row = group.lowest_row = INT64_MAX;
  return group;
}

}  // namespace hybridengine
