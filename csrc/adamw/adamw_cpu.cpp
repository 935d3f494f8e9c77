// One pass over the five arrays, a word of the mask (32 elements) at a time; limited by memory. The
// arithmetic of an element does not depend on its position: tails are vectors with unused lanes.
#include "adamw/params.h"
#include "adamw/update.h"
#include "changes/change_mask.h"
#include "checksum/word_sums.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

// What is compared.
HE_SIMD VecU engine_bits(VecF v, bf16) { return bf16_rounded(v) >> 16; }
HE_SIMD VecU engine_bits(VecF v, f16) {
  f16 rounded[kWidth];
  store(rounded, v);
  VecH bits;
  std::memcpy(&bits, rounded, sizeof bits);
  return __builtin_convertvector(bits, VecU);
}

// a * b, which the compiler cannot fuse into a sum. Whether it does may depend on the code around.
HE_SIMD VecF rounded_product(VecF a, VecF b) {
  VecF product = a * b;
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

struct VectorMath {
  HE_SIMD VecF root(VecF x) { return sqrt(x); }
  HE_SIMD VecF select(VecI mask, VecF yes, VecF no) { return mask ? yes : no; }
  HE_SIMD VecF product(VecF a, VecF b) { return rounded_product(a, b); }
  HE_SIMD VecF product(VecF a, float b) { return rounded_product(a, splat(b)); }
};

struct Unmarked {};  // as the engine's type: changes are not marked, nor checksums computed

// The checksum of a parameter's elements from `begin` on, in the pass that has them in registers.
class Checksum {
 public:
  explicit Checksum(int64_t begin) : begin_(begin) {}

  inline __attribute__((always_inline)) void add(VecF x) {
    sums_.add(0, (Lanes)x);
    ++rows_;
  }

  // The last elements, fewer than a vector.
  void add_part(VecF x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) rest_ += weighted(next() + i, word(x, i));
  }

  // first: of the elements. Threads add their parts in any order.
  void add_to(uint64_t* total, VecF first) const {
    const uint64_t of_first = begin_ ? 0 : kFirstWord * word(first, 0);
    __atomic_fetch_add(total, sums_.total(begin_, rows_) + rest_ + of_first, __ATOMIC_RELAXED);
  }

 private:
  static uint64_t word(VecF x, int64_t i) { return ((VecU)x)[i]; }
  int64_t next() const { return begin_ + rows_ * kWidth; }

  WordSums<1> sums_;
  int64_t begin_, rows_ = 0;
  uint64_t rest_ = 0;
};

template <typename Grad, typename Engine>
class Update {
 public:
  Update(const AdamwTensor& tensor, const AdamwOptions& options)
      : tensor_(tensor), scalars_(adamw_scalars(options, tensor.step)) {}

  void run(int64_t begin, int64_t end) const {
    const VecF first = load_part(tensor_.param + begin, 1, 0);
    Checksum before(begin), after(begin);
    int64_t i = begin;
    for (; i + kMaskBits <= end; i += kMaskBits) {
      uint32_t changed = 0;
      for (int j = 0; j < kMaskBits; j += kWidth) changed |= vector(i + j, before, after) << j;
      mark(i, changed);
    }
    uint32_t changed = 0;
    const int64_t tail = i;
    for (; i + kWidth <= end; i += kWidth) changed |= vector(i, before, after) << (i - tail);
    if (i < end) changed |= part(i, end - i, before, after) << (i - tail);
    mark(tail, changed);
    if constexpr (kMarked) {
      before.add_to(tensor_.checksums, first);
      after.add_to(tensor_.checksums + 1, load_part(tensor_.param + begin, 1, 0));
    }
  }

 private:
  static constexpr bool kMarked = !__is_same(Engine, Unmarked);

  // Both return a bit for each changed element.
  inline __attribute__((always_inline)) uint32_t vector(int64_t i, Checksum& before,
                                                        Checksum& after) const {
    VecF p = load(tensor_.param + i);
    VecF m = load(tensor_.exp_avg + i), v = load(tensor_.exp_avg_sq + i);
    if constexpr (kMarked) before.add(p);
    const uint32_t changed = update(load(grad() + i), p, m, v);
    if constexpr (kMarked) after.add(p);
    store(tensor_.param + i, p);
    store(tensor_.exp_avg + i, m);
    store(tensor_.exp_avg_sq + i, v);
    return changed;
  }

  uint32_t part(int64_t i, int64_t count, Checksum& before, Checksum& after) const {
    VecF p = load_part(tensor_.param + i, count, 0);
    VecF m = load_part(tensor_.exp_avg + i, count, 0);
    VecF v = load_part(tensor_.exp_avg_sq + i, count, 0);
    if constexpr (kMarked) before.add_part(p, count);
    const uint32_t changed = update(load_part(grad() + i, count, 0), p, m, v);
    if constexpr (kMarked) after.add_part(p, count);
    store_part(tensor_.param + i, p, count);
    store_part(tensor_.exp_avg + i, m, count);
    store_part(tensor_.exp_avg_sq + i, v, count);
    return changed & ((1u << count) - 1);
  }

  inline __attribute__((always_inline)) uint32_t update(VecF g, VecF& p, VecF& m, VecF& v) const {
    const VecF before = p;
    adamw_update<VectorMath>(scalars_, g, p, m, v);
    if constexpr (kMarked) {
      return lane_bits((VecI)(engine_bits(before, Engine{}) != engine_bits(p, Engine{})));
    } else {
      return 0;
    }
  }

  void mark(int64_t i, uint32_t changed) const {
    if (changed) tensor_.changed[i / kMaskBits] |= changed;
  }

  const Grad* grad() const { return static_cast<const Grad*>(tensor_.grad); }

  const AdamwTensor& tensor_;
  const AdamwScalars scalars_;
};

template <typename Grad, typename Engine>
void update_all(const AdamwParams& p) {
  parallel_for(p.num_chunks, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const TensorChunk at = locate_chunk(p.tensors, p.num_tensors, chunk);
      Update<Grad, Engine>(p.tensors[at.tensor], p.options).run(at.begin, at.end);
    }
  });
}

template <typename Grad>
void by_engine_dtype(const AdamwParams& p) {
  if (!p.marks_changes) return update_all<Grad, Unmarked>(p);
  if (p.engine_dtype == DType::bf16) return update_all<Grad, bf16>(p);
  update_all<Grad, f16>(p);
}

}  // namespace

void adamw_cpu(const AdamwParams& p) {
  switch (p.grad_dtype) {
    case DType::bf16:
      return by_engine_dtype<bf16>(p);
    case DType::f16:
      return by_engine_dtype<f16>(p);
    default:
      return by_engine_dtype<float>(p);
  }
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
