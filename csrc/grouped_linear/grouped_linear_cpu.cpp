// Register tiles of 6 rows of `a` by packed columns of `b`; see params.h. Rows of float32 along k
// are read as they are. A thread packs a block of `b`, multiplies it with 96 rows of `a` at a time,
// and meanwhile prefetches the blocks that come next.
#include <algorithm>
#include <vector>

#include "common/aligned_buffer.h"
#include "common/products.h"
#include "common/simd.h"
#include "common/streaming.h"
#include "common/tasks.h"
#include "common/transpose.h"
#include "grouped_linear/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kDepth = 256;  // numbers along k of a block, which are summed first
constexpr int64_t kPanelColumns = kPanel<kGroup> * kWidth;
constexpr int64_t kTile = kGroup * kPanelColumns;
constexpr int64_t kTileRows = 96;             // of `a`, which stay in the cache for all panels
constexpr int64_t kTaskRows = 4 * kTileRows;  // of a task, at most
constexpr int64_t kTaskColumns = 256;
constexpr int64_t kCachedBytes = 16 << 20;  // a larger result leaves the cache before it is read

static_assert(kTaskColumns % kPanelColumns == 0 && kTileRows % kGroup == 0);

// A part of a group's result, computed by one thread.
struct Task {
  int64_t group;
  int64_t m, m_end;
  int64_t n, n_end;
};

// Reads an operand's next block into the cache, a share at every step of the current block: rows
// of other memory pages are not foreseen by the hardware.
class Prefetch {
 public:
  Prefetch() = default;
  template <typename T>
  Prefetch(const T* block, int64_t stride, int64_t rows, int64_t columns, int64_t steps)
      : row_(reinterpret_cast<const char*>(block)),
        stride_(stride * sizeof(T)),
        rows_(rows),
        bytes_(columns * sizeof(T)),
        steps_(steps) {}

  void step() {
    for (due_ += rows_; due_ >= steps_; due_ -= steps_, row_ += stride_) {
      for (int64_t i = 0; i < bytes_; i += kCacheLine) __builtin_prefetch(row_ + i, 0, 2);
    }
  }

 private:
  const char* row_ = nullptr;
  int64_t stride_ = 0, rows_ = 0, bytes_ = 0, steps_ = 1, due_ = 0;
};

// kWidth steps from contiguous numbers.
template <typename Step, typename T>
HE_SIMD VecU load_numbers(const T* p) {
  if constexpr (kStep<Step> == 1) {
    return (VecU)load(p);
  } else {
    VecU pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
}

// The same from `count` numbers; zeros after them.
template <typename Step, typename T>
HE_SIMD VecU load_numbers(const T* p, int64_t count) {
  constexpr int64_t wanted = kWidth * kStep<Step>;
  if (count >= wanted) return load_numbers<Step>(p);
  T padded[wanted] = {};
  std::memcpy(padded, p, count * sizeof(T));
  return load_numbers<Step>(padded);
}

// The steps of `rows` rows of `depth` numbers along k, [rows, ld], padded with zeros.
template <typename Step, typename T>
void pack_rows(const T* in, int64_t stride, int64_t rows, int64_t depth, Step* out, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r, in += stride, out += ld) {
    for (int64_t k = 0; k < depth; k += kWidth * kStep<Step>) {
      const VecU steps = load_numbers<Step>(in + k, depth - k);
      std::memcpy(out + k / kStep<Step>, &steps, sizeof steps);
    }
  }
}

// The same transposed, [steps, ld], for up to kWidth rows; other rows are zeros.
template <typename Step, typename T>
void pack_transposed(const T* in, int64_t stride, int64_t rows, int64_t depth, Step* out,
                     int64_t ld) {
  const int64_t steps = (depth + kStep<Step> - 1) / kStep<Step>;
  for (int64_t s = 0; s < steps; s += kWidth, out += kWidth * ld) {
    const int64_t k = s * kStep<Step>;
    VecU block[kWidth] = {};
    for (int64_t r = 0; r < std::min<int64_t>(rows, kWidth); ++r) {
      block[r] = load_numbers<Step>(in + r * stride + k, depth - k);
    }
    swap_blocks<1>(block);
    for (int64_t i = 0; i < std::min<int64_t>(kWidth, steps - s); ++i) {
      std::memcpy(out + i * ld, &block[i], sizeof(VecU));
    }
  }
}

