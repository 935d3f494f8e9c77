#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

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

constexpr const char* kTable = "ChangeTable";
constexpr int64_t kMaxTensors = 1 << 20;
constexpr int64_t kTableColumns = 4 + 3 * kChangeDims;
constexpr int64_t kMaxElements = int64_t{1} << 60;  // no tensor has more

at::Tensor vector_of(int64_t size, at::ScalarType dtype) {
  return empty_from_pool({size}, at::TensorOptions().dtype(dtype));
}

// reach += (size - 1) * stride, for a row whose elements are those of a tensor.
void extend(int64_t& reach, int64_t size, int64_t stride, int64_t number) {
  int64_t step;
  TORCH_CHECK_INDEX(!__builtin_mul_overflow(size - 1, stride, &step) &&
                        !__builtin_add_overflow(reach, step, &reach) && reach < kMaxElements,
                    "ChangeTable: row ", number,
                    " reaches more than 2^60 elements; no tensor has as many");
}

ChangeRow row_of(const int64_t* entry, int64_t number) {
  for (int i = 0; i < 4; ++i)
    TORCH_CHECK_INDEX(entry[i] >= 0 && entry[i] < (i < 2 ? kMaxTensors : kMaxElements),
                      "ChangeTable: row ", number, " has ", entry[i], " in column ", i,
                      "; expected the number of a tensor or an offset in it");
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
    extend(reach, row.size[dim], row.src_stride[dim], number);
  }
  row.src_end = row.src_offset + reach + 1;
  return row;
}

template <typename T>
at::Tensor bytes_of(const std::vector<T>& entries, const at::Device& device) {
  return upload(entries.data(), static_cast<int64_t>(entries.size() * sizeof(T)), device);
}

template <typename T>
T* data_of(const at::Tensor& bytes) {
  return static_cast<T*>(bytes.mutable_data_ptr());
}

// Tables of strided slices that changes follow; see kernels/delta/table.py.
class ChangeTable {
 public:
  ChangeTable(const at::Tensor& table, const at::Device& device);
  std::tuple<at::Tensor, at::Tensor> map(const std::vector<at::Tensor>& indices,
                                         const std::vector<at::Tensor>& values);
  // Returns what was added to bit_checksum of each destination; on CUDA it is not computed.
  at::Tensor scatter(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& values,
                     const std::vector<at::Tensor>& destinations);

 private:
  // Of one call: other threads may use the table at the same time.
  struct Ranges {
    MapChangesParams params{};
    at::Tensor lists, first, work;
  };
  Ranges find_ranges(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& values);

  at::Device device_;
  int64_t num_rows_ = 0;
  at::Tensor rows_;                // ChangeRow
  std::vector<int64_t> dst_end_;   // by destination
  std::vector<int64_t> src_rows_;  // number of rows, by source
};

ChangeTable::ChangeTable(const at::Tensor& table, const at::Device& device) : device_(device) {
  TORCH_CHECK_VALUE(
      table.dim() == 2 && table.size(1) == kTableColumns && table.scalar_type() == at::kLong &&
          table.is_contiguous() && table.device().is_cpu(),
      "ChangeTable: table has shape ", table.sizes(), ", dtype ", table.scalar_type(), " on ",
      table.device(), "; expected a contiguous [P, 16] int64 tensor on the CPU");
  const int64_t* entry = table.const_data_ptr<int64_t>();
  std::vector<ChangeRow> rows;
  rows.reserve(table.size(0));
  for (int64_t i = 0; i < table.size(0); ++i, entry += kTableColumns) {
    const ChangeRow row = row_of(entry, i);
    int64_t dst_end = row.dst_offset + 1;
    for (int dim = 0; dim < kChangeDims; ++dim)
      extend(dst_end, row.size[dim], row.dst_stride[dim], i);
    if (row.src >= static_cast<int64_t>(src_rows_.size())) src_rows_.resize(row.src + 1);
    ++src_rows_[row.src];
    if (row.dst >= static_cast<int64_t>(dst_end_.size())) dst_end_.resize(row.dst + 1);
    dst_end_[row.dst] = std::max(dst_end_[row.dst], dst_end);
    rows.push_back(row);
  }
  num_rows_ = table.size(0);
  rows_ = bytes_of(rows, device);
  device_ = rows_.device();  // with its index
}

