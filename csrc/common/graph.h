// Kernel calls on the CPU, captured as they are made, and made again later without Python.
//
// The calls are of kernels whose operands have a leading dimension of rows. A replay makes them
// with the same memory and as many rows as were captured, or fewer. New tensors of a capture come
// from memory that the graph keeps, in which a tensor has the place of one that was freed before,
// as in the captured order of calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hybridengine {

// The memory of a graph's tensors. Its tensors keep it, as the graph does.
class GraphMemory {
 public:
  GraphMemory() = default;
  ~GraphMemory();
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;

  void* take(int64_t bytes);
  void give_back(void* block);
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<void*, int64_t> sizes_;
  std::vector<void*> free_;
};

class Graph {
 public:
  // rows: of the calls that are captured.
  explicit Graph(int64_t rows);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // The graph that captures the calls of this thread, or null.
  static Graph* capturing();

  void begin();
  // Returns why the calls cannot be replayed; empty if they can.
  std::string end();
  // The first reason is kept.
  void refuse(const std::string& reason);

  // Adds kernel(params), where params.*rows is a multiple of the graph's rows.
  template <typename Params, typename Kernel>
  void add(const char* op, const Params& params, int64_t Params::* rows, const Kernel& kernel) {
    const int64_t multiple = params.*rows / rows_;
    if (params.*rows != multiple * rows_) {
      refuse(std::string(op) + " has " + std::to_string(params.*rows) + " rows, no multiple of " +
             std::to_string(rows_));
    }
    calls_.push_back([params = params, rows, multiple, kernel](int64_t given) mutable {
      params.*rows = multiple * given;
      kernel(params);
    });
  }

  void replay(int64_t rows);

  int64_t rows() const { return rows_; }
  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }
  const std::shared_ptr<GraphMemory>& memory() const { return memory_; }

 private:
  const int64_t rows_;
  std::vector<std::function<void(int64_t rows)>> calls_;
  std::shared_ptr<GraphMemory> memory_ = std::make_shared<GraphMemory>();
  std::string refused_;
};

}  // namespace hybridengine
