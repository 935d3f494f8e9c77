#include <tuple>

#include "common/binding.h"
#include "distillation/params.h"

namespace hybridengine {

namespace {

// (scale, softcap or 0, temperature)
using Transform = std::tuple<double, double, double>;

LogitTransform transform_of(const Transform& given) {
  const auto [scale, softcap, temperature] = given;
  return {static_cast<float>(scale), static_cast<float>(softcap), static_cast<float>(temperature)};
}

void distillation(Tensor& student, Tensor& teacher, const Transform& student_transform,
                  const Transform& teacher_transform, double beta, Tensor& losses,
                  OptionalIn incoming, OptionalIn grad) {
  const Arguments given("linear_distillation_loss", "student", student);
  given.on_cpu();
  Distillation p{};
  p.student = given.data<float>("student", student, {&p.rows, &p.vocab}, &p.student_stride);
  p.teacher = given.data<float>("teacher", teacher, {p.rows, p.vocab}, &p.teacher_stride);
  p.student_transform = transform_of(student_transform);
  p.teacher_transform = transform_of(teacher_transform);
  p.beta = static_cast<float>(beta);
  p.rest = static_cast<float>(1 - beta);
  p.losses = given.data<float>("losses", losses, {p.rows});
  given.expect(incoming.has_value() == grad.has_value(), "give incoming and grad together");
  p.incoming = given.data<float>("incoming", incoming, {p.rows});
  p.grad = given.data("grad", grad, kFloats, {p.rows, p.vocab}, &p.grad_stride);
  p.grad_dtype = grad ? dtype_of(grad->scalar_type()) : DType::f32;
  given.run(p, distillation_cpu);
}

}  // namespace

void register_distillation(py::module_& m) {
  def(m, "distillation", &distillation,
      "student teacher student_transform teacher_transform beta losses incoming grad");
}

}  // namespace hybridengine
