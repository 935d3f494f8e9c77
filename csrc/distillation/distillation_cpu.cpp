// Each row is read from memory once; the passes after the first find it in the cache.
//
//   1. soft-cap (in place) and maximum of z      2. sum of exp(z - maximum)
//   3. the divergence; the gradient is incoming (a - s b), where the sum s of the row is complete
//      only afterwards: a and b replace the logits      4. the gradient
//
// Sums are of blocks in float32, of the row in float64, in a fixed order.
#include <cmath>
#include <limits>
#include <utility>

#include "common/parallel.h"
#include "common/simd.h"
#include "distillation/params.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kBlock = 256 * kWidth;  // elements of a float32 sum
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// body(begin, count, part): vectors of a row, `part` for the last, shorter one; after(): a block.
template <typename Body, typename After>
inline void for_each(int64_t vocab, const Body& body, const After& after) {
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) body(i, int64_t{kWidth});
    if (i < end) body(i, end - i);
    after();
  }
}

// -inf in the lanes past the end of the row, which adds 0 to every sum.
HE_SIMD VecF load_row(const float* p, int64_t count) {
  return count == kWidth ? load(p) : load_part(p, count, kMinusInfinity);
}

template <typename T>
HE_SIMD void store_row(T* p, VecF v, int64_t count) {
  count == kWidth ? store(p, v) : store_part(p, v, count);
}

// A row of one model's logits: x, or y = softcap tanh(scale x / softcap) from `prepare` on.
struct Row {
  Row(float* x, int64_t vocab, const LogitTransform& transform)
      : x(x), vocab(vocab), softcap(transform.softcap) {
    factor = (softcap == 0 ? transform.scale : 1.0f) / transform.temperature;
    grad_factor = transform.scale / transform.temperature;
    cap_scale = softcap == 0 ? 0.0f : transform.scale / softcap;
  }

  void prepare() {
    VecF top = splat(kMinusInfinity);
    const auto nothing = [] {};
    if (softcap != 0) {
      for_each(
          vocab,
          [&](int64_t i, int64_t count) {
            store_row(x + i, softcap * tanh(load_row(x + i, count) * cap_scale), count);
          },
          nothing);
    }
    for_each(
        vocab, [&](int64_t i, int64_t count) { top = max(load_row(x + i, count), top); }, nothing);
    max_z = largest(top) * factor;
    double total = 0;
    VecF block{};
    for_each(
        vocab, [&](int64_t i, int64_t count) { block += exp(distance(i, count)); },
        [&] {
          total += sum(block);
          block = VecF{};
        });
    log_sum = static_cast<float>(std::log(total));
  }

  // z - maximum.
  VecF distance(int64_t i, int64_t count) const { return load_row(x + i, count) * factor - max_z; }

  // dz / dx; `grad_factor` without a soft-cap.
  VecF derivative(int64_t i, int64_t count) const {
    if (softcap == 0) return splat(grad_factor);
    const VecF tanh_x = load_row(x + i, count) / softcap;
    return grad_factor * (1.0f - tanh_x * tanh_x);
  }

  float* x;
  int64_t vocab;
  float softcap, factor, grad_factor, cap_scale;
  float max_z, log_sum;
};

HE_SIMD VecF zero_unless(VecI mask, VecF value) { return select(mask, value, VecF{}); }

// What an entry with log-probs log_q and log_p adds to the divergence, and a; s is the sum of its
// `share`, and b is q.
struct Entry {
  VecF loss, a, share;
};

HE_SIMD Entry forward_kl(VecF q, VecF p, VecF log_ratio) {
  return {zero_unless(p > 0.0f, p * log_ratio), q - p, VecF{}};
}

HE_SIMD Entry reverse_kl(VecF q, VecF, VecF log_ratio) {
  const VecF loss = zero_unless(q > 0.0f, -(q * log_ratio));
  return {loss, loss, loss};
}

// e^-x - 1 for x >= 0, given e^-x: by its series near 0, where the difference loses digits.
HE_SIMD VecF exp_minus_one(VecF x, VecF exp_x) {
  VecF series = splat(1.0f / 720);
  series = series * x - 1.0f / 120;
  series = series * x + 1.0f / 24;
  series = series * x - 1.0f / 6;
  series = series * x + 0.5f;
  series = series * x - 1.0f;
  return select(x < 0.35f, series * x, exp_x - 1.0f);
}

