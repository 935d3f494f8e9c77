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

void check_rows(const at::Tensor& tensor, const char* name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.dim() == 2 && tensor.sizes() == like.sizes() &&
                        (tensor.size(1) <= 1 || tensor.stride(1) == 1),
                    kOp, ": ", name, " has shape ", tensor.sizes(), " and strides ",
                    tensor.strides(), "; expected ", like.sizes(), " with inner stride 1");
}

void distillation(at::Tensor& student, at::Tensor& teacher, const Transform& student_transform,
                  const Transform& teacher_transform, double beta, at::Tensor& losses,
                  const std::optional<at::Tensor>& incoming,
                  const std::optional<at::Tensor>& grad) {
  check_same_device(kOp, {{"student", student},
                          {"teacher", teacher},
                          {"losses", losses},
                          {"incoming", incoming},
                          {"grad", grad}});
  if (!student.device().is_cpu()) no_kernel_for(student.device(), kOp);
  check_rows(student, "student", student);
  check_rows(teacher, "teacher", student);
  for (const at::Tensor* logits : {&student, &teacher}) {
    TORCH_CHECK_VALUE(logits->scalar_type() == at::kFloat, kOp, ": logits have dtype ",
                      logits->scalar_type(), "; expected float32");
  }
  check_vector(losses, "losses", at::kFloat, student.size(0));
  TORCH_CHECK_VALUE(incoming.has_value() == grad.has_value(), kOp,
                    ": give incoming and grad together");
  Distillation p{};
  p.student = student.mutable_data_ptr<float>();
  p.teacher = teacher.mutable_data_ptr<float>();
  p.student_stride = student.stride(0);
  p.teacher_stride = teacher.stride(0);
  p.student_transform = transform_of(student_transform);
  p.teacher_transform = transform_of(teacher_transform);
  p.rows = student.size(0);
  p.vocab = student.size(1);
  p.beta = static_cast<float>(beta);
  p.rest = static_cast<float>(1 - beta);
  p.losses = losses.mutable_data_ptr<float>();
  p.grad_dtype = DType::f32;
  if (grad) {
    check_vector(*incoming, "incoming", at::kFloat, p.rows);
    check_rows(*grad, "grad", student);
    p.incoming = incoming->const_data_ptr<float>();
    p.grad = grad->mutable_data_ptr();
    p.grad_stride = grad->stride(0);
    p.grad_dtype = float_dtype(*grad, "grad");
    TORCH_CHECK_VALUE(p.grad_dtype != DType::f64, kOp, ": grad has dtype float64");
  }
  p.num_threads = at::get_num_threads();
  py::gil_scoped_release no_gil;
  distillation_cpu(p);
}

}  // namespace

void register_distillation(py::module_& m) {
  m.def("distillation", &distillation, py::arg("student"), py::arg("teacher"),
        py::arg("student_transform"), py::arg("teacher_transform"), py::arg("beta"),
        py::arg("losses"), py::arg("incoming"), py::arg("grad"));
}

}  // namespace hybridengine
