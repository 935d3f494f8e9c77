#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "common/slice_table.h"
#include "delta/gaps.h"
#include "delta/params.h"

namespace hybridengine {

namespace {

constexpr const char* kTable = "ChangeTable";
constexpr int64_t kMaxTensors = 1 << 20;
constexpr ScalarType kIndices[] = {kInt, kLong};

void check_reach(bool fits, int64_t number) {
  HE_CHECK_INDEX(fits, kTable, ": row ", number,
                 " reaches more than 2^60 elements; no tensor has as many");
}

ChangeRow row_of(const SliceRow& slice, int64_t number) {
  for (const int64_t tensor : {slice.src, slice.dst})
    HE_CHECK_INDEX(tensor >= 0 && tensor < kMaxTensors, kTable, ": row ", number, " names tensor ",
                   tensor, ", which cannot exist");
  for (const int64_t offset : {slice.src_offset, slice.dst_offset})
    HE_CHECK_INDEX(offset >= 0 && offset < kMaxElements, kTable, ": row ", number,
                   " begins at element ", offset, "; no tensor has it");
  ChangeRow row{};
  row.src = static_cast<int32_t>(slice.src);
  row.dst = static_cast<int32_t>(slice.dst);
  row.src_offset = slice.src_offset;
  row.dst_offset = slice.dst_offset;
  int64_t reach = 0;  // of the dimensions that follow
  for (int dim = kChangeDims - 1; dim >= 0; --dim) {
    row.size[dim] = slice.size[dim];
    row.src_stride[dim] = slice.src_stride[dim];
    row.dst_stride[dim] = slice.dst_stride[dim];
    HE_CHECK_VALUE(row.size[dim] == 1 || (row.size[dim] > 0 && row.src_stride[dim] > reach &&
                                          row.dst_stride[dim] >= 0),
                   kTable, ": dimension ", dim, " of row ", number, " has size ", row.size[dim],
                   " and source stride ", row.src_stride[dim],
                   "; expected a positive size and nested strides");
    check_reach(extend(reach, row.size[dim], row.src_stride[dim]), number);
  }
  row.src_end = row.src_offset + reach + 1;
  return row;
}

template <typename T>
Tensor bytes_of(const std::vector<T>& entries, const Device& device) {
  return upload(entries.data(), static_cast<int64_t>(entries.size() * sizeof(T)), device);
}

template <typename T>
T* data_of(In bytes) {
  return static_cast<T*>(bytes.data());
}

void check_16_bits(const Arguments& given, const Name& name, In tensor) {
  given.same_device(name, tensor);
  given.expect(tensor.element_size() == sizeof(uint16_t), name, " has dtype ", tensor.scalar_type(),
               "; expected one of 16 bits");
}

// Tables of strided slices that changes follow; see kernels/delta/table.py.
class ChangeTable {
 public:
  ChangeTable(In table, const Device& device);
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
  Ranges find_ranges(const Arguments& given, const std::vector<Tensor>& indices,
                     const std::vector<Tensor>& values);

