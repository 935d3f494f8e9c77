// Exact common prefixes of token sequences as a radix tree, and its layout in depth-first order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace hybridengine {

// A run of tokens that no branch interrupts; its children continue it.
struct ForestNode {
  int64_t first_token;  // in the input
  int64_t length;
  int64_t depth;           // of its first token in the tree
  int64_t first_sequence;  // the earliest sequence through it
  int64_t parent;          // -1: a root
  int64_t packed;          // packed position of its first token
  int64_t subtree_end;     // packed position after its last descendant
};

// Linear in the number of tokens: every sequence is compared once, with the path that it follows.
class Forest {
 public:
  // tokens: all sequences end to end; sequence n is [ends[n], ends[n + 1]).
  Forest(const int64_t* tokens, const int64_t* ends, int64_t num_sequences)
      : tokens_(tokens), ends_(ends) {
    last_node_.reserve(num_sequences);
    for (int64_t n = 0; n < num_sequences; ++n) last_node_.push_back(insert(n));
    lay_out();
  }

  int64_t num_tokens() const { return num_tokens_; }
  const std::vector<int64_t>& tree_starts() const { return tree_starts_; }

  // input_ids, position_ids, subtree_ends: [num_tokens()]
  void write_tokens(int64_t* input_ids, int64_t* position_ids, int32_t* subtree_ends) const {
    for (const ForestNode& node : nodes_) {
      std::copy_n(tokens_ + node.first_token, node.length, input_ids + node.packed);
      for (int64_t i = 0; i < node.length; ++i) position_ids[node.packed + i] = node.depth + i;
      std::fill_n(subtree_ends + node.packed, node.length, static_cast<int32_t>(node.subtree_end));
    }
  }

  // token_index: [ends[num_sequences]], the packed position of every token of the input
  void write_index(int64_t* token_index) const {
    for (size_t n = 0; n < last_node_.size(); ++n) {
      int64_t stop = ends_[n + 1] - ends_[n];
      for (int64_t k = last_node_[n]; k >= 0; k = nodes_[k].parent) {
        const ForestNode& node = nodes_[k];  // it may lie below the end: it was split there since
        for (int64_t i = node.depth; i < stop; ++i)
          token_index[ends_[n] + i] = node.packed + i - node.depth;
        stop = std::min(stop, node.depth);
      }
    }
  }

 private:
  struct Branch {  // the child of a node that starts with a token
    int64_t node, token;
    bool operator==(const Branch& other) const {
      return node == other.node && token == other.token;
    }
  };
  struct BranchHash {
    size_t operator()(const Branch& branch) const {
      uint64_t x = static_cast<uint64_t>(branch.node) * 0x9e3779b97f4a7c15u;
      x ^= static_cast<uint64_t>(branch.token) + (x >> 29);
      return static_cast<size_t>(x * 0xbf58476d1ce4e5b9u >> 16);
    }
  };

  // Returns the node in which sequence n ends, -1 for an empty one.
  int64_t insert(int64_t n) {
    const int64_t length = ends_[n + 1] - ends_[n];
    int64_t node = -1, depth = 0;
    while (depth < length) {
      const int64_t first = ends_[n] + depth;
      const auto [branch, is_new] =
          children_.try_emplace(Branch{node, tokens_[first]}, static_cast<int64_t>(nodes_.size()));
      if (is_new) {
        nodes_.push_back({first, length - depth, depth, n, node, 0, 0});
        return branch->second;
      }
      const int64_t child = branch->second;
      const int64_t most = std::min(nodes_[child].length, length - depth);
      const int64_t equal =
          common_prefix(tokens_ + nodes_[child].first_token, tokens_ + first, most);
      depth += equal;
      if (equal == nodes_[child].length || depth == length) {
        node = child;
      } else {
        node = branch->second = static_cast<int64_t>(nodes_.size());
        split(child, equal);
      }
    }
    return node;
  }

  // Makes the first `length` tokens of a node its new parent, the last of nodes_.
  void split(int64_t child, int64_t length) {
    ForestNode head = nodes_[child], &tail = nodes_[child];
    head.length = length;
    tail.first_token += length;
    tail.length -= length;
    tail.depth += length;
    tail.parent = static_cast<int64_t>(nodes_.size());
    children_.emplace(Branch{tail.parent, tokens_[tail.first_token]}, child);
    nodes_.push_back(head);
  }

  static int64_t common_prefix(const int64_t* a, const int64_t* b, int64_t most) {
    constexpr int64_t kBlock = 64;
    int64_t i = 0;
    while (i + kBlock <= most && std::memcmp(a + i, b + i, kBlock * sizeof(int64_t)) == 0)
      i += kBlock;
    while (i < most && a[i] == b[i]) ++i;
    return i;
  }

  // Depth-first order, children by the earliest sequence through them.
  void lay_out() {
    const int64_t count = static_cast<int64_t>(nodes_.size());
    std::vector<int64_t> latest_first(count), sibling(count, -1), first_child(count + 1, -1);
    for (int64_t k = 0; k < count; ++k) latest_first[k] = k;
    std::sort(latest_first.begin(), latest_first.end(), [&](int64_t a, int64_t b) {
      return nodes_[a].first_sequence > nodes_[b].first_sequence;
    });
    for (const int64_t k : latest_first) {  // siblings differ in it
      int64_t& first = first_child[nodes_[k].parent + 1];
      sibling[k] = first;
      first = k;
    }
    std::vector<int64_t> order, open;
    order.reserve(count);
    for (int64_t k = first_child[0]; k >= 0 || !open.empty();) {
      if (k < 0) {
        k = open.back();
        open.pop_back();
        continue;
      }
      ForestNode& node = nodes_[k];
      if (node.parent < 0) tree_starts_.push_back(num_tokens_);
      node.packed = num_tokens_;
      node.subtree_end = num_tokens_ += node.length;
      order.push_back(k);
      if (sibling[k] >= 0) open.push_back(sibling[k]);
      k = first_child[k + 1];
    }
    for (auto k = order.rbegin(); k != order.rend(); ++k) {
      const ForestNode& node = nodes_[*k];
      if (node.parent < 0) continue;
      int64_t& end = nodes_[node.parent].subtree_end;
      end = std::max(end, node.subtree_end);
    }
  }

  const int64_t* tokens_;
  const int64_t* ends_;
  std::vector<ForestNode> nodes_;
  std::unordered_map<Branch, int64_t, BranchHash> children_;
  std::vector<int64_t> last_node_;    // of every sequence
  std::vector<int64_t> tree_starts_;  // packed position of every root
  int64_t num_tokens_ = 0;
};

}  // namespace hybridengine
