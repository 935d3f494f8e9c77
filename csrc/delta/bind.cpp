
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/binding.h"
#include "delta/gaps.h"
#include "delta/params.h"

namespace hybridengine {

namespace {

constexpr const char* kTable = "ChangeTable";
constexpr int64_t kMaxTensors = 1 << 20;
constexpr int64_t kTableColumns = 4 + 3 * kChangeDims;
constexpr int64_t kMaxElements = int64_t{1} << 60;  // no tensor has more

Tensor vector_of(int64_t size, ScalarType dtype) { return empty({size}, dtype); }

// reach += (size - 1) * stride, for a row whose elements are those of a tensor.
void extend(int64_t& reach, int64_t size, int64_t stride, int64_t number) {
  int64_t step;
  HE_CHECK_INDEX(!__builtin_mul_overflow(size - 1, stride, &step) &&
                     !__builtin_add_overflow(reach, step, &reach) && reach < kMaxElements,
                 "ChangeTable: row ", number,
                 " reaches more than 2^60 elements; no tensor has as many");
}

ChangeRow row_of(const int64_t* entry, int64_t number) {
  for (int i = 0; i < 4; ++i)
    HE_CHECK_INDEX(entry[i] >= 0 && entry[i] < (i < 2 ? kMaxTensors : kMaxElements),
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
    HE_CHECK_VALUE(row.size[dim] == 1 || (row.size[dim] > 0 && row.src_stride[dim] > reach &&
                                          row.dst_stride[dim] >= 0),
                   "ChangeTable: dimension ", dim, " of row ", number, " has size ", row.size[dim],
                   " and source stride ", row.src_stride[dim],
                   "; expected a positive size and nested strides");
    extend(reach, row.size[dim], row.src_stride[dim], number);
  }
  row.src_end = row.src_offset + reach + 1;
  return row;
}

template <typename T>
Tensor bytes_of(const std::vector<T>& entries, const Device& device) {
  return upload(entries.data(), static_cast<int64_t>(entries.size() * sizeof(T)), device);
}

template <typename T>
T* data_of(const Tensor& bytes) {
  return static_cast<T*>(bytes.data());
}

// Tables of strided slices that changes follow; see kernels/delta/table.py.
class ChangeTable {
 public:
  ChangeTable(const Tensor& table, const Device& device);
  std::tuple<Tensor, Tensor> map(const std::vector<Tensor>& indices,
                                 const std::vector<Tensor>& values);
  // Returns what was added to bit_checksum of each destination; on CUDA it is not computed.
  Tensor scatter(const std::vector<Tensor>& indices, const std::vector<Tensor>& values,
                 const std::vector<Tensor>& destinations);

 private:
  // Of one call: other threads may use the table at the same time.
  struct Ranges {
    MapChangesParams params{};
    Tensor lists, first, work;
  };
  Ranges find_ranges(const std::vector<Tensor>& indices, const std::vector<Tensor>& values);