ChangeTable::Ranges ChangeTable::find_ranges(const std::vector<at::Tensor>& indices,
                                             const std::vector<at::Tensor>& values) {
  const auto num_sources = static_cast<int64_t>(src_rows_.size());
  TORCH_CHECK_VALUE(
      indices.size() == values.size() && static_cast<int64_t>(indices.size()) >= num_sources,
      "ChangeTable: got ", indices.size(), " indices and ", values.size(), " values; expected ",
      num_sources, " of each");
  std::vector<ChangeList> lists;
  for (size_t i = 0; i < indices.size(); ++i) {
    const at::ScalarType type = indices[i].scalar_type();
    TORCH_CHECK_VALUE(indices[i].is_contiguous() && values[i].is_contiguous() &&
                          (type == at::kInt || type == at::kLong) &&
                          values[i].element_size() == sizeof(uint16_t) &&
                          indices[i].numel() == values[i].numel() &&
                          indices[i].device() == device_ && values[i].device() == device_,
                      "ChangeTable: source ", i, " has indices ", indices[i].sizes(), " of ", type,
                      " and values ", values[i].sizes(), " of ", values[i].scalar_type(),
                      "; expected int32 or int64 and a 16-bit dtype, contiguous, of one size, on ",
                      device_);
    lists.push_back({indices[i].const_data_ptr(),
                     static_cast<const uint16_t*>(values[i].const_data_ptr()), indices[i].numel(),
                     type == at::kLong});
  }
  const auto options = at::TensorOptions(at::kLong).device(device_);
  Ranges ranges;
  ranges.lists = bytes_of(lists, device_);
  ranges.first = at::empty({num_rows_}, options);
  ranges.work = at::empty({num_rows_ + 1}, options);
  MapChangesParams& params = ranges.params;
  params.rows = data_of<ChangeRow>(rows_);
  params.num_rows = num_rows_;
  params.sources = data_of<ChangeList>(ranges.lists);
  params.first = data_of<int64_t>(ranges.first);
  params.work = data_of<int64_t>(ranges.work);
  params.num_threads = at::get_num_threads();
  if (device_.is_cpu()) find_change_ranges_cpu(params);
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) {
    check_cuda(find_change_ranges_cuda(params, current_stream(device_)), kTable);
    ranges.work.cumsum_(0);
  }
#endif
  return ranges;
}

#ifdef HYBRIDENGINE_WITH_CUDA
// The host waits for the number of pairs, of changes in the destination, and for their order.
std::tuple<at::Tensor, at::Tensor> map_on_cuda(MapChangesParams params, const at::Tensor& work,
                                               at::ScalarType dtype) {
  const at::Device device = work.device();
  const int64_t total = work[params.num_rows].item<int64_t>();
  const auto options = at::TensorOptions().device(device);
  at::Tensor positions = at::empty({total}, options.dtype(at::kLong));
  at::Tensor mapped = at::empty({total}, options.dtype(dtype));
  params.positions = positions.mutable_data_ptr<int64_t>();
  params.values = static_cast<uint16_t*>(mapped.mutable_data_ptr());
  check_cuda(map_changes_cuda(params, total, current_stream(device)), kTable);
  at::Tensor order = positions.ge(0).nonzero().view(-1);
  positions = positions.index_select(0, order);
  const int64_t found = positions.numel();
  if (found > 1 && positions.slice(0, 1).lt(positions.slice(0, 0, found - 1)).any().item<bool>()) {
    auto [sorted, by_position] = positions.sort();  // a transposed slice
    positions = sorted;
    order = order.index_select(0, by_position);
  }
  return {positions, mapped.index_select(0, order)};
}
#endif

