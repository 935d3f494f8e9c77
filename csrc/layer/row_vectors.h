// Loops over the vectors of a row. Included only by *_cpu.cpp files.
#pragma once

#include <algorithm>

#include "common/simd.h"
#include "layer/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

constexpr int64_t kRowGrain = 4;  // rows of a thread at least

// A vector of a row: the first `count` elements exist, the others are `fill` and are not stored.
struct Part {
  int64_t begin;
  int64_t count;

  template <typename T>
  VecF load_from(const T* p, float fill = 0.0f) const {
    return count == kWidth ? load(p + begin) : load_part(p + begin, count, fill);
  }
  template <typename T>
  void store_to(T* p, VecF v) const {
    if (count == kWidth) {
      store(p + begin, v);
    } else {
      store_part(p + begin, v, count);
    }
  }
};

template <typename T>
HE_SIMD VecF rounded(VecF v) {
  T stored[kWidth];
  store(stored, v);
  return load(stored);
}

// a * b, rounded to T. The empty instruction keeps the compiler from making it and a sum one
// instruction, which would round once.
template <typename T>
HE_SIMD VecF product(VecF a, VecF b) {
  VecF v = a * b;
  asm("" : "+m"(v));
  return rounded<T>(v);
}

template <typename Body>
HE_SIMD void for_parts(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) body(Part{i, kWidth});
  if (i < width) body(Part{i, width - i});
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