// kWidth columns of a step from rows of `count` columns; zeros after them.
template <typename Step, typename T>
HE_SIMD VecU load_columns(const T* row, const T* next_row, int64_t count) {
  if constexpr (kStep<Step> == 1) {
    return load_numbers<Step>(row, count);
  } else {
    uint16_t even[kWidth] = {}, odd[kWidth] = {};
    const int64_t bytes = std::min<int64_t>(kWidth, count) * sizeof(T);
    std::memcpy(even, row, bytes);
    if (next_row) std::memcpy(odd, next_row, bytes);
    VecH low, high;
    std::memcpy(&low, even, sizeof low);
    std::memcpy(&high, odd, sizeof high);
    return __builtin_convertvector(low, VecU) | __builtin_convertvector(high, VecU) << 16;
  }
}

// The steps of `columns` columns whose neighbours are contiguous, in panels of ld columns, each
// [steps, ld]; zeros up to a multiple of kWidth.
template <typename Step, typename T>
void pack_columns(const T* in, int64_t k_stride, int64_t columns, int64_t depth, Step* out,
                  int64_t ld, int64_t panel_size) {
  for (int64_t k = 0; k < depth; k += kStep<Step>, in += kStep<Step> * k_stride, out += ld) {
    const T* next = k + 1 < depth ? in + k_stride : nullptr;
    Step* panel = out;
    for (int64_t first = 0; first < columns; first += ld, panel += panel_size) {
      const int64_t end = std::min(first + ld, columns);
      for (int64_t c = first; c < end; c += kWidth) {
        const VecU steps = load_columns<Step>(in + c, next ? next + c : nullptr, columns - c);
        std::memcpy(panel + (c - first), &steps, sizeof steps);
      }
    }
  }
}

// The buffers of a thread, and its products.
template <typename T>
class Worker {
 public:
  explicit Worker(const GroupedGemm& p)
      : p_(p),
        a_(kTileRows * kDepth),
        b_(kTaskColumns * kDepth),
        sums_(kTaskRows * kTaskColumns),
        streams_(kInPlace && p.grouped == GroupedDim::k &&
                 p.groups * p.m * p.n * int64_t{sizeof(float)} > kCachedBytes) {}

  // following: the task after this one, or null.
  void run(const Task& task, const Task* following) {
    T* out = static_cast<T*>(p_.out) + start(p_.out_layout, task);
    const int64_t size = depth_of(task);
    Block block{&task, 0, std::min(kDepth, size)};
    bool last = false;
    while (!last) {  // once where there is nothing to sum: the result is zero
      last = block.k + block.depth >= size;
      Block next{&task, block.k + block.depth, std::min(kDepth, size - block.k - block.depth)};
      if (last) next = {following, 0, following ? std::min(kDepth, depth_of(*following)) : 0};
      run_block(block, next, last, out);
      block = next;
    }
    if (streams_) stream_fence();
  }

