// Tasks of a CPU kernel whose threads know what they do next.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/parallel.h"

namespace hybridengine {

// Calls body(task, following, scratch) for the tasks [0, count), with a Scratch(params) for each of
// params.num_threads threads. `following` is the thread's next task, for which it may read ahead;
// `count`: none.
template <typename Scratch, typename Params, typename Body>
void for_each_task_ahead(const Params& params, int64_t count, const Body& body) {
  const int64_t threads = count < params.num_threads ? count : params.num_threads;
  std::atomic<int64_t> next{threads};  // every thread begins with a task of its own
  parallel_for(threads, 1, static_cast<int>(threads), [&](int64_t first, int64_t end) {
    Scratch scratch(params);
    const auto take = [&] { return std::min(first < end ? first++ : next.fetch_add(1), count); };
    for (int64_t task = take(), following; task < count; task = following)
      body(task, following = take(), scratch);
  });
}

}  // namespace hybridengine
