
#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "common/binding.h"
#include "strided_copy/params.h"
#include "strided_copy/quantize.h"

namespace hybridengine {

namespace {

using Tensors = std::vector<Tensor>;

constexpr int64_t kTableColumns = 4 + 3 * kCopyDims;
constexpr const char* kQuantize = "block_quantize";

bool is_float(const ScalarType& type) {
  return type == kFloat || type == kHalf || type == kBFloat16 || type == kDouble;
}

DType raw_dtype(int64_t bytes) {
  return bytes == 1   ? DType::raw1
         : bytes == 2 ? DType::raw2
         : bytes == 4 ? DType::raw4
                      : DType::raw8;
}

// No tensor has more: products of a size and a stride within it fit an int64_t.
constexpr int64_t kMaxElements = int64_t{1} << 60;

// The last element of a tensor that any row accesses, and that row.
struct Reach {
  int64_t last = -1;
  int64_t row = 0;
};
using Reaches = std::map<int64_t, Reach>;  // by number of the tensor

// The first row whose destination has fewer places than the row has elements; it may be read only.
struct Overlap {
  int64_t row = -1, elements = 0, places = 0;
};

// The rows of a table, checked once; `copy` checks only the tensors. On CUDA the rows are uploaded
// at the first copy and addresses when they change, so that a repeated copy is a single launch and
// can be captured in a graph.
class CopyTable {
 public:
  // blocks: for block quantization, the number of the block that each row lies in.
  CopyTable(const Tensor& table, const std::optional<Tensor>& blocks);
  void copy(const Tensors& sources, const Tensors& destinations);
  // absmax: int32 by block, raised to the bits of the largest magnitude. scale: float32 by block.
  // dtype: of the engine, to which values are rounded first.
  void absmax(const Tensors& sources, const Tensor& absmax, ScalarType dtype) {
    run_blocks(sources, nullptr, absmax, dtype);
  }
  void quantize(const Tensors& sources, const Tensors& destinations, const Tensor& scale,
                ScalarType dtype) {
    run_blocks(sources, &destinations, scale, dtype);
  }

 private:
  void run_blocks(const Tensors& sources, const Tensors* destinations, Tensor per_block,
                  ScalarType dtype);
  void resolve_destinations(const Tensors& destinations, const Device& device,
                            std::vector<void*>& addresses) const;
  void upload_tables(const Device& device, const std::vector<void*>& addresses);

