#include <ATen/ops/empty.h>

#include <vector>

#include "common/binding.h"
#include "reshard/params.h"

namespace hybridengine {

namespace {

constexpr int64_t kTableColumns = 4 + 3 * kCopyDims;

bool is_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble;
}

void check_side(at::TensorList tensors, const char* name, const at::Device& device) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].scalar_type() == tensors[0].scalar_type(), "strided_copy: ", name,
                      "[", i, "] has dtype ", tensors[i].scalar_type(), " but ", name, "[0] has ",
                      tensors[0].scalar_type(), "; all of them must share one dtype");
    TORCH_CHECK_VALUE(tensors[i].device() == device, "strided_copy: ", name, "[", i, "] is on ",
                      tensors[i].device(), "; expected ", device, " like sources[0]");
  }
}

// Fills one side of `row` from its table columns; the slice must lie inside the tensor's storage.
void resolve(at::TensorList tensors, const char* name, int64_t row_number, int64_t index,
             int64_t offset, const int64_t* size, const int64_t* stride, const char** base) {
  TORCH_CHECK_INDEX(index >= 0 && index < static_cast<int64_t>(tensors.size()),
                    "strided_copy: row ", row_number, " names ", name, "[", index,
                    "], but there are ", tensors.size());
  const at::Tensor& tensor = tensors[index];
  const int64_t bytes = tensor.element_size();
  const int64_t available =
      static_cast<int64_t>(tensor.storage().nbytes()) / bytes - tensor.storage_offset();
  int64_t last = offset;
  bool negative = offset < 0;
  for (int dim = 0; dim < kCopyDims; ++dim) {
    last += (size[dim] - 1) * stride[dim];
    negative |= stride[dim] < 0;
  }
  TORCH_CHECK_INDEX(!negative && last < available, "strided_copy: row ", row_number,
                    " reaches element ", negative ? offset : last, " of ", name, "[", index,
                    "], which has ", available,
                    " elements from its start (offsets and strides must not be negative)");
  *base = static_cast<const char*>(tensor.data_ptr()) + offset * bytes;
}

std::vector<CopyRow> plan_rows(at::TensorList sources, at::TensorList destinations,
                               const at::Tensor& table, int64_t* num_chunks) {
  const int64_t src_bytes = sources[0].element_size();
  const int64_t dst_bytes = destinations[0].element_size();
  const int64_t width = 16 / std::min(src_bytes, dst_bytes);
  const int64_t* entry = table.const_data_ptr<int64_t>();
  std::vector<CopyRow> rows;
  rows.reserve(table.size(0));
  *num_chunks = 0;
  for (int64_t i = 0; i < table.size(0); ++i, entry += kTableColumns) {
    const int64_t* size = entry + 4;
    const int64_t* src_stride = size + kCopyDims;
    const int64_t* dst_stride = src_stride + kCopyDims;
    bool empty = false;
    for (int dim = 0; dim < kCopyDims; ++dim) {
      TORCH_CHECK_VALUE(size[dim] >= 0, "strided_copy: row ", i, " has size ", size[dim],
                        " in dimension ", dim, "; sizes must not be negative");
      empty |= size[dim] == 0;
    }
    if (empty) continue;
    CopyRow row{};
    const char* dst = nullptr;
    resolve(sources, "sources", i, entry[0], entry[2], size, src_stride, &row.src);
    resolve(destinations, "destinations", i, entry[1], entry[3], size, dst_stride, &dst);
    row.dst = const_cast<char*>(dst);
    for (int dim = 0; dim < kCopyDims; ++dim) {
      row.size[dim] = size[dim];
      row.src_stride[dim] = src_stride[dim];
      row.dst_stride[dim] = dst_stride[dim];
    }
    coalesce(row);
    row.vectors = vectors_fit(row, width, src_bytes, dst_bytes);
    row.first_chunk = *num_chunks;
    *num_chunks += (num_elements(row) + kChunkElements - 1) / kChunkElements;
    rows.push_back(row);
  }
  return rows;
}

void strided_copy(const std::vector<at::Tensor>& sources,
                  const std::vector<at::Tensor>& destinations, const at::Tensor& table) {
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.size(1) == kTableColumns && table.scalar_type() == at::kLong &&
          table.is_contiguous() && table.device().is_cpu(),
      "strided_copy: table has shape ", table.sizes(), ", dtype ", table.scalar_type(), " on ",
      table.device(), "; expected a contiguous [P, 16] int64 tensor on the CPU");
  if (table.size(0) == 0) return;
  TORCH_CHECK_VALUE(!sources.empty() && !destinations.empty(),
                    "strided_copy: a table with rows needs sources and destinations, got ",
                    sources.size(), " and ", destinations.size());
  const at::Device device = sources[0].device();
  check_side(sources, "sources", device);
  check_side(destinations, "destinations", device);

  StridedCopyParams params{};
  const at::ScalarType src = sources[0].scalar_type();
  const at::ScalarType dst = destinations[0].scalar_type();
  if (src == dst) {
    const int64_t bytes = sources[0].element_size();
    TORCH_CHECK_VALUE(bytes <= 8, "strided_copy: dtype ", src, " is not supported");
    params.src_dtype = bytes == 1   ? DType::raw1
                       : bytes == 2 ? DType::raw2
                       : bytes == 4 ? DType::raw4
                                    : DType::raw8;
    params.dst_dtype = params.src_dtype;
  } else {
    TORCH_CHECK_VALUE(is_float(src) && is_float(dst), "strided_copy: no cast from ", src, " to ",
                      dst,
                      "; float32, float16, bfloat16 and float64 cast to each other, every "
                      "other dtype only copies to itself");
    params.src_dtype = float_dtype(sources[0], "sources[0]");
    params.dst_dtype = float_dtype(destinations[0], "destinations[0]");
  }
  const std::vector<CopyRow> rows = plan_rows(sources, destinations, table, &params.num_chunks);
  if (rows.empty()) return;
  params.rows = rows.data();
  params.num_rows = static_cast<int64_t>(rows.size());
  params.num_threads = at::get_num_threads();

  if (device.is_cpu()) {
    py::gil_scoped_release no_gil;
    strided_copy_cpu(params);
    return;
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    TORCH_CHECK_VALUE(params.num_chunks < (int64_t{1} << 31),
                      "strided_copy: the table moves more "
                      "than 2^45 elements; split it");
    const c10::DeviceGuard guard(device);
    void* stream = current_stream(device);
    const auto bytes = static_cast<int64_t>(rows.size() * sizeof(CopyRow));
    const at::Tensor buffer = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
    auto* device_rows = static_cast<CopyRow*>(buffer.mutable_data_ptr());
    check_cuda(upload_rows_cuda(params, device_rows, stream), "strided_copy");
    check_cuda(strided_copy_cuda(params, device_rows, stream), "strided_copy");
    return;
  }
#endif
  no_kernel_for(device, "strided_copy");
}

}  // namespace

void register_reshard(py::module_& m) {
  m.def("strided_copy", &strided_copy, py::arg("sources"), py::arg("destinations"),
        py::arg("table"));
}

}  // namespace hybridengine