struct Weights {
  float beta, rest;  // of p and q; they add up to 1
};

// log_ratio: log p - log q. Of p and q, `major` has the larger weight in m, and d is log minor -
// log major. log m - log major = log(1 + y), y = weight (e^d - 1) >= -1/2, which keeps its digits
// however small the weight is; where y is large, log m - log minor takes its place.
HE_SIMD Entry jensen_shannon(VecF q, VecF p, VecF log_ratio, const Weights& weights) {
  const bool q_is_major = weights.beta < 0.5f;
  const float weight = q_is_major ? weights.beta : weights.rest;
  const float major_weight = q_is_major ? weights.rest : weights.beta;
  const VecF d = q_is_major ? log_ratio : -log_ratio;
  const VecF magnitude = (VecF)((VecI)d & 0x7FFFFFFF);
  const VecF small = exp(-magnitude), change = exp_minus_one(magnitude, small);
  const VecF y = weight * select(d > 0.0f, -change / small, change);
  const VecI is_near = y <= 1.0f;
  const VecF sum = select(is_near, 1.0f + y, weight + major_weight * small);
  const VecF log_sum = log(sum) + select(is_near, y - (sum - 1.0f), VecF{});
  const VecF of_major = select(is_near, -log_sum, -d - log_sum);  // log major - log m
  const VecF of_minor = select(is_near, d - log_sum, -log_sum);   // log minor - log m
  const VecF of_q = zero_unless(q > 0.0f, weights.rest * q * (q_is_major ? of_major : of_minor));
  const VecF of_p = zero_unless(p > 0.0f, weights.beta * p * (q_is_major ? of_minor : of_major));
  return {of_p + of_q, of_q, of_q};
}

// Replaces the student's row by a dz / dx and the teacher's by q dz / dx, if `keep`. Returns the
// divergence, and s.
template <typename Function>
std::pair<double, double> diverge(const Row& student, const Row& teacher, bool keep,
                                  const Function& function) {
  double loss = 0, share = 0;
  VecF block_loss{}, block_share{};
  for_each(
      student.vocab,
      [&](int64_t i, int64_t count) {
        const VecF log_q = student.distance(i, count) - student.log_sum;
        const VecF log_p = teacher.distance(i, count) - teacher.log_sum;
        const VecF q = exp(log_q);
        const Entry entry = function(q, exp(log_p), log_p - log_q);
        block_loss += entry.loss;
        block_share += entry.share;
        if (keep) {
          const VecF derivative = student.derivative(i, count);
          store_row(student.x + i, entry.a * derivative, count);
          store_row(teacher.x + i, q * derivative, count);
        }
      },
      [&] {
        loss += sum(block_loss);
        share += sum(block_share);
        block_loss = block_share = VecF{};
      });
  return {loss, share};
}

template <typename T>
void write_gradient(T* grad, const float* a, const float* b, int64_t vocab, float incoming,
                    float share) {
  for_each(
      vocab,
      [&](int64_t i, int64_t count) {
        store_row(grad + i, incoming * (load_row(a + i, count) - share * load_row(b + i, count)),
                  count);
      },
      [] {});
}

template <typename T, typename Function>
void rows_of(const Distillation& p, const Function& function) {
  parallel_for(p.rows, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Row student(p.student + row * p.student_stride, p.vocab, p.student_transform);
      Row teacher(p.teacher + row * p.teacher_stride, p.vocab, p.teacher_transform);
      student.prepare();
      teacher.prepare();
      const auto [loss, share] = diverge(student, teacher, p.incoming, function);
      p.losses[row] = static_cast<float>(loss);
      if (!p.incoming) continue;
      write_gradient(static_cast<T*>(p.grad) + row * p.grad_stride, student.x, teacher.x, p.vocab,
                     p.incoming[row], static_cast<float>(share));
    }
  });
}

template <typename T>
void by_divergence(const Distillation& p) {
  if (p.beta == 0) return rows_of<T>(p, [](auto... x) { return forward_kl(x...); });
  if (p.rest == 0) return rows_of<T>(p, [](auto... x) { return reverse_kl(x...); });
  const Weights weights{p.beta, p.rest};
  rows_of<T>(p, [weights](auto... x) { return jensen_shannon(x..., weights); });
}

}  // namespace

void distillation_cpu(const Distillation& p) {
  with_float(p.grad_dtype, [&](auto grad) { by_divergence<decltype(grad)>(p); });
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