 private:
  using Step = StepOf<T>;
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);

  // Numbers [k, k + depth) of a task's sums.
  struct Block {
    const Task* task;
    int64_t k, depth;
  };

  // Rows [m, m_end) of a block.
  struct Part {
    const Task& task;
    int64_t m, m_end;
    int64_t depth;
    bool first, last;  // block
  };

  int64_t start(const GroupedMatrix& x, const Task& task) const {
    return task.group * x.group_stride + p_.ends[task.group] * x.row_stride;
  }

  int64_t depth_of(const Task& task) const {
    return p_.grouped == GroupedDim::k ? p_.ends[task.group + 1] - p_.ends[task.group] : p_.k;
  }

  // The operand's part of a block, from its row `row`.
  const T* start(const void* data, const GroupedMatrix& x, const Block& block, int64_t row) const {
    return static_cast<const T*>(data) + start(x, *block.task) + row * x.stride +
           block.k * x.k_stride;
  }

  // Reads `rows` rows of an operand, from `row` on, in `steps` steps.
  Prefetch prefetch(const void* data, const GroupedMatrix& x, const Block& block, int64_t row,
                    int64_t rows, int64_t steps) const {
    const T* from = start(data, x, block, row);
    if (x.k_stride == 1) return {from, x.stride, rows, block.depth, steps};
    return {from, x.k_stride, block.depth, rows, steps};
  }

  void run_block(const Block& block, const Block& next, bool last, T* out) {
    const Task& task = *block.task;
    const int64_t columns = task.n_end - task.n, panels = ceil_div(columns, kPanelColumns);
    pack_b(start(p_.b, p_.b_layout, block, task.n), columns, block.depth);
    Prefetch next_b;
    if (next.task) {
      next_b = prefetch(p_.b, p_.b_layout, next, next.task->n, next.task->n_end - next.task->n,
                        panels * ceil_div(task.m_end - task.m, kGroup));
    }
    for (int64_t m = task.m; m < task.m_end; m += kTileRows) {
      const int64_t m_end = std::min(m + kTileRows, task.m_end);
      const int64_t steps = panels * ceil_div(m_end - m, kGroup);
      Prefetch next_a;
      if (m_end < task.m_end) {
        const int64_t rows = std::min(kTileRows, task.m_end - m_end);
        next_a = prefetch(p_.a, p_.a_layout, block, m_end, rows, steps);
      } else if (next.task) {
        const int64_t rows = std::min(kTileRows, next.task->m_end - next.task->m);
        next_a = prefetch(p_.a, p_.a_layout, next, next.task->m, rows, steps);
      }
      const T* rows = start(p_.a, p_.a_layout, block, m);
      const Part part{task, m, m_end, block.depth, block.k == 0, last};
      if (p_.a_layout.k_stride == 1) {
        multiply_rows<Layout::rows>(part, rows, out, next_a, next_b);
      } else {
        multiply_rows<Layout::columns>(part, rows, out, next_a, next_b);
      }
    }
  }

  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

  static int64_t steps_of(int64_t depth) { return (depth + kStep<Step> - 1) / kStep<Step>; }

  // As panels of kPanelColumns, each [steps, kPanelColumns].
  void pack_b(const T* b, int64_t columns, int64_t depth) {
    const GroupedMatrix& layout = p_.b_layout;
    const int64_t panel_size = steps_of(depth) * kPanelColumns;
    if (layout.k_stride != 1) {
      pack_columns<Step>(b, layout.k_stride, columns, depth, static_cast<Step*>(b_), kPanelColumns,
                         panel_size);
      return;
    }
    for (int64_t n = 0; n < columns; n += kWidth) {
      pack_transposed<Step>(b + n * layout.stride, layout.stride, columns - n, depth,
                            b_ + n / kPanelColumns * panel_size + n % kPanelColumns, kPanelColumns);
    }
  }

  template <Layout layout>
  void multiply_rows(const Part& part, const T* a, T* out, Prefetch& next_a, Prefetch& next_b) {
    constexpr bool along_k = layout == Layout::rows;
    const int64_t stride = along_k ? p_.a_layout.stride : p_.a_layout.k_stride;
    const int64_t rows = part.m_end - part.m;
    if constexpr (along_k && kInPlace) {
      multiply_tiles<layout>(part, a, stride, out, next_a, next_b);
    } else if constexpr (along_k) {
      pack_rows<Step>(a, stride, rows, part.depth, static_cast<Step*>(a_), kDepth);
      multiply_tiles<layout>(part, static_cast<const Step*>(a_), kDepth, out, next_a, next_b);
    } else {
      pack_columns<Step>(a, stride, rows, part.depth, static_cast<Step*>(a_), kTileRows, 0);
      multiply_tiles<layout>(part, static_cast<const Step*>(a_), kTileRows, out, next_a, next_b);
    }
  }

  template <Layout layout>
  void multiply_tiles(const Part& part, const Step* a, int64_t lda, T* out, Prefetch& next_a,
                      Prefetch& next_b) {
    const int64_t steps = steps_of(part.depth), a_stride = layout == Layout::rows ? lda : 1;
    const Step* panel = b_;
    for (int64_t n = part.task.n; n < part.task.n_end; n += kPanelColumns) {
      const int64_t columns = std::min(kPanelColumns, part.task.n_end - n);
      const int64_t vectors = (columns + kWidth - 1) / kWidth;
      for (int64_t m = part.m; m < part.m_end; m += kGroup) {
        const int64_t rows = std::min<int64_t>(kGroup, part.m_end - m);
        next_a.step();
        next_b.step();
        alignas(64) float tile[kTile];
        multiply<layout>(rows, vectors, steps, a + (m - part.m) * a_stride, lda, panel,
                         kPanelColumns, tile, kPanelColumns, false);
        finish_tile(part, m, rows, n, columns, tile, out);
      }
      panel += steps * kPanelColumns;
    }
  }

  // Adds the sums of earlier blocks; writes the result after the last one.
  void finish_tile(const Part& part, int64_t m, int64_t rows, int64_t n, int64_t columns,
                   float* tile, T* out) {
    if (!part.first || !part.last) {
      const int64_t panels = kTaskColumns / kPanelColumns;
      const int64_t index = (m - part.task.m) / kGroup * panels + (n - part.task.n) / kPanelColumns;
      float* sums = sums_ + index * kTile;
      for (int64_t i = 0; i < kTile; i += kWidth) {
        if (!part.first) store(tile + i, load(sums + i) + load(tile + i));
        if (!part.last) store(sums + i, load(tile + i));
      }
      if (!part.last) return;
    }
    const GroupedMatrix& layout = p_.out_layout;
    out += m * layout.stride + n * layout.k_stride;
    if (layout.k_stride == 1) {
      for (int64_t r = 0; r < rows; ++r) {
        T* row = out + r * layout.stride;
        if (streams_ && columns == kPanelColumns &&
            bytes_to_line(reinterpret_cast<char*>(row)) == 0) {
          stream_copy(reinterpret_cast<char*>(row),
                      reinterpret_cast<const char*>(tile + r * kPanelColumns),
                      kPanelColumns * sizeof(float));
        } else {
          store_row(row, tile + r * kPanelColumns, columns);
        }
      }
    } else {
      for (int64_t c = 0; c < columns; c += kWidth) {
        store_columns(out + c * layout.k_stride, layout.k_stride, tile + c, rows,
                      std::min<int64_t>(kWidth, columns - c));
      }
    }
  }

  // Columns of a tile, `rows` long, as rows of the result.
  static void store_columns(T* out, int64_t stride, const float* tile, int64_t rows,
                            int64_t columns) {
    constexpr int64_t kPart = std::min<int64_t>(kGroup, kWidth);
    for (int64_t first = 0; first < rows; first += kPart) {
      VecU block[kWidth] = {};
      for (int64_t r = first; r < std::min<int64_t>(first + kPart, kGroup); ++r) {
        block[r - first] = (VecU)load(tile + r * kPanelColumns);
      }
      swap_blocks<1>(block);
      const int64_t count = std::min(kPart, rows - first);
      for (int64_t c = 0; c < columns; ++c) {
        T* column = out + c * stride + first;
        if (count == kPart) {  // a copy of constant size
          store_part(column, (VecF)block[c], kPart);
        } else {
          store_part(column, (VecF)block[c], count);
        }
      }
    }
  }

  static void store_row(T* out, const float* tile, int64_t columns) {
    int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) store(out + c, load(tile + c));
    if (c < columns) store_part(out + c, load(tile + c), columns - c);
  }

  const GroupedGemm& p_;
  Buffer<Step> a_, b_;
  Buffer<float> sums_;
  bool streams_;  // the result around the cache
};

