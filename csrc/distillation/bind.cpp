#include <optional>
#include <tuple>

#include "common/binding.h"
#include "distillation/params.h"

namespace hybridengine {

namespace {

constexpr const char* kOp = "linear_distillation_loss";

// (scale, softcap or 0, temperature)
using Transform = std::tuple<double, double, double>;

LogitTransform transform_of(const Transform& given) {
  const auto [scale, softcap, temperature] = given;
  return {static_cast<float>(scale), static_cast<float>(softcap), static_cast<float>(temperature)};
}

void check_rows(const Tensor& tensor, const char* name, const Tensor& like) {
  HE_CHECK_VALUE(
      tensor.dim() == 2 && tensor.sizes() == like.sizes() && tensor.has_unit_inner_stride(), kOp,
      ": ", name, " has shape ", tensor.sizes(), " and strides ", tensor.strides(), "; expected ",
      like.sizes(), " with inner stride 1");
}

void distillation(Tensor& student, Tensor& teacher, const Transform& student_transform,
                  const Transform& teacher_transform, double beta, Tensor& losses,
                  const std::optional<Tensor>& incoming, const std::optional<Tensor>& grad) {
  check_same_device(kOp, {{"student", student},
                          {"teacher", teacher},
                          {"losses", losses},
                          {"incoming", incoming},
                          {"grad", grad}});
  if (!student.device().is_cpu()) no_kernel_for(student.device(), kOp);
  check_rows(student, "student", student);
  check_rows(teacher, "teacher", student);
  for (const Tensor* logits : {&student, &teacher}) {
    HE_CHECK_VALUE(logits->scalar_type() == kFloat, kOp, ": logits have dtype ",
                   logits->scalar_type(), "; expected float32");
  }
  check_vector(losses, "losses", kFloat, student.size(0));
  HE_CHECK_VALUE(incoming.has_value() == grad.has_value(), kOp,
                 ": give incoming and grad together");
  Distillation p{};
  p.student = student.data<float>();
  p.teacher = teacher.data<float>();
  p.student_stride = student.stride(0);
  p.teacher_stride = teacher.stride(0);
  p.student_transform = transform_of(student_transform);
  p.teacher_transform = transform_of(teacher_transform);
  p.rows = student.size(0);
  p.vocab = student.size(1);
  p.beta = static_cast<float>(beta);
  p.rest = static_cast<float>(1 - beta);
  p.losses = losses.data<float>();
  p.grad_dtype = DType::f32;
  if (grad) {
    check_vector(*incoming, "incoming", kFloat, p.rows);
    check_rows(*grad, "grad", student);
    p.incoming = incoming->data<float>();
    p.grad = grad->data();
    p.grad_stride = grad->stride(0);
    p.grad_dtype = float_dtype(*grad, "grad");
    HE_CHECK_VALUE(p.grad_dtype != DType::f64, kOp, ": grad has dtype float64");
  }
  p.num_threads = get_num_threads();
  without_gil([&] { distillation_cpu(p); });
}

}  // namespace

void register_distillation(py::module_& m) {
  m.def("distillation", &distillation, py::arg("student"), py::arg("teacher"),
        py::arg("student_transform"), py::arg("teacher_transform"), py::arg("beta"),
        py::arg("losses"), py::arg("incoming"), py::arg("grad"));
}

}  // namespace hybridengine
