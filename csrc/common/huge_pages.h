// Huge pages for large new outputs: a page fault per 4 KiB costs more than writing them.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hybridengine {

// Requests 2 MiB pages for memory that is not mapped yet. Only from 32 MiB on: malloc gives such a
// block its own mapping, so no other block is affected.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{2} << 20;
  if (bytes < (int64_t{32} << 20)) return;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // may be ignored
#endif
}

}  // namespace hybridengine