std::tuple<at::Tensor, at::Tensor> map_on_cpu(MapChangesParams params, at::ScalarType dtype) {
  const int64_t total = params.work[params.num_rows], parts = params.num_threads;
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

std::tuple<at::Tensor, at::Tensor> ChangeTable::map(const std::vector<at::Tensor>& indices,
                                                    const std::vector<at::Tensor>& values) {
  const c10::DeviceGuard guard(device_);
  const Ranges ranges = find_ranges(indices, values);
  const at::ScalarType dtype = values.empty() ? at::kBFloat16 : values[0].scalar_type();
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) return map_on_cuda(ranges.params, ranges.work, dtype);
#endif
  if (!device_.is_cpu()) no_kernel_for(device_, kTable);
  return map_on_cpu(ranges.params, dtype);
}

at::Tensor ChangeTable::scatter(const std::vector<at::Tensor>& indices,
                                const std::vector<at::Tensor>& values,
                                const std::vector<at::Tensor>& destinations) {
  at::Tensor checksums = at::zeros({static_cast<int64_t>(destinations.size())}, at::kLong);
  if (!num_rows_) return checksums;
  const c10::DeviceGuard guard(device_);
  std::vector<uint16_t*> addresses;
  for (size_t i = 0; i < destinations.size(); ++i) {
    const at::Tensor& tensor = destinations[i];
    TORCH_CHECK_VALUE(tensor.element_size() == sizeof(uint16_t) && tensor.device() == device_,
                      "ChangeTable: destination ", i, " is ", tensor.scalar_type(), " on ",
                      tensor.device(), "; expected a 16-bit dtype on ", device_);
    const int64_t available =
        tensor.numel() ? static_cast<int64_t>(tensor.storage().nbytes() / sizeof(uint16_t)) -
                             tensor.storage_offset()
                       : 0;  // an empty tensor has no address
    TORCH_CHECK_INDEX(i >= dst_end_.size() || dst_end_[i] <= available,
                      "ChangeTable: a row ends at element ", dst_end_[i], " of destination ", i,
                      ", which has ", available);
    addresses.push_back(static_cast<uint16_t*>(tensor.mutable_data_ptr()));
  }
  TORCH_CHECK_INDEX(destinations.size() >= dst_end_.size(), "ChangeTable: got ",
                    destinations.size(), " destinations; expected ", dst_end_.size());
  Ranges ranges = find_ranges(indices, values);
  MapChangesParams& params = ranges.params;
  const at::Tensor on_device = bytes_of(addresses, device_);
  params.destinations = data_of<uint16_t*>(on_device);
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) {
    int64_t max_pairs = 0;
    for (size_t i = 0; i < src_rows_.size(); ++i) max_pairs += src_rows_[i] * indices[i].numel();
    check_cuda(scatter_changes_cuda(params, max_pairs, current_stream(device_)), kTable);
    return checksums;
  }
#endif
  if (!device_.is_cpu()) no_kernel_for(device_, kTable);
  params.checksums = reinterpret_cast<uint64_t*>(checksums.mutable_data_ptr<int64_t>());
  py::gil_scoped_release no_gil;
  scatter_changes_cpu(params);
  return checksums;
}

#ifdef HYBRIDENGINE_WITH_CUDA
// The sums of every chunk become those of all chunks up to it; returns the last ones.
std::vector<int64_t> add_up(at::Tensor& sums) {
  sums.cumsum_(0);
  const at::Tensor last = sums[sums.size(0) - 1].cpu();
  const int64_t* first = last.const_data_ptr<int64_t>();
  return {first, first + last.numel()};
}

at::Tensor sums_of_chunks(int64_t size, int64_t columns, const at::Device& device) {
  return at::empty({(size + kGapChunk - 1) / kGapChunk, columns},
                   at::TensorOptions(at::kLong).device(device));
}

