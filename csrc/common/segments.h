// Segments of packed tokens that continue earlier ones: a forest.
#pragma once

#include "common/binding.h"

namespace hybridengine {

struct SegmentBounds {
  int64_t begin(int64_t i) const { return ends[i]; }
  int64_t end(int64_t i) const { return ends[i + 1]; }
  int64_t parent(int64_t i) const { return parents ? parents[i] : -1; }

  int64_t count;
  const int32_t* ends;     // [count + 1]
  const int32_t* parents;  // [count], an earlier segment or -1; null: -1
};

// Of all tokens, on the CPU.
inline SegmentBounds check_segments(const Arguments& given, In cu_seqlens, OptionalIn parents,
                                    int64_t num_tokens) {
  given.on_cpu();
  SegmentBounds of{};
  of.ends = given.ends("cu_seqlens", cu_seqlens, &of.count, num_tokens, "tokens", true);
  of.parents = given.data<int32_t>("parents", parents, {of.count});
  for (int64_t i = 0; i < of.count; ++i)
    given.expect(-1 <= of.parent(i) && of.parent(i) < i, "parents[", i, "] is ", of.parent(i),
                 "; expected -1 or an earlier segment");
  return of;
}

}  // namespace hybridengine
