#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/binding.h"
#include "common/memory_pool.h"
#include "delta/gaps.h"
#include "delta/params.h"

namespace hybridengine {

namespace {

constexpr int64_t kTableColumns = 4 + 3 * kChangeDims;

at::Tensor vector_of(int64_t size, at::ScalarType dtype) {
  return empty_from_pool({size}, at::TensorOptions().dtype(dtype));
}

ChangeRow row_of(const int64_t* entry, int64_t number) {
  ChangeRow row{};
  row.src = static_cast<int32_t>(entry[0]);
  row.dst = static_cast<int32_t>(entry[1]);
  row.src_offset = entry[2];
  row.dst_offset = entry[3];
  int64_t reach = 0;  // of the dimensions that follow
  for (int dim = kChangeDims - 1; dim >= 0; --dim) {
    row.size[dim] = entry[4 + dim];
    row.src_stride[dim] = entry[4 + kChangeDims + dim];
    row.dst_stride[dim] = entry[4 + 2 * kChangeDims + dim];
    TORCH_CHECK_VALUE(row.size[dim] == 1 || (row.size[dim] > 0 && row.src_stride[dim] > reach &&
                                             row.dst_stride[dim] >= 0),
                      "ChangeTable: dimension ", dim, " of row ", number, " has size ",
                      row.size[dim], " and source stride ", row.src_stride[dim],
                      "; expected a positive size and nested strides");
    reach += (row.size[dim] - 1) * row.src_stride[dim];
  }
  row.src_end = row.src_offset + reach + 1;
  return row;
}

// Tables of strided slices that changes follow; see kernels/delta/table.py.
class ChangeTable {
 public:
  explicit ChangeTable(const at::Tensor& table);
  std::tuple<at::Tensor, at::Tensor> map(const std::vector<at::Tensor>& indices,
                                         const std::vector<at::Tensor>& values);
  void scatter(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& values,
               const std::vector<at::Tensor>& destinations);

 private:
  MapChangesParams find_ranges(const std::vector<at::Tensor>& indices,
                               const std::vector<at::Tensor>& values);

  std::vector<ChangeRow> rows_;
  std::vector<int64_t> first_, work_, dst_end_;  // dst_end_: by destination
  int64_t num_sources_ = 0;
  std::vector<ChangeList> lists_;
};

ChangeTable::ChangeTable(const at::Tensor& table) {
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.size(1) == kTableColumns && table.scalar_type() == at::kLong &&
          table.is_contiguous() && table.device().is_cpu(),
      "ChangeTable: table has shape ", table.sizes(), ", dtype ", table.scalar_type(), " on ",
      table.device(), "; expected a contiguous [P, 16] int64 tensor on the CPU");
  const int64_t* entry = table.const_data_ptr<int64_t>();
  rows_.reserve(table.size(0));
  for (int64_t i = 0; i < table.size(0); ++i, entry += kTableColumns) {
    TORCH_CHECK_INDEX(entry[0] >= 0 && entry[1] >= 0 && entry[2] >= 0 && entry[3] >= 0,
                      "ChangeTable: row ", i, " has a negative index or offset");
    const ChangeRow row = row_of(entry, i);
    int64_t dst_end = row.dst_offset + 1;
    for (int dim = 0; dim < kChangeDims; ++dim)
      dst_end += (row.size[dim] - 1) * row.dst_stride[dim];
    num_sources_ = std::max<int64_t>(num_sources_, row.src + 1);
    if (row.dst >= static_cast<int64_t>(dst_end_.size())) dst_end_.resize(row.dst + 1);
    dst_end_[row.dst] = std::max(dst_end_[row.dst], dst_end);
    rows_.push_back(row);
  }
  first_.resize(rows_.size());
  work_.resize(rows_.size() + 1);
}

MapChangesParams ChangeTable::find_ranges(const std::vector<at::Tensor>& indices,
                                          const std::vector<at::Tensor>& values) {
  TORCH_CHECK_VALUE(
      indices.size() == values.size() && static_cast<int64_t>(indices.size()) >= num_sources_,
      "ChangeTable: got ", indices.size(), " indices and ", values.size(), " values; expected ",
      num_sources_, " of each");
  lists_.clear();
  for (size_t i = 0; i < indices.size(); ++i) {
    const at::ScalarType type = indices[i].scalar_type();
    TORCH_CHECK_VALUE(indices[i].is_contiguous() && values[i].is_contiguous() &&
                          (type == at::kInt || type == at::kLong) &&
                          values[i].element_size() == sizeof(uint16_t) &&
                          indices[i].numel() == values[i].numel() && indices[i].device().is_cpu() &&
                          values[i].device().is_cpu(),
                      "ChangeTable: source ", i, " has indices ", indices[i].sizes(), " of ", type,
                      " and values ", values[i].sizes(), " of ", values[i].scalar_type(),
                      "; expected int32 or int64 and a 16-bit dtype, contiguous, of one size, on "
                      "the CPU");
    lists_.push_back({indices[i].const_data_ptr(),
                      static_cast<const uint16_t*>(values[i].const_data_ptr()), indices[i].numel(),
                      type == at::kLong});
  }
  MapChangesParams params{};
  params.rows = rows_.data();
  params.num_rows = static_cast<int64_t>(rows_.size());
  params.sources = lists_.data();
  params.first = first_.data();
  params.work = work_.data();
  params.num_threads = at::get_num_threads();
  find_change_ranges_cpu(params);
  return params;
}

std::tuple<at::Tensor, at::Tensor> ChangeTable::map(const std::vector<at::Tensor>& indices,
                                                    const std::vector<at::Tensor>& values) {
  MapChangesParams params = find_ranges(indices, values);
  const at::ScalarType dtype = values.empty() ? at::kBFloat16 : values[0].scalar_type();
  const int64_t total = work_.back(), parts = params.num_threads;
  at::Tensor positions = vector_of(total, at::kLong);
  at::Tensor mapped = vector_of(total, dtype);
  std::vector<int64_t> counts(parts);
  params.positions = positions.mutable_data_ptr<int64_t>();
  params.values = static_cast<uint16_t*>(mapped.mutable_data_ptr());
  params.part_counts = counts.data();
  py::gil_scoped_release no_gil;
  map_changes_cpu(params);
  int64_t found = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = total * part / parts;
    if (begin != found) {
      std::memmove(params.positions + found, params.positions + begin, counts[part] * 8);
      std::memmove(params.values + found, params.values + begin, counts[part] * 2);
    }
    found += counts[part];
  }
  positions = positions.narrow(0, 0, found);
  mapped = mapped.narrow(0, 0, found);
  if (!std::is_sorted(params.positions, params.positions + found)) {  // a transposed slice
    std::vector<int64_t> order(found), old(params.positions, params.positions + found);
    std::vector<uint16_t> old_values(params.values, params.values + found);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return old[a] < old[b]; });
    for (int64_t i = 0; i < found; ++i) {
      params.positions[i] = old[order[i]];
      params.values[i] = old_values[order[i]];
    }
  }
  return {positions, mapped};
}

