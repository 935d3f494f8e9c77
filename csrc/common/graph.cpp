#include "common/graph.h"

#include <algorithm>
#include <cstdlib>

#include "common/tensor.h"

namespace hybridengine {

namespace {

thread_local Graph* current = nullptr;

}  // namespace

GraphMemory::~GraphMemory() {
  for (const auto& [block, bytes] : sizes_) std::free(block);
}

void* GraphMemory::take(int64_t bytes) {
  const int64_t rounded = rounded_size(bytes);
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(free_, [&](void* block) { return sizes_.at(block) == rounded; });
  if (found != free_.end()) {
    void* const block = *found;
    free_.erase(found);
    return block;
  }
  void* const block = std::aligned_alloc(kAlignment, rounded);
  if (!block) throw std::bad_alloc();
  sizes_[block] = rounded;
  return block;
}

void GraphMemory::give_back(void* block) {
  const std::lock_guard lock(mutex_);
  free_.push_back(block);
}

int64_t GraphMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [block, bytes] : sizes_) total += bytes;
  return total;
}

Graph::Graph(int64_t rows) : rows_(rows) {
  HE_CHECK_VALUE(rows > 0, "a graph of ", rows, " rows; expected at least 1");
}

Graph::~Graph() {
  if (current == this) current = nullptr;
}

Graph* Graph::capturing() { return current; }

void Graph::begin() {
  HE_CHECK(!current, "this thread captures a graph already");
  HE_CHECK(calls_.empty(), "the graph has been captured already");
  current = this;
}

std::string Graph::end() {
  HE_CHECK(current == this, "this thread does not capture the graph");
  current = nullptr;
  return refused_;
}

void Graph::refuse(const std::string& reason) {
  if (refused_.empty()) refused_ = reason;
}

void Graph::replay(int64_t rows) {
  HE_CHECK_VALUE(current != this && refused_.empty(), "the graph cannot be replayed: ",
                 refused_.empty() ? "its capture has not ended" : refused_);
  HE_CHECK_VALUE(0 < rows && rows <= rows_, "replay of ", rows, " rows; expected 1 to ", rows_,
                 ", as many as were captured");
  without_gil([&] {
    for (auto& call : calls_) call(rows);
  });
}

void refuse_capture() {
  if (current) current->refuse("it calls a kernel that cannot be captured");
}

}  // namespace hybridengine