  std::vector<CopyRow> rows_;
  Reaches src_reach_, dst_reach_;
  int64_t num_chunks_ = 0;
  int64_t num_blocks_ = 0;  // one more than the largest number; 0 without blocks
  Overlap overlap_;
  Tensor device_rows_, device_row_of_chunk_, device_addresses_;
  std::vector<void*> uploaded_;
};

// last = offset + sum of (size - 1) * stride; false where that overflows or is above kMaxElements.
bool last_element(int64_t offset, const int64_t* size, const int64_t* stride, int64_t& last) {
  last = offset;
  for (int dim = 0; dim < kCopyDims; ++dim) {
    int64_t step;
    if (__builtin_mul_overflow(size[dim] - 1, stride[dim], &step) ||
        __builtin_add_overflow(last, step, &last))
      return false;
  }
  return last <= kMaxElements;
}

// Checks one side of row `number`, updates the reach of its tensor and returns the last element.
int64_t update_reach(Reaches& reaches, const char* name, int64_t number, int64_t index,
                     int64_t offset, const int64_t* size, const int64_t* stride) {
  HE_CHECK_INDEX(index >= 0 && index < (int64_t{1} << 31), "strided_copy: row ", number, " names ",
                 name, "[", index, "], which cannot exist");
  HE_CHECK_INDEX(offset >= 0, "strided_copy: row ", number, " begins at element ", offset, " of ",
                 name, "[", index, "]; offsets must not be negative");
  for (int dim = 0; dim < kCopyDims; ++dim)
    HE_CHECK_INDEX(stride[dim] >= 0, "strided_copy: row ", number, " has stride ", stride[dim],
                   " in dimension ", dim, " of ", name, "[", index,
                   "]; strides must not be negative");
  int64_t last;
  HE_CHECK_INDEX(last_element(offset, size, stride, last), "strided_copy: row ", number,
                 " reaches more than 2^60 elements beyond the start of ", name, "[", index,
                 "]; no tensor has as many");
  Reach& reach = reaches[index];
  if (last > reach.last) reach = {last, number};
  return last;
}

CopyTable::CopyTable(const Tensor& table, const std::optional<Tensor>& blocks) {
  HE_CHECK_VALUE(table.dim() == 2 && table.size(1) == kTableColumns &&
                     table.scalar_type() == kLong && table.is_contiguous() &&
                     table.device().is_cpu(),
                 "strided_copy: table has shape ", table.sizes(), ", dtype ", table.scalar_type(),
                 " on ", table.device(), "; expected a contiguous [P, 16] int64 tensor on the CPU");
  if (blocks) check_vector(*blocks, "blocks", kLong, table.size(0));
  const int64_t* block = blocks ? blocks->data<int64_t>() : nullptr;
  const int64_t* entry = table.data<int64_t>();
  rows_.reserve(table.size(0));
  int64_t all_elements = 0;
  for (int64_t i = 0; i < table.size(0); ++i, entry += kTableColumns) {
    const int64_t* size = entry + 4;
    const int64_t* src_stride = size + kCopyDims;
    const int64_t* dst_stride = src_stride + kCopyDims;
    bool empty = false, fits = true;
    int64_t elements = 1;
    for (int dim = 0; dim < kCopyDims; ++dim) {
      HE_CHECK_VALUE(size[dim] >= 0, "strided_copy: row ", i, " has size ", size[dim],
                     " in dimension ", dim, "; sizes must not be negative");
      empty |= size[dim] == 0;
      fits = fits && !__builtin_mul_overflow(elements, size[dim], &elements);
    }
    if (empty) continue;
    HE_CHECK_VALUE(fits && elements <= kMaxElements - all_elements, "strided_copy: row ", i,
                   " has, with those before it, more than 2^60 elements; expected the sizes of "
                   "slices of tensors");
    all_elements += elements;
    update_reach(src_reach_, "sources", i, entry[0], entry[2], size, src_stride);
    const int64_t last =
        update_reach(dst_reach_, "destinations", i, entry[1], entry[3], size, dst_stride);
    const int64_t places = last - entry[3] + 1;
    if (elements > places && overlap_.row < 0) overlap_ = {i, elements, places};
    CopyRow row{};
    row.src = static_cast<int32_t>(entry[0]);
    row.dst = static_cast<int32_t>(entry[1]);
    row.src_offset = entry[2];
    row.dst_offset = entry[3];
    for (int dim = 0; dim < kCopyDims; ++dim) {
      row.size[dim] = size[dim];
      row.src_stride[dim] = src_stride[dim];
      row.dst_stride[dim] = dst_stride[dim];
    }
    coalesce(row);
    row.src_align = alignment(row, row.src_stride);
    row.dst_align = alignment(row, row.dst_stride);
    row.first_chunk = num_chunks_;
    if (block) {
      HE_CHECK_VALUE(block[i] >= 0 && block[i] < (int64_t{1} << 31) && elements <= kChunkElements,
                     kQuantize, ": row ", i, " has block ", block[i], " and ", elements,
                     " elements; expected a number below 2^31 and at most ", kChunkElements);
      row.block = static_cast<int32_t>(block[i]);
      num_blocks_ = std::max(num_blocks_, block[i] + 1);
    }
    num_chunks_ += (num_elements(row) + kChunkElements - 1) / kChunkElements;
    rows_.push_back(row);
  }
}

// The addresses of the tensors of one side, after checking that the rows stay inside them.
void resolve(const Tensors& tensors, const Reaches& reaches, const char* name, const Device& device,
             std::vector<void*>& addresses) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    HE_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(), "strided_copy: ", name, "[", i,
                   "] has dtype ", tensor.scalar_type(), " but ", name, "[0] has ",
                   tensors[0].scalar_type(), "; all of them must share one dtype");
    HE_CHECK_VALUE(tensor.device() == device, "strided_copy: ", name, "[", i, "] is on ",
                   tensor.device(), "; expected ", device, " like sources[0]");
    addresses.push_back(tensor.data());
  }
  for (const auto& [index, reach] : reaches) {
    HE_CHECK_INDEX(index < static_cast<int64_t>(tensors.size()), "strided_copy: row ", reach.row,
                   " names ", name, "[", index, "], but there are ", tensors.size());
    const Tensor& tensor = tensors[index];
    const int64_t available = tensor.extent();
    HE_CHECK_INDEX(reach.last < available, "strided_copy: row ", reach.row, " reaches element ",
                   reach.last, " of ", name, "[", index, "], which has ", available,
                   " elements from its start");
  }
}

