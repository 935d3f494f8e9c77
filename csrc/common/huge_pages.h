// Large fresh outputs: a page fault per 4 KiB costs more than writing them.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hybridengine {

// Asks for 2 MiB pages where the system grants them on request; pages already there stay.
// From 32 MiB on: malloc gives such a block a mapping of its own, so nobody else's is touched.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{2} << 20;
  if (bytes < (int64_t{32} << 20)) return;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // advice: may be refused
#endif
}

}  // namespace hybridengine