// Parts of all groups' results, so many that every thread has several.
std::vector<Task> make_tasks(const GroupedGemm& p) {
  std::vector<Task> tasks;
  for (int64_t task_rows = kTaskRows; task_rows >= kTileRows; task_rows /= 2) {
    tasks.clear();
    for (int64_t g = 0; g < p.groups; ++g) {
      const int64_t count = p.ends[g + 1] - p.ends[g];
      const int64_t rows = p.grouped == GroupedDim::m ? count : p.m;
      const int64_t columns = p.grouped == GroupedDim::n ? count : p.n;
      for (int64_t m = 0; m < rows; m += task_rows) {
        for (int64_t n = 0; n < columns; n += kTaskColumns) {
          tasks.push_back(
              {g, m, std::min(m + task_rows, rows), n, std::min(n + kTaskColumns, columns)});
        }
      }
    }
    if (p.num_threads == 1 || static_cast<int64_t>(tasks.size()) >= 8 * p.num_threads) break;
  }
  return tasks;
}

template <typename T>
void run(const GroupedGemm& p) {
  const std::vector<Task> tasks = make_tasks(p);
  const int64_t count = tasks.size();
  for_each_task_ahead<Worker<T>>(p, count, [&](int64_t i, int64_t following, Worker<T>& worker) {
    worker.run(tasks[i], following < count ? &tasks[following] : nullptr);
  });
}

}  // namespace

void grouped_gemm_cpu(const GroupedGemm& p) {
  with_factor<float, bf16>(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