// Equal dtypes move bytes; others must be floats that convert.
void choose_dtypes(const Tensor& source, const Tensor& destination, StridedCopyParams& params) {
  const ScalarType src = source.scalar_type();
  const ScalarType dst = destination.scalar_type();
  if (src == dst) {
    HE_CHECK_VALUE(source.element_size() <= 8, "strided_copy: dtype ", src, " is not supported");
    params.src_dtype = params.dst_dtype = raw_dtype(source.element_size());
    return;
  }
  HE_CHECK_VALUE(is_float(src) && is_float(dst), "strided_copy: no cast from ", src, " to ", dst,
                 "; float32, float16, bfloat16 and float64 cast to each other, every other "
                 "dtype only copies to itself");
  params.src_dtype = float_dtype(source, "sources[0]");
  params.dst_dtype = float_dtype(destination, "destinations[0]");
}

void CopyTable::resolve_destinations(const Tensors& destinations, const Device& device,
                                     std::vector<void*>& addresses) const {
  HE_CHECK_VALUE(overlap_.row < 0, "strided_copy: row ", overlap_.row, " writes ",
                 overlap_.elements, " elements to ", overlap_.places,
                 "; expected destination slices that do not overlap");
  resolve(destinations, dst_reach_, "destinations", device, addresses);
}