  Device device_;
  int64_t num_rows_ = 0;
  Tensor rows_;                    // ChangeRow
  std::vector<int64_t> dst_end_;   // by destination
  std::vector<int64_t> src_rows_;  // number of rows, by source
};

ChangeTable::ChangeTable(const Tensor& table, const Device& device) : device_(device) {
  HE_CHECK_VALUE(table.dim() == 2 && table.size(1) == kTableColumns &&
                     table.scalar_type() == kLong && table.is_contiguous() &&
                     table.device().is_cpu(),
                 "ChangeTable: table has shape ", table.sizes(), ", dtype ", table.scalar_type(),
                 " on ", table.device(), "; expected a contiguous [P, 16] int64 tensor on the CPU");
  const int64_t* entry = table.data<int64_t>();
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

ChangeTable::Ranges ChangeTable::find_ranges(const std::vector<Tensor>& indices,
                                             const std::vector<Tensor>& values) {
  const auto num_sources = static_cast<int64_t>(src_rows_.size());
  HE_CHECK_VALUE(
      indices.size() == values.size() && static_cast<int64_t>(indices.size()) >= num_sources,
      "ChangeTable: got ", indices.size(), " indices and ", values.size(), " values; expected ",
      num_sources, " of each");
  std::vector<ChangeList> lists;
  for (size_t i = 0; i < indices.size(); ++i) {
    const ScalarType type = indices[i].scalar_type();
    HE_CHECK_VALUE(
        indices[i].is_contiguous() && values[i].is_contiguous() &&
            (type == kInt || type == kLong) && values[i].element_size() == sizeof(uint16_t) &&
            indices[i].numel() == values[i].numel() && indices[i].device() == device_ &&
            values[i].device() == device_,
        "ChangeTable: source ", i, " has indices ", indices[i].sizes(), " of ", type,
        " and values ", values[i].sizes(), " of ", values[i].scalar_type(),
        "; expected int32 or int64 and a 16-bit dtype, contiguous, of one size, on ", device_);
    lists.push_back({indices[i].data(), static_cast<const uint16_t*>(values[i].data()),
                     indices[i].numel(), type == kLong});
  }
  Ranges ranges;
  ranges.lists = bytes_of(lists, device_);
  ranges.first = empty({num_rows_}, kLong, device_);
  ranges.work = empty({num_rows_ + 1}, kLong, device_);
  MapChangesParams& params = ranges.params;
  params.rows = data_of<ChangeRow>(rows_);
  params.num_rows = num_rows_;
  params.sources = data_of<ChangeList>(ranges.lists);
  params.first = data_of<int64_t>(ranges.first);
  params.work = data_of<int64_t>(ranges.work);
  params.num_threads = get_num_threads();
  if (device_.is_cpu()) find_change_ranges_cpu(params);
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) {
    check_cuda(find_change_ranges_cuda(params, current_stream(device_)), kTable);
    ranges.work.call("cumsum_", 0);
  }
#endif
  return ranges;
}

#ifdef HYBRIDENGINE_WITH_CUDA
// Element i of an int64 vector on the device, for which the host waits.
int64_t item_of(const Tensor& vector, int64_t i) {
  return vector.call("select", 0, i).object().attr("item")().cast<int64_t>();
}

// The host waits for the number of pairs, of changes in the destination, and for their order.
std::tuple<Tensor, Tensor> map_on_cuda(MapChangesParams params, const Tensor& work,
                                       ScalarType dtype) {
  const Device device = work.device();
  const int64_t total = item_of(work, params.num_rows);
  Tensor positions = empty({total}, kLong, device);
  Tensor mapped = empty({total}, dtype, device);
  params.positions = positions.data<int64_t>();
  params.values = static_cast<uint16_t*>(mapped.data());
  check_cuda(map_changes_cuda(params, total, current_stream(device)), kTable);
  Tensor order = positions.call("ge", 0).call("nonzero").call("view", -1);
  positions = positions.call("index_select", 0, order);
  const int64_t found = positions.numel();
  if (found > 1) {
    const Tensor next = positions.call("narrow", 0, 1, found - 1);
    const Tensor falls = next.call("lt", positions.call("narrow", 0, 0, found - 1)).call("any");
    if (falls.object().attr("item")().cast<bool>()) {  // a transposed slice
      const Tensor by_position = positions.call("argsort");
      positions = positions.call("index_select", 0, by_position);
      order = order.call("index_select", 0, by_position);
    }
  }
  return {positions, mapped.call("index_select", 0, order)};
}
#endif

// Fills positions and values of `params`, in ascending order, and returns how many there are.
int64_t map_in_order(const MapChangesParams& params, std::vector<int64_t>& counts) {
  const int64_t total = params.work[params.num_rows], parts = params.num_threads;
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
  return found;
}

std::tuple<Tensor, Tensor> map_on_cpu(MapChangesParams params, ScalarType dtype) {
  const int64_t total = params.work[params.num_rows];
  Tensor positions = vector_of(total, kLong);
  Tensor mapped = vector_of(total, dtype);
  std::vector<int64_t> counts(params.num_threads);
  params.positions = positions.data<int64_t>();
  params.values = static_cast<uint16_t*>(mapped.data());
  params.part_counts = counts.data();
  int64_t found = 0;
  without_gil([&] { found = map_in_order(params, counts); });
  return {positions.call("narrow", 0, 0, found), mapped.call("narrow", 0, 0, found)};
}

std::tuple<Tensor, Tensor> ChangeTable::map(const std::vector<Tensor>& indices,
                                            const std::vector<Tensor>& values) {
  const DeviceGuard guard(device_);
  const Ranges ranges = find_ranges(indices, values);
  const ScalarType dtype = values.empty() ? kBFloat16 : values[0].scalar_type();
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) return map_on_cuda(ranges.params, ranges.work, dtype);
#endif
  if (!device_.is_cpu()) no_kernel_for(device_, kTable);
  return map_on_cpu(ranges.params, dtype);
}

Tensor ChangeTable::scatter(const std::vector<Tensor>& indices, const std::vector<Tensor>& values,
                            const std::vector<Tensor>& destinations) {
  Tensor checksums = zeros({static_cast<int64_t>(destinations.size())}, kLong);
  if (!num_rows_) return checksums;
  const DeviceGuard guard(device_);
  std::vector<uint16_t*> addresses;
  for (size_t i = 0; i < destinations.size(); ++i) {
    const Tensor& tensor = destinations[i];
    HE_CHECK_VALUE(tensor.element_size() == sizeof(uint16_t) && tensor.device() == device_,
                   "ChangeTable: destination ", i, " is ", tensor.scalar_type(), " on ",
                   tensor.device(), "; expected a 16-bit dtype on ", device_);
    const int64_t available = tensor.extent();
    HE_CHECK_INDEX(i >= dst_end_.size() || dst_end_[i] <= available,
                   "ChangeTable: a row ends at element ", dst_end_[i], " of destination ", i,
                   ", which has ", available);
    addresses.push_back(static_cast<uint16_t*>(tensor.data()));
  }
  HE_CHECK_INDEX(destinations.size() >= dst_end_.size(), "ChangeTable: got ", destinations.size(),
                 " destinations; expected ", dst_end_.size());
  Ranges ranges = find_ranges(indices, values);
  MapChangesParams& params = ranges.params;
  const Tensor on_device = bytes_of(addresses, device_);
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
  params.checksums = reinterpret_cast<uint64_t*>(checksums.data<int64_t>());
  without_gil([&] { scatter_changes_cpu(params); });
  return checksums;
}

#ifdef HYBRIDENGINE_WITH_CUDA
// The sums of every chunk become those of all chunks up to it; returns the last ones.
std::vector<int64_t> add_up(Tensor& sums) {
  sums.call("cumsum_", 0);
  const Tensor last = sums.call("select", 0, -1).call("cpu");
  const int64_t* first = last.data<int64_t>();
  return {first, first + last.numel()};
}

Tensor sums_of_chunks(int64_t size, int64_t columns, const Device& device) {
  return empty({(size + kGapChunk - 1) / kGapChunk, columns}, kLong, device);
}

// The host waits for the number of bytes.
std::tuple<Tensor, int64_t> encode_gaps_on_cuda(const Tensor& positions, int64_t start) {
  const Device device = positions.device();
  const DeviceGuard guard(device);
  EncodeGapsParams params{};
  params.positions = positions.data<int64_t>();
  params.count = positions.numel();
  params.start = start;
  if (!params.count) return {empty({0}, kByte, device), 1};
  Tensor sums = sums_of_chunks(params.count, kMaxGapWidth, device);
  params.sums = sums.data<int64_t>();
  check_cuda(count_escapes_cuda(params, current_stream(device)), "encode_gaps");
  std::vector<int64_t> bytes = add_up(sums);
  for (int width = 1; width <= kMaxGapWidth; ++width)
    bytes[width - 1] = width * (params.count + bytes[width - 1]);
  const int64_t smallest = std::min_element(bytes.begin(), bytes.end()) - bytes.begin();
  Tensor out = empty({bytes[smallest]}, kByte, device).call("fill_", 0xFF);
  params.bytes = out.data<uint8_t>();
  const int width = static_cast<int>(smallest) + 1;
  check_cuda(write_gaps_cuda(params, width, current_stream(device)), "encode_gaps");
  return {out, width};
}

// The host waits for what is checked. Returns the number of positions, -1 if one is not below
// `end`.
int64_t decode_gaps_on_cuda(const Tensor& gaps, int width, int64_t start, int64_t end,
                            Tensor& positions) {
  const Device device = gaps.device();
  const DeviceGuard guard(device);
  DecodeGapsParams params{};
  params.bytes = gaps.data<uint8_t>();
  params.num_fields = gaps.numel() / width;
  params.start = start;
  params.count = positions.numel();
  params.positions = positions.data<int64_t>();
  if (!params.num_fields) return 0;
  Tensor sums = sums_of_chunks(params.num_fields, 2, device);
  params.sums = sums.data<int64_t>();
  check_cuda(count_fields_cuda(params, width, current_stream(device)), "decode_gaps");
  const int64_t found = add_up(sums)[1];
  if (found != params.count) return found;
  check_cuda(read_gaps_cuda(params, width, current_stream(device)), "decode_gaps");
  if (found && item_of(positions, found - 1) >= end) return -1;
  return found;
}
#endif

std::tuple<Tensor, int64_t> encode_gaps(const Tensor& positions, int64_t start) {
  check_vector(positions, "encode_gaps: positions", kLong, positions.numel());
  HE_CHECK_VALUE(start >= 0 && start <= kMaxPosition, "encode_gaps: start is ", start,
                 "; expected 0 to 2^48");
#ifdef HYBRIDENGINE_WITH_CUDA
  if (positions.is_cuda()) return encode_gaps_on_cuda(positions, start);
#endif
  if (!positions.is_cpu()) no_kernel_for(positions.device(), "encode_gaps");
  const int64_t* first = positions.data<int64_t>();
  int64_t bytes[kMaxGapWidth];
  const int64_t bad = gap_sizes(first, positions.numel(), start, bytes);
  HE_CHECK_VALUE(bad < 0, "encode_gaps: positions[", bad, "] is ", bad < 0 ? 0 : first[bad],
                 "; expected ascending positions from ", start, " on, at most 2^48");
  const int64_t smallest = std::min_element(bytes, bytes + kMaxGapWidth) - bytes;
  const int64_t width = smallest + 1;
  Tensor out = vector_of(bytes[smallest], kByte);
  constexpr decltype(&write_gaps<1>) writers[] = {write_gaps<1>, write_gaps<2>, write_gaps<3>};
  writers[smallest](first, positions.numel(), start, out.data<uint8_t>());
  return {out, width};
}

Tensor decode_gaps(const Tensor& gaps, int64_t width, int64_t start, int64_t end, int64_t count) {
  check_vector(gaps, "decode_gaps: gaps", kByte, gaps.numel());
  HE_CHECK_VALUE(1 <= width && width <= kMaxGapWidth && count >= 0 &&
                     count <= gaps.numel() / width && gaps.numel() % width == 0,
                 "decode_gaps: got ", gaps.numel(), " bytes of width ", width, " for ", count,
                 " positions");
  HE_CHECK_VALUE(start >= 0 && start <= kMaxPosition, "decode_gaps: start is ", start,
                 "; expected 0 to 2^48");
  Tensor positions;
  int64_t found = -1;
  if (gaps.is_cpu()) {
    positions = vector_of(count, kLong);
    constexpr decltype(&read_gaps<1>) readers[] = {read_gaps<1>, read_gaps<2>, read_gaps<3>};
    found = readers[width - 1](gaps.data<uint8_t>(), gaps.numel(), start, end, count,
                               positions.data<int64_t>());
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (gaps.is_cuda()) {
    positions = empty({count}, kLong, gaps.device());
    found = decode_gaps_on_cuda(gaps, static_cast<int>(width), start, end, positions);
#endif
  } else {
    no_kernel_for(gaps.device(), "decode_gaps");
  }
  HE_CHECK_VALUE(found == count, "decode_gaps: the bytes do not give ", count, " positions in [",
                 start, ", ", end, ")");
  return positions;
}

}  // namespace

void register_delta(py::module_& m) {
  m.def("encode_gaps", &encode_gaps, py::arg("positions"), py::arg("start"));
  m.def("decode_gaps", &decode_gaps, py::arg("gaps"), py::arg("width"), py::arg("start"),
        py::arg("end"), py::arg("count"));
  py::class_<ChangeTable>(m, "ChangeTable")
      .def(py::init<const Tensor&, const Device&>(), py::arg("table"), py::arg("device"))
      .def("map", &ChangeTable::map, py::arg("indices"), py::arg("values"))
      .def("scatter", &ChangeTable::scatter, py::arg("indices"), py::arg("values"),
           py::arg("destinations"));
}

}  // namespace hybridengine