void ChangeTable::scatter(const std::vector<at::Tensor>& indices,
                          const std::vector<at::Tensor>& values,
                          const std::vector<at::Tensor>& destinations) {
  if (rows_.empty()) return;
  std::vector<uint16_t*> addresses;
  for (size_t i = 0; i < destinations.size(); ++i) {
    const at::Tensor& tensor = destinations[i];
    TORCH_CHECK_VALUE(tensor.element_size() == sizeof(uint16_t) && tensor.device().is_cpu(),
                      "ChangeTable: destination ", i, " is ", tensor.scalar_type(), " on ",
                      tensor.device(), "; expected a 16-bit dtype on the CPU");
    const int64_t available = static_cast<int64_t>(tensor.storage().nbytes() / sizeof(uint16_t)) -
                              tensor.storage_offset();
    TORCH_CHECK_INDEX(i >= dst_end_.size() || dst_end_[i] <= available,
                      "ChangeTable: a row ends at element ", dst_end_[i], " of destination ", i,
                      ", which has ", available);
    addresses.push_back(static_cast<uint16_t*>(tensor.mutable_data_ptr()));
  }
  TORCH_CHECK_INDEX(destinations.size() >= dst_end_.size(), "ChangeTable: got ",
                    destinations.size(), " destinations; expected ", dst_end_.size());
  MapChangesParams params = find_ranges(indices, values);
  params.destinations = addresses.data();
  py::gil_scoped_release no_gil;
  scatter_changes_cpu(params);
}

std::tuple<at::Tensor, int64_t> encode_gaps(const at::Tensor& positions, int64_t start) {
  check_vector(positions, "encode_gaps: positions", at::kLong, positions.numel());
  const int64_t* first = positions.const_data_ptr<int64_t>();
  int64_t bytes[kMaxGapWidth];
  gap_sizes(first, positions.numel(), start, bytes);
  const int64_t smallest = std::min_element(bytes, bytes + kMaxGapWidth) - bytes;
  const int64_t width = smallest + 1;
  at::Tensor out = vector_of(bytes[smallest], at::kByte);
  constexpr decltype(&write_gaps<1>) writers[] = {write_gaps<1>, write_gaps<2>, write_gaps<3>};
  writers[smallest](first, positions.numel(), start, out.mutable_data_ptr<uint8_t>());
  return {out, width};
}

at::Tensor decode_gaps(const at::Tensor& gaps, int64_t width, int64_t start, int64_t end,
                       int64_t count) {
  check_vector(gaps, "decode_gaps: gaps", at::kByte, gaps.numel());
  TORCH_CHECK_VALUE(1 <= width && width <= kMaxGapWidth && count >= 0 &&
                        count <= gaps.numel() / width && gaps.numel() % width == 0,
                    "decode_gaps: got ", gaps.numel(), " bytes of width ", width, " for ", count,
                    " positions");
  at::Tensor positions = vector_of(count, at::kLong);
  constexpr decltype(&read_gaps<1>) readers[] = {read_gaps<1>, read_gaps<2>, read_gaps<3>};
  const int64_t found = readers[width - 1](gaps.const_data_ptr<uint8_t>(), gaps.numel(), start, end,
                                           count, positions.mutable_data_ptr<int64_t>());
  TORCH_CHECK_VALUE(found == count, "decode_gaps: the bytes do not give ", count, " positions in [",
                    start, ", ", end, ")");
  return positions;
}

}  // namespace

void register_delta(py::module_& m) {
  m.def("encode_gaps", &encode_gaps, py::arg("positions"), py::arg("start"));
  m.def("decode_gaps", &decode_gaps, py::arg("gaps"), py::arg("width"), py::arg("start"),
        py::arg("end"), py::arg("count"));
  py::class_<ChangeTable>(m, "ChangeTable")
      .def(py::init<const at::Tensor&>(), py::arg("table"))
      .def("map", &ChangeTable::map, py::arg("indices"), py::arg("values"))
      .def("scatter", &ChangeTable::scatter, py::arg("indices"), py::arg("values"),
           py::arg("destinations"));
}

}  // namespace hybridengine
