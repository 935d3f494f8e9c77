// Threads for CPU kernels: body(begin, end) is called for contiguous, equal parts of [0, count).
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <exception>

#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#endif

namespace hybridengine {

#if defined(__SANITIZE_THREAD__)

// Threads that the sanitizer sees: it does not know the barriers of libgomp. Small inputs use them.
template <typename Body>
void parallel_for(int64_t count, int64_t, int num_threads, const Body& body) {
  const int64_t parts = count < num_threads ? count : num_threads;
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part)
    threads.emplace_back([=, &body] { body(count * part / parts, count * (part + 1) / parts); });
  for (std::thread& thread : threads) thread.join();
}

#else

// num_threads: torch.get_num_threads(), set by the binding. grain: the smallest part. An exception
// of a thread (no memory) is thrown again in the calling one: none may leave the parallel region.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, int num_threads, const Body& body) {
  if (count <= 0) return;
  const int64_t most = (count + grain - 1) / grain;
  const int threads = static_cast<int>(most < num_threads ? most : num_threads);
  if (threads <= 1) {
    body(int64_t{0}, count);
    return;
  }
  std::exception_ptr error;
#pragma omp parallel num_threads(threads)
  {
    const int64_t parts = omp_get_num_threads();
    const int64_t part = omp_get_thread_num();
    const int64_t begin = count * part / parts;
    const int64_t end = count * (part + 1) / parts;
    try {
      if (begin < end) body(begin, end);
    } catch (...) {
#pragma omp critical(hybridengine_error)
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

#endif

// Calls body(task, scratch) for the tasks [0, count), in ascending order of their start, with a
// Scratch(params) for each of params.num_threads threads.
template <typename Scratch, typename Params, typename Body>
void for_each_task(const Params& params, int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const int64_t threads = count < params.num_threads ? count : params.num_threads;
  parallel_for(threads, 1, static_cast<int>(threads), [&](int64_t, int64_t) {
    Scratch scratch(params);
    for (int64_t task; (task = next.fetch_add(1)) < count;) body(task, scratch);
  });
}

}  // namespace hybridengine