// The host waits for the number of bytes.
std::tuple<at::Tensor, int64_t> encode_gaps_on_cuda(const at::Tensor& positions, int64_t start) {
  const at::Device device = positions.device();
  const c10::DeviceGuard guard(device);
  const auto options = at::TensorOptions(at::kByte).device(device);
  EncodeGapsParams params{};
  params.positions = positions.const_data_ptr<int64_t>();
  params.count = positions.numel();
  params.start = start;
  if (!params.count) return {at::empty({0}, options), 1};
  at::Tensor sums = sums_of_chunks(params.count, kMaxGapWidth, device);
  params.sums = sums.mutable_data_ptr<int64_t>();
  check_cuda(count_escapes_cuda(params, current_stream(device)), "encode_gaps");
  std::vector<int64_t> bytes = add_up(sums);
  for (int width = 1; width <= kMaxGapWidth; ++width)
    bytes[width - 1] = width * (params.count + bytes[width - 1]);
  const int64_t smallest = std::min_element(bytes.begin(), bytes.end()) - bytes.begin();
  at::Tensor out = at::full({bytes[smallest]}, 0xFF, options);
  params.bytes = out.mutable_data_ptr<uint8_t>();
  const int width = static_cast<int>(smallest) + 1;
  check_cuda(write_gaps_cuda(params, width, current_stream(device)), "encode_gaps");
  return {out, width};
}

// The host waits for what is checked. Returns the number of positions, -1 if one is not below
// `end`.
int64_t decode_gaps_on_cuda(const at::Tensor& gaps, int width, int64_t start, int64_t end,
                            at::Tensor& positions) {
  const at::Device device = gaps.device();
  const c10::DeviceGuard guard(device);
  DecodeGapsParams params{};
  params.bytes = gaps.const_data_ptr<uint8_t>();
  params.num_fields = gaps.numel() / width;
  params.start = start;
  params.count = positions.numel();
  params.positions = positions.mutable_data_ptr<int64_t>();
  if (!params.num_fields) return 0;
  at::Tensor sums = sums_of_chunks(params.num_fields, 2, device);
  params.sums = sums.mutable_data_ptr<int64_t>();
  check_cuda(count_fields_cuda(params, width, current_stream(device)), "decode_gaps");
  const int64_t found = add_up(sums)[1];
  if (found != params.count) return found;
  check_cuda(read_gaps_cuda(params, width, current_stream(device)), "decode_gaps");
  if (found && positions[found - 1].item<int64_t>() >= end) return -1;
  return found;
}
#endif

std::tuple<at::Tensor, int64_t> encode_gaps(const at::Tensor& positions, int64_t start) {
  check_vector(positions, "encode_gaps: positions", at::kLong, positions.numel());
  TORCH_CHECK_VALUE(start >= 0 && start <= kMaxPosition, "encode_gaps: start is ", start,
                    "; expected 0 to 2^48");
#ifdef HYBRIDENGINE_WITH_CUDA
  if (positions.is_cuda()) return encode_gaps_on_cuda(positions, start);
#endif
  if (!positions.is_cpu()) no_kernel_for(positions.device(), "encode_gaps");
  const int64_t* first = positions.const_data_ptr<int64_t>();
  int64_t bytes[kMaxGapWidth];
  const int64_t bad = gap_sizes(first, positions.numel(), start, bytes);
  TORCH_CHECK_VALUE(bad < 0, "encode_gaps: positions[", bad, "] is ", bad < 0 ? 0 : first[bad],
                    "; expected ascending positions from ", start, " on, at most 2^48");
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
  TORCH_CHECK_VALUE(start >= 0 && start <= kMaxPosition, "decode_gaps: start is ", start,
                    "; expected 0 to 2^48");
  at::Tensor positions;
  int64_t found = -1;
  if (gaps.is_cpu()) {
    positions = vector_of(count, at::kLong);
    constexpr decltype(&read_gaps<1>) readers[] = {read_gaps<1>, read_gaps<2>, read_gaps<3>};
    found = readers[width - 1](gaps.const_data_ptr<uint8_t>(), gaps.numel(), start, end, count,
                               positions.mutable_data_ptr<int64_t>());
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (gaps.is_cuda()) {
    positions = at::empty({count}, at::TensorOptions(at::kLong).device(gaps.device()));
    found = decode_gaps_on_cuda(gaps, static_cast<int>(width), start, end, positions);
#endif
  } else {
    no_kernel_for(gaps.device(), "decode_gaps");
  }
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
      .def(py::init<const at::Tensor&, const at::Device&>(), py::arg("table"), py::arg("device"))
      .def("map", &ChangeTable::map, py::arg("indices"), py::arg("values"))
      .def("scatter", &ChangeTable::scatter, py::arg("indices"), py::arg("values"),
           py::arg("destinations"));
}

}  // namespace hybridengine
