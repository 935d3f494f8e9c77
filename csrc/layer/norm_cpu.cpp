// One row at a time; see params.h.
#include <cmath>
#include <vector>

#include "common/parallel.h"
#include "layer/row_vectors.h"

namespace hybridengine::HYBRIDENGINE_ISA {

namespace {

constexpr int64_t kBlockRows = 64;  // whose weight gradients are summed one after another

// sum_i term(i) over the vectors of a row: four chains, joined pairwise.
template <typename Term>
float sum_row(int64_t width, const Term& term) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= width; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) sums[j] += term(Part{i + j * kWidth, kWidth});
  }
  for (; i < width; i += kWidth) {
    sums[0] += term(Part{i, std::min<int64_t>(kWidth, width - i)});
  }
  return static_cast<float>(sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

template <typename T>
float mean_of(const T* x, int64_t width) {
  return sum_row(width, [x](Part part) { return part.load_from(x); }) / static_cast<float>(width);
}

// Adds to a part of a sum, whose memory is padded to complete vectors.
void add_to(float* sums, Part part, VecF v) {
  store(sums + part.begin, load(sums + part.begin) + v);
}

template <typename T>
void forward(const Norm& p) {
  const auto *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  parallel_for(p.rows, kRowGrain, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(p.x.data) + row / p.heads * p.token_stride +
                   row % p.heads * p.x.stride;
      if (p.residual) {
        T* sum = static_cast<T*>(p.residual) + row * p.width;
        for_parts(p.width,
                  [&](Part part) { part.store_to(sum, part.load_from(x) + part.load_from(sum)); });
        x = sum;
      }
      T* out = static_cast<T*>(p.out) + row * p.width;
      const float mean = p.centered ? mean_of(x, p.width) : 0.0f;
      const float squares = sum_row(p.width, [x, mean](Part part) {
        const VecF v = part.load_from(x, mean) - mean;
        return v * v;
      });
      const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(p.width) + p.eps);
      if (p.inverse_rms) p.inverse_rms[row] = inverse;
      for_parts(p.width, [&](Part part) {
        VecF v = (part.load_from(x) - mean) * inverse;
        if (p.round_first) v = rounded<T>(v);
        v = v * (part.load_from(weight) + p.offset);
        part.store_to(out, bias ? v + part.load_from(bias) : v);
      });
    }
  });
}

template <typename T>
void backward(const NormBackward& p) {
  const auto* weight = static_cast<const T*>(p.weight);
  const int64_t blocks = (p.rows + kBlockRows - 1) / kBlockRows;
  const int64_t padded = (p.width + kWidth - 1) / kWidth * kWidth;
  const int64_t sums_of_row = (p.centered ? 2 : 1) * padded;  // of the weight, and of the bias
  std::vector<float> sums(blocks * sums_of_row);
  parallel_for(blocks, 1, p.num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kBlockRows; row < std::min(p.rows, end * kBlockRows); ++row) {
      const T *x = p.x.row<T>(row), *grad = p.grad_out.row<T>(row);
      T* grad_x = static_cast<T*>(p.grad_x) + row * p.width;
      float* grad_weight = sums.data() + row / kBlockRows * sums_of_row;
      const float inverse = p.inverse_rms[row], width = static_cast<float>(p.width);
      const float mean = p.centered ? mean_of(x, p.width) : 0.0f;
      const auto weighted = [&](Part part) {
        return part.load_from(grad) * (part.load_from(weight) + p.offset);
      };
      const float product = sum_row(
          p.width, [&](Part part) { return weighted(part) * (part.load_from(x, mean) - mean); });
      const float along_x = product * inverse * inverse / width;
      const float along_ones = p.centered ? sum_row(p.width, weighted) / width : 0.0f;
      for_parts(p.width, [&](Part part) {
        const VecF v = part.load_from(x) - mean, g = part.load_from(grad);
        part.store_to(grad_x, (weighted(part) - v * along_x - along_ones) * inverse);
        add_to(grad_weight, part, g * (v * inverse));
        if (p.centered) add_to(grad_weight + padded, part, g);
      });
    }
  });
  const auto join = [&](float* out, const float* first) {
    std::fill_n(out, p.width, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t i = 0; i < p.width; ++i) out[i] += first[block * sums_of_row + i];
    }
  };
  join(p.grad_weight, sums.data());
  if (p.centered) join(p.grad_bias, sums.data() + padded);
}

}  // namespace

void norm_cpu(const Norm& p) { (p.dtype == DType::f32 ? forward<float> : forward<bf16>)(p); }

void norm_backward_cpu(const NormBackward& p) {
  (p.dtype == DType::f32 ? backward<float> : backward<bf16>)(p);
}

}  // namespace hybridengine::HYBRIDENGINE_ISA