void CopyTable::copy(const Tensors& sources, const Tensors& destinations) {
  if (rows_.empty()) return;
  HE_CHECK_VALUE(!sources.empty() && !destinations.empty(),
                 "strided_copy: a table with rows needs sources and destinations, got ",
                 sources.size(), " and ", destinations.size());
  const Device device = sources[0].device();
  StridedCopyParams params{};
  std::vector<void*> addresses;
  resolve(sources, src_reach_, "sources", device, addresses);
  resolve_destinations(destinations, device, addresses);
  choose_dtypes(sources[0], destinations[0], params);
  params.num_rows = static_cast<int64_t>(rows_.size());
  params.num_chunks = num_chunks_;
  params.num_threads = get_num_threads();
  if (device.is_cpu()) {
    params.rows = rows_.data();
    params.sources = reinterpret_cast<const char* const*>(addresses.data());
    params.destinations = reinterpret_cast<char* const*>(addresses.data() + sources.size());
    return without_gil([&] { strided_copy_cpu(params); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    HE_CHECK_VALUE(params.num_chunks < (int64_t{1} << 31),
                   "strided_copy: the table moves more than 2^45 elements; split it");
    const DeviceGuard guard(device);
    void* stream = current_stream(device);
    upload_tables(device, addresses);
    params.rows = static_cast<const CopyRow*>(device_rows_.data());
    params.row_of_chunk = static_cast<const int32_t*>(device_row_of_chunk_.data());
    auto* device_data = static_cast<void**>(device_addresses_.data());
    params.sources = reinterpret_cast<const char* const*>(device_data);
    params.destinations = reinterpret_cast<char* const*>(device_data + sources.size());
    check_cuda(strided_copy_cuda(params, stream), "strided_copy");
    return;
  }
#endif
  no_kernel_for(device, "strided_copy");
}

// The destinations are of a type of one byte. per_block: see QuantizeParams.
void CopyTable::run_blocks(const Tensors& sources, const Tensors* destinations, Tensor per_block,
                           ScalarType dtype) {
  if (rows_.empty()) return;
  HE_CHECK_VALUE(num_blocks_ > 0, kQuantize, ": the table was made without blocks");
  HE_CHECK_VALUE(!sources.empty() && !(destinations && destinations->empty()), kQuantize,
                 ": a table with rows needs sources and destinations, got none");
  const Device device = sources[0].device();
  const ScalarType wanted = destinations ? kFloat : kInt;
  HE_CHECK_VALUE(per_block.dim() == 1 && per_block.scalar_type() == wanted &&
                     per_block.size(0) >= num_blocks_ && per_block.is_contiguous() &&
                     per_block.device() == device,
                 kQuantize, ": got ", per_block.sizes(), " ", per_block.scalar_type(), " on ",
                 per_block.device(), " by block; expected a contiguous [", num_blocks_,
                 "] tensor of ", wanted, " on ", device);
  QuantizeParams params{};
  params.src_dtype = float_dtype(sources[0], "sources[0]");
  params.engine_dtype = float_dtype(dtype, "dtype");
  HE_CHECK_VALUE(params.src_dtype != DType::f64 && params.engine_dtype != DType::f64, kQuantize,
                 ": got sources of ", sources[0].scalar_type(), " for ", dtype,
                 "; expected float32, float16 or bfloat16");
  std::vector<void*> addresses;
  resolve(sources, src_reach_, "sources", device, addresses);
  if (destinations) {
    resolve_destinations(*destinations, device, addresses);
    HE_CHECK_VALUE((*destinations)[0].scalar_type() == kFloat8_e4m3fn, kQuantize,
                   ": destinations[0] has dtype ", (*destinations)[0].scalar_type(),
                   "; expected float8_e4m3fn");
    params.scale = per_block.data<float>();
  } else {
    params.absmax = per_block.data<int32_t>();
  }
  params.num_rows = static_cast<int64_t>(rows_.size());
  params.num_threads = get_num_threads();
  const auto set_tables = [&](const void* rows, void** table) {
    params.rows = static_cast<const CopyRow*>(rows);
    params.sources = reinterpret_cast<const char* const*>(table);
    params.destinations = reinterpret_cast<char* const*>(table + sources.size());
  };
  if (device.is_cpu()) {
    set_tables(rows_.data(), addresses.data());
    return without_gil(
        [&] { destinations ? block_quantize_cpu(params) : block_absmax_cpu(params); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    const DeviceGuard guard(device);
    void* stream = current_stream(device);
    upload_tables(device, addresses);
    set_tables(device_rows_.data(), static_cast<void**>(device_addresses_.data()));
    check_cuda(
        destinations ? block_quantize_cuda(params, stream) : block_absmax_cuda(params, stream),
        kQuantize);
    return;
  }
#endif
  no_kernel_for(device, kQuantize);
}

#ifdef HYBRIDENGINE_WITH_CUDA
void CopyTable::upload_tables(const Device& device, const std::vector<void*>& addresses) {
  if (!device_rows_.defined() || device_rows_.device() != device) {
    std::vector<int32_t> row_of_chunk(num_chunks_);
    for (size_t row = 0; row < rows_.size(); ++row) {
      const int64_t end = row + 1 < rows_.size() ? rows_[row + 1].first_chunk : num_chunks_;
      std::fill(row_of_chunk.begin() + rows_[row].first_chunk, row_of_chunk.begin() + end,
                static_cast<int32_t>(row));
    }
    device_rows_ = upload(rows_.data(), rows_.size() * sizeof(CopyRow), device);
    device_row_of_chunk_ =
        upload(row_of_chunk.data(), row_of_chunk.size() * sizeof(int32_t), device);
    uploaded_.clear();
  }
  if (uploaded_ != addresses) {
    device_addresses_ = upload(addresses.data(), addresses.size() * sizeof(void*), device);
    uploaded_ = addresses;
  }
}
#endif

}  // namespace

void register_strided_copy(py::module_& m) {
  py::class_<CopyTable>(m, "CopyTable")
      .def(py::init<const Tensor&, const std::optional<Tensor>&>(), py::arg("table"),
           py::arg("blocks") = py::none())
      .def("copy", &CopyTable::copy, py::arg("sources"), py::arg("destinations"))
      .def("absmax", &CopyTable::absmax, py::arg("sources"), py::arg("absmax"), py::arg("dtype"))
      .def("quantize", &CopyTable::quantize, py::arg("sources"), py::arg("destinations"),
           py::arg("scale"), py::arg("dtype"));
  m.def(
      "strided_copy",
      [](const Tensors& sources, const Tensors& destinations, const Tensor& table) {
        CopyTable(table, std::nullopt).copy(sources, destinations);
      },
      py::arg("sources"), py::arg("destinations"), py::arg("table"));
}

}  // namespace hybridengine
