// Ascending positions as gaps: each position is the number of positions skipped since the one
// before, in fields of 1, 2 or 3 bytes (little endian). A field of all ones skips as many positions
// as it counts and names none, so that the number of fields is at most count + positions / 255.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace hybridengine {

constexpr int kMaxGapWidth = 3;  // bytes

HE_HOST_DEVICE int64_t gap_escape(int width) { return (int64_t{1} << (8 * width)) - 1; }

constexpr int64_t kMaxPosition = int64_t{1} << 48;  // no tensor has as many elements

// The bytes that gaps take with fields of 1, 2 and 3 bytes, in bytes[0..2]. Returns the number of
// the first position that is below the one before or `start`, or above kMaxPosition; else -1.
inline int64_t gap_sizes(const int64_t* positions, int64_t count, int64_t start, int64_t* bytes) {
  int64_t escapes[kMaxGapWidth] = {0, 0, 0};
  int64_t next = start;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t gap = static_cast<uint64_t>(positions[i]) - static_cast<uint64_t>(next);
    if (gap < 255) {
      next = positions[i] + 1;
      continue;
    }
    if (positions[i] < next || positions[i] > kMaxPosition) return i;
    next = positions[i] + 1;
    escapes[0] += gap / 255;
    escapes[1] += gap / 65535;
    escapes[2] += gap / 16777215;
  }
  for (int width = 1; width <= kMaxGapWidth; ++width)
    bytes[width - 1] = width * (count + escapes[width - 1]);
  return -1;
}

template <int width>
void write_gaps(const int64_t* positions, int64_t count, int64_t start, uint8_t* out) {
  const int64_t escape = gap_escape(width);
  int64_t next = start;
  for (int64_t i = 0; i < count; ++i) {
    int64_t gap = positions[i] - next;
    next = positions[i] + 1;
    for (; gap >= escape; gap -= escape)
      for (int byte = 0; byte < width; ++byte) *out++ = 0xFF;
    for (int byte = 0; byte < width; ++byte) *out++ = static_cast<uint8_t>(gap >> (8 * byte));
  }
}

// Reads `bytes` bytes; returns the number of positions, or -1 where it is not `count` or a position
// is not below `end`.
template <int width>
int64_t read_gaps(const uint8_t* in, int64_t bytes, int64_t start, int64_t end, int64_t count,
                  int64_t* positions) {
  const int64_t escape = gap_escape(width);
  int64_t next = start, found = 0;
  for (const uint8_t* last = in + bytes / width * width; in < last; in += width) {
    int64_t gap = 0;
    for (int byte = 0; byte < width; ++byte) gap |= int64_t{in[byte]} << (8 * byte);
    next += gap;
    if (gap == escape) continue;
    if (found == count || next >= end) return -1;
    positions[found++] = next++;
  }
  return found == count ? found : -1;
}

// On CUDA a block takes a chunk of positions or fields at a time. Passes run one after the other;
// between them the caller turns the sums of the chunks into inclusive sums.
constexpr int64_t kGapChunk = 4096;

struct EncodeGapsParams {
  const int64_t* positions;
  int64_t count;  // above 0
  int64_t start;
  int64_t* sums;   // [chunks of positions, kMaxGapWidth]: escapes for each width
  uint8_t* bytes;  // all 0xFF
};

struct DecodeGapsParams {
  const uint8_t* bytes;
  int64_t num_fields;  // above 0
  int64_t start;
  int64_t count;
  int64_t* sums;       // [chunks of fields, 2]: how far they lead, and positions
  int64_t* positions;  // [count]; more are not written
};

// All return a cudaError_t.
int count_escapes_cuda(const EncodeGapsParams& params, void* stream);
int write_gaps_cuda(const EncodeGapsParams& params, int width, void* stream);
int count_fields_cuda(const DecodeGapsParams& params, int width, void* stream);
int read_gaps_cuda(const DecodeGapsParams& params, int width, void* stream);

}  // namespace hybridengine