  Device device_;
  int64_t num_rows_ = 0;
  Tensor rows_;                    // ChangeRow
  std::vector<int64_t> dst_end_;   // by destination
  std::vector<int64_t> src_rows_;  // number of rows, by source
};

ChangeTable::ChangeTable(In table, const Device& device) : device_(device) {
  const Arguments given(kTable, "table", table);
  const SliceRow* slices = slice_rows(given, table, &num_rows_);
  std::vector<ChangeRow> rows;
  rows.reserve(num_rows_);
  for (int64_t i = 0; i < num_rows_; ++i) {
    const ChangeRow row = row_of(slices[i], i);
    int64_t dst_end = row.dst_offset + 1;
    for (int dim = 0; dim < kChangeDims; ++dim)
      check_reach(extend(dst_end, row.size[dim], row.dst_stride[dim]), i);
    if (row.src >= static_cast<int64_t>(src_rows_.size())) src_rows_.resize(row.src + 1);
    ++src_rows_[row.src];
    if (row.dst >= static_cast<int64_t>(dst_end_.size())) dst_end_.resize(row.dst + 1);
    dst_end_[row.dst] = std::max(dst_end_[row.dst], dst_end);
    rows.push_back(row);
  }
  rows_ = bytes_of(rows, device);
  device_ = rows_.device();  // with its index
}

ChangeTable::Ranges ChangeTable::find_ranges(const Arguments& given,
                                             const std::vector<Tensor>& indices,
                                             const std::vector<Tensor>& values) {
  given.expect(indices.size() == values.size() && indices.size() >= src_rows_.size(), "got ",
               indices.size(), " indices and ", values.size(), " values; expected ",
               src_rows_.size(), " of each");
  std::vector<ChangeList> lists;
  for (int64_t i = 0; i < std::ssize(indices); ++i) {
    ChangeList list{};
    list.indices = given.data({"indices", i}, indices[i], kIndices, {&list.count});
    list.values = static_cast<const uint16_t*>(
        given.data({"values", i}, values[i], values[i].scalar_type(), {list.count}));
    check_16_bits(given, {"values", i}, values[i]);
    list.wide = indices[i].scalar_type() == kLong;
    lists.push_back(list);
  }
  Ranges ranges;
  ranges.lists = bytes_of(lists, device_);
  MapChangesParams& params = ranges.params;
  ranges.first = given.make(params.first, {num_rows_});
  ranges.work = given.make(params.work, {num_rows_ + 1});
  params.rows = data_of<ChangeRow>(rows_);
  params.num_rows = num_rows_;
  params.sources = data_of<ChangeList>(ranges.lists);
  given.run(params, find_change_ranges_cpu, HE_CUDA(find_change_ranges_cuda));
  if (device_.is_cuda()) ranges.work.call("cumsum_", 0);
  return ranges;
}

#ifdef HYBRIDENGINE_WITH_CUDA
// Element i of an int64 vector on the device, for which the host waits.
int64_t item_of(In vector, int64_t i) {
  return vector.call("select", 0, i).object().attr("item")().cast<int64_t>();
}

// The host waits for the number of pairs, of changes in the destination, and for their order.
std::tuple<Tensor, Tensor> map_on_cuda(const Arguments& given, MapChangesParams params, In work,
                                       ScalarType dtype) {
  const int64_t total = item_of(work, params.num_rows);
  Tensor positions = given.make(params.positions, {total});
  const Tensor mapped = given.make(params.values, {total}, dtype);
  given.launch([&](void* stream) { return map_changes_cuda(params, total, stream); });
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

std::tuple<Tensor, Tensor> map_on_cpu(const Arguments& given, MapChangesParams params,
                                      ScalarType dtype) {
  const int64_t total = params.work[params.num_rows];
  const Tensor positions = given.make(params.positions, {total});
  const Tensor mapped = given.make(params.values, {total}, dtype);
  std::vector<int64_t> counts(params.num_threads);
  params.part_counts = counts.data();
  int64_t found = 0;
  without_gil([&] { found = map_in_order(params, counts); });
  return {positions.call("narrow", 0, 0, found), mapped.call("narrow", 0, 0, found)};
}

std::tuple<Tensor, Tensor> ChangeTable::map(const std::vector<Tensor>& indices,
                                            const std::vector<Tensor>& values) {
  const Arguments given(kTable, "the table", rows_);
  const Ranges ranges = find_ranges(given, indices, values);
  const ScalarType dtype = values.empty() ? kBFloat16 : values[0].scalar_type();
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) return map_on_cuda(given, ranges.params, ranges.work, dtype);
#endif
  return map_on_cpu(given, ranges.params, dtype);
}

Tensor ChangeTable::scatter(const std::vector<Tensor>& indices, const std::vector<Tensor>& values,
                            const std::vector<Tensor>& destinations) {
  Tensor checksums = zeros({std::ssize(destinations)}, kLong);
  if (!num_rows_) return checksums;
  const Arguments given(kTable, "the table", rows_);
  std::vector<uint16_t*> addresses;
  for (size_t i = 0; i < destinations.size(); ++i) {
    check_16_bits(given, {"destinations", static_cast<int64_t>(i)}, destinations[i]);
    const int64_t available = destinations[i].extent();
    HE_CHECK_INDEX(i >= dst_end_.size() || dst_end_[i] <= available,
                   "ChangeTable: a row ends at element ", dst_end_[i], " of destination ", i,
                   ", which has ", available);
    addresses.push_back(static_cast<uint16_t*>(destinations[i].data()));
  }
  HE_CHECK_INDEX(destinations.size() >= dst_end_.size(), "ChangeTable: got ", destinations.size(),
                 " destinations; expected ", dst_end_.size());
  Ranges ranges = find_ranges(given, indices, values);
  MapChangesParams& params = ranges.params;
  const Tensor on_device = bytes_of(addresses, device_);
  params.destinations = data_of<uint16_t*>(on_device);
  params.checksums = reinterpret_cast<uint64_t*>(checksums.data<int64_t>());
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device_.is_cuda()) {
    int64_t max_pairs = 0;
    for (size_t i = 0; i < src_rows_.size(); ++i) max_pairs += src_rows_[i] * indices[i].numel();
    given.launch([&](void* stream) { return scatter_changes_cuda(params, max_pairs, stream); });
    return checksums;
  }
#endif
  given.run(params, scatter_changes_cpu);
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

int64_t chunks_of(int64_t size) { return (size + kGapChunk - 1) / kGapChunk; }

// The host waits for the number of bytes.
std::tuple<Tensor, int64_t> encode_gaps_on_cuda(const Arguments& given, EncodeGapsParams params) {
  if (!params.count) return {given.make(params.bytes, {0}), 1};
  Tensor sums = given.make(params.sums, {chunks_of(params.count), kMaxGapWidth});
  given.launch([&](void* stream) { return count_escapes_cuda(params, stream); });
  std::vector<int64_t> bytes = add_up(sums);
  for (int width = 1; width <= kMaxGapWidth; ++width)
    bytes[width - 1] = width * (params.count + bytes[width - 1]);
  const int64_t smallest = std::min_element(bytes.begin(), bytes.end()) - bytes.begin();
  Tensor out = given.make(params.bytes, {bytes[smallest]}).call("fill_", 0xFF);
  const int width = static_cast<int>(smallest) + 1;
  given.launch([&](void* stream) { return write_gaps_cuda(params, width, stream); });
  return {out, width};
}

// The host waits for what is checked. Returns the number of positions, -1 if one is not below
// `end`.
int64_t decode_gaps_on_cuda(const Arguments& given, DecodeGapsParams params, int width, int64_t end,
                            In positions) {
  if (!params.num_fields) return 0;
  Tensor sums = given.make(params.sums, {chunks_of(params.num_fields), 2});
  given.launch([&](void* stream) { return count_fields_cuda(params, width, stream); });
  const int64_t found = add_up(sums)[1];
  if (found != params.count) return found;
  given.launch([&](void* stream) { return read_gaps_cuda(params, width, stream); });
  if (found && item_of(positions, found - 1) >= end) return -1;
  return found;
}
#endif

std::tuple<Tensor, int64_t> encode_gaps(In positions, int64_t start) {
  const Arguments given("encode_gaps", "positions", positions);
  given.number("start", start, 0, kMaxPosition);
  int64_t count;
  const auto* first = given.data<int64_t>("positions", positions, {&count});
#ifdef HYBRIDENGINE_WITH_CUDA
  if (positions.is_cuda())
    return encode_gaps_on_cuda(given, {.positions = first, .count = count, .start = start});
#endif
  given.on_cpu();
  int64_t bytes[kMaxGapWidth];
  const int64_t bad = gap_sizes(first, count, start, bytes);
  HE_CHECK_VALUE(bad < 0, "encode_gaps: positions[", bad, "] is ", first[bad],
                 "; expected ascending positions from ", start, " on, at most 2^48");
  const int64_t smallest = std::min_element(bytes, bytes + kMaxGapWidth) - bytes;
  uint8_t* to;
  Tensor out = given.make(to, {bytes[smallest]});
  constexpr decltype(&write_gaps<1>) writers[] = {write_gaps<1>, write_gaps<2>, write_gaps<3>};
  writers[smallest](first, count, start, to);
  return {out, smallest + 1};
}

Tensor decode_gaps(In gaps, int64_t width, int64_t start, int64_t end, int64_t count) {
  const Arguments given("decode_gaps", "gaps", gaps);
  int64_t size, found = -1;
  const auto* bytes = given.data<uint8_t>("gaps", gaps, {&size});
  given.expect(1 <= width && width <= kMaxGapWidth && count >= 0 && count <= size / width &&
                   size % width == 0,
               "got ", size, " bytes of width ", width, " for ", count, " positions");
  given.number("start", start, 0, kMaxPosition);
  int64_t* to;
  Tensor positions = given.make(to, {count});
  if (gaps.is_cpu()) {
    constexpr decltype(&read_gaps<1>) readers[] = {read_gaps<1>, read_gaps<2>, read_gaps<3>};
    found = readers[width - 1](bytes, size, start, end, count, to);
#ifdef HYBRIDENGINE_WITH_CUDA
  } else if (gaps.is_cuda()) {
    const DecodeGapsParams params{.bytes = bytes,
                                  .num_fields = size / width,
                                  .start = start,
                                  .count = count,
                                  .positions = to};
    found = decode_gaps_on_cuda(given, params, static_cast<int>(width), end, positions);
#endif
  } else {
    given.no_kernel();
  }
  given.expect(found == count, "the bytes do not give ", count, " positions in [", start, ", ", end,
               ")");
  return positions;
}

}  // namespace

void register_delta(py::module_& m) {
  def(m, "encode_gaps", &encode_gaps, "positions start");
  def(m, "decode_gaps", &decode_gaps, "gaps width start end count");
  py::class_<ChangeTable>(m, "ChangeTable")
      .def(py::init<const Tensor&, const Device&>(), py::arg("table"), py::arg("device"))
      .def("map", &ChangeTable::map, py::arg("indices"), py::arg("values"))
      .def("scatter", &ChangeTable::scatter, py::arg("indices"), py::arg("values"),
           py::arg("destinations"));
}

}  // namespace hybridengine
