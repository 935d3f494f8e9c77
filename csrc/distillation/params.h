// The generalised Jensen-Shannon divergence of rows of student and teacher logits, and its
// gradient.
//
// With p the teacher's and q the student's distribution and m = beta p + (1 - beta) q:
//
//   0 < beta < 1   beta KL(p || m) + (1 - beta) KL(q || m)
//   beta = 0       KL(p || q)
//   beta = 1       KL(q || p)
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace hybridengine {

// z = softcap tanh(scale x / softcap) / temperature; scale x / temperature if softcap is 0.
struct LogitTransform {
  float scale;
  float softcap;
  float temperature;
};

struct Distillation {
  float* student;  // [rows, vocab] logits x, inner stride 1; overwritten
  float* teacher;  // the same
  int64_t student_stride;
  int64_t teacher_stride;
  LogitTransform student_transform;
  LogitTransform teacher_transform;
  int64_t rows;
  int64_t vocab;
  float beta;
  float rest;             // 1 - beta, rounded once
  float* losses;          // [rows]
  const float* incoming;  // [rows], the gradients of the losses; null: no gradient
  void* grad;             // [rows, vocab], of the student's x; may be `student`
  int64_t grad_stride;
  DType grad_dtype;  // f32, bf16 or f16
  int num_threads;
};

HE_CPU_KERNEL(distillation_cpu, Distillation)

}  // namespace hybridengine
