#include "common/binding.h"

namespace hybridengine {

namespace {

// "[T, 3]" or "float32, bfloat16 or float16".
std::string listed(const auto& items, const char* last_comma) {
  std::ostringstream text;
  for (auto item = items.begin(); item != items.end(); ++item) {
    if (item != items.begin()) text << (item + 1 == items.end() ? last_comma : ", ");
    text << *item;
  }
  return text.str();
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  return out << "[" << (shape.first_ ? listed(shape, ", ") : "...") << "]";
}

DType dtype_of(const ScalarType& type) {
  return type == kFloat   ? DType::f32
         : type == kHalf  ? DType::f16
         : type.bits > 16 ? DType::f64
                          : DType::bf16;
}

DType Arguments::dtype(const Name& name, const ScalarType& given, Types types) const {
  if (!types.have(given))
    expect(false, name, " has dtype ", given, "; expected ", listed(types, " or "));
  return dtype_of(given);
}

void Arguments::same_device(const Name& name, const MaybeTensor& given) const {
  if (given.tensor && given.tensor->device() != device_)
    expect(false, name, " is on ", given.tensor->device(), ", ", name_, " on ", device_,
           "; move them to one device");
}

void Arguments::check(const Name& name, const Tensor& given, Types types, Shape shape,
                      Layout layout) const {
  same_device(name, given);
  const bool in_rows = layout == Layout::rows;
  const bool laid_out = in_rows ? given.has_unit_inner_stride() : given.is_contiguous();
  if (laid_out && types.have(given.scalar_type()) && shape.takes(given.sizes())) return;
  expect(false, name, " has shape ", given.sizes(),
         laid_out ? "" : joined(", strides ", given.strides()), " and dtype ", given.scalar_type(),
         "; expected a ", in_rows ? "" : "contiguous ", shape, " tensor of ", listed(types, " or "),
         in_rows ? " with inner stride 1" : "");
}

void* Arguments::data(const Name& name, const MaybeTensor& given, Types types, Shape shape,
                      int64_t* row_stride) const {
  if (!given.tensor) return nullptr;
  check(name, *given.tensor, types, shape, row_stride ? Layout::rows : Layout::contiguous);
  if (row_stride) *row_stride = given.tensor->stride(0);
  return given.tensor->data();
}

const int32_t* Arguments::ends(const Name& name, const MaybeTensor& given, int64_t* count,
                               int64_t total, const char* unit, bool cover) const {
  if (!given.tensor) return nullptr;
  int64_t size;
  const auto* ends = data<int32_t>(name, given, {&size});  // may be null if it is empty
  expect(size > 0, name, " is empty; expected [N + 1] values");
  *count = size - 1;
  if (!device_.is_cpu()) return ends;
  expect(ends[0] == 0, name, "[0] is ", ends[0], "; expected 0");
  for (int64_t i = 1; i < size; ++i)
    expect(ends[i] >= ends[i - 1], name, "[", i, "] is ", ends[i],
           ", less than the one before it; expected ends in ascending order");
  const int64_t last = ends[size - 1];
  expect(last == total || (last < total && !cover), name, " ends at ", last, ", but there are ",
         total, " ", unit);
  return ends;
}

void Arguments::no_kernel() const {
  throw std::runtime_error(joined(op_, ": this build of hybridengine._C has no kernel for ",
                                  device_,
                                  "; build with HYBRIDENGINE_CUDA=ON or use backend='reference'"));
}

}  // namespace hybridengine
