#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/slice_table.h"
#include "strided_copy/params.h"
#include "strided_copy/quantize.h"

namespace hybridengine {

namespace {

using Tensors = std::vector<Tensor>;

constexpr const char* kCopy = "strided_copy";
constexpr const char* kQuantize = "block_quantize";

DType raw_dtype(int64_t bytes) {
  return bytes == 1   ? DType::raw1
         : bytes == 2 ? DType::raw2
         : bytes == 4 ? DType::raw4
                      : DType::raw8;
}

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

// The rows of a table, checked once; `copy` checks only the tensors. On CUDA chunks are uploaded at
// the first copy and addresses when they change, so that a repeated copy is a single launch and
// can be captured in a graph.
class CopyTable {
 public:
  // blocks: for block quantization, the number of the block that each row lies in.
  CopyTable(In table, OptionalIn blocks);
  void copy(const Tensors& sources, const Tensors& destinations);
  // absmax: int32 by block, raised to the bits of the largest magnitude. scale: float32 by block.
  // dtype: of the engine, to which values are rounded first.
  void absmax(const Tensors& sources, In absmax, ScalarType dtype) {
    run_blocks(sources, nullptr, absmax, dtype);
  }
  void quantize(const Tensors& sources, const Tensors& destinations, In scale, ScalarType dtype) {
    run_blocks(sources, &destinations, scale, dtype);
  }

 private:
  void run_blocks(const Tensors& sources, const Tensors* destinations, In per_block,
                  ScalarType dtype);
  void resolve_destinations(const Arguments& given, const Tensors& destinations,
                            std::vector<void*>& addresses) const;
  template <typename Params>
  void set_tables(const Arguments& given, Params& params, const std::vector<void*>& addresses,
                  size_t sources);
  void upload_tables(const Arguments& given, const std::vector<void*>& addresses);

  std::vector<CopyRow> rows_;
  Reaches src_reach_, dst_reach_;
  int64_t num_chunks_ = 0;         // on the CPU
  int64_t num_device_chunks_ = 0;  // set with them
  int64_t num_blocks_ = 0;         // one more than the largest number; 0 without blocks
  Overlap overlap_;
  Tensor device_chunks_, device_addresses_;
  std::vector<void*> uploaded_;
};

// Checks one side of row `number`, updates the reach of its tensor and returns the last element.
int64_t update_reach(Reaches& reaches, const char* list, int64_t number, int64_t index,
                     int64_t offset, const int64_t* size, const int64_t* stride) {
  const auto expect = [&](bool condition, const auto&... parts) {
    HE_CHECK_INDEX(condition, kCopy, ": row ", number, " of ", Name(list, index), " ", parts...);
  };
  expect(index >= 0 && index < (int64_t{1} << 31), "names tensor ", index, ", which cannot exist");
  expect(offset >= 0, "begins at element ", offset, "; offsets must not be negative");
  int64_t last = offset;
  for (int dim = 0; dim < kCopyDims; ++dim) {
    expect(stride[dim] >= 0, "has stride ", stride[dim], "; strides must not be negative");
    expect(extend(last, size[dim], stride[dim]), "reaches more than 2^60 elements");
  }
  Reach& reach = reaches[index];
  if (last > reach.last) reach = {last, number};
  return last;
}

// What a row reads; it is equal for rows that read the same elements in the same order.
using Reads = std::array<int64_t, 2 + 2 * kCopyDims>;

Reads reads_of(const SliceRow& slice) {
  CopyRow row{};
  std::copy_n(slice.size, kCopyDims, row.size);
  std::copy_n(slice.src_stride, kCopyDims, row.src_stride);
  std::copy_n(slice.src_stride, kCopyDims, row.dst_stride);
  coalesce(row);
  Reads reads{slice.src, slice.src_offset};
  std::copy_n(row.size, kCopyDims, &reads[2]);
  std::copy_n(row.src_stride, kCopyDims, &reads[2 + kCopyDims]);
  return reads;
}

// The number of runs if `reads` continues each of several runs of `before`, else 0.
int64_t runs_beside(const Reads& before, const Reads& reads) {
  constexpr int kRun = 1 + kCopyDims;  // the size of the last dimension
  const bool beside = reads[0] == before[0] && reads[1] == before[1] + before[kRun] &&
                      std::equal(&reads[2], &reads[kRun], &before[2]) &&
                      std::equal(&reads[kRun + 1], reads.end(), &before[kRun + 1]);
  if (!beside || reads.back() != 1 || before[kRun] + reads[kRun] > kChunkElements) return 0;
  const auto runs = std::accumulate(&reads[2], &reads[kRun], int64_t{1}, std::multiplies<>());
  return runs > 1 ? runs : 0;
}

CopyTable::CopyTable(In table, OptionalIn blocks) {
  const Arguments given(kCopy, "table", table);
  int64_t num_rows;
  const SliceRow* slice = slice_rows(given, table, &num_rows);
  const auto* block = given.data<int64_t>("blocks", blocks, {num_rows});
  rows_.reserve(num_rows);
  int64_t all_elements = 0, band_elements = 0;
  Reads before{-1};
  for (int64_t i = 0; i < num_rows; ++i, ++slice) {
    bool empty = false, fits = true;
    int64_t elements = 1;
    for (int dim = 0; dim < kCopyDims; ++dim) {
      given.expect(slice->size[dim] >= 0, "row ", i, " has size ", slice->size[dim],
                   " in dimension ", dim, "; sizes must not be negative");
      empty |= slice->size[dim] == 0;
      fits = fits && !__builtin_mul_overflow(elements, slice->size[dim], &elements);
    }
    if (empty) continue;
    given.expect(fits && elements <= kMaxElements - all_elements, "row ", i,
                 " has, with those before it, more than 2^60 elements");
    all_elements += elements;
    update_reach(src_reach_, "sources", i, slice->src, slice->src_offset, slice->size,
                 slice->src_stride);
    const int64_t last = update_reach(dst_reach_, "destinations", i, slice->dst, slice->dst_offset,
                                      slice->size, slice->dst_stride);
    const int64_t places = last - slice->dst_offset + 1;
    if (elements > places && overlap_.row < 0) overlap_ = {i, elements, places};
    CopyRow row{};
    row.src = static_cast<int32_t>(slice->src);
    row.dst = static_cast<int32_t>(slice->dst);
    row.src_offset = slice->src_offset;
    row.dst_offset = slice->dst_offset;
    std::copy_n(slice->size, kCopyDims, row.size);
    std::copy_n(slice->src_stride, kCopyDims, row.src_stride);
    std::copy_n(slice->dst_stride, kCopyDims, row.dst_stride);
    coalesce(row);
    const Reads reads = reads_of(*slice);
    const bool again = reads == before;
    const int64_t runs = runs_beside(before, reads);
    before = reads;
    row.group = again ? rows_.back().group + 1 : 1;
    row.runs = again ? rows_.back().runs : runs;
    const bool continues = again || runs;
    row.band = continues ? rows_.back().band + 1 : 1;
    row.first_chunk = continues ? rows_.back().first_chunk : num_chunks_;
    band_elements = (continues ? band_elements : 0) + (again ? 0 : elements);
    num_chunks_ = row.first_chunk + (band_elements + kChunkElements - 1) / kChunkElements;
    if (block) {
      HE_CHECK_VALUE(block[i] >= 0 && block[i] < (int64_t{1} << 31) && elements <= kChunkElements,
                     kQuantize, ": row ", i, " has block ", block[i], " and ", elements,
                     " elements; expected a number below 2^31 and at most ", kChunkElements);
      row.block = static_cast<int32_t>(block[i]);
      num_blocks_ = std::max(num_blocks_, block[i] + 1);
    }
    rows_.push_back(row);
  }
}

// Adds the addresses of the tensors of one side, after checking that the rows stay inside them.
void resolve(const Arguments& given, const Tensors& tensors, const Reaches& reaches,
             const char* list, std::vector<void*>& addresses) {
  for (int64_t i = 0; i < std::ssize(tensors); ++i) {
    const Name name(list, i);
    given.same_device(name, tensors[i]);
    given.expect(tensors[i].scalar_type() == tensors[0].scalar_type(), name, " has dtype ",
                 tensors[i].scalar_type(), " but ", list, "[0] has ", tensors[0].scalar_type(),
                 "; all of them must share one dtype");
    addresses.push_back(tensors[i].data());
  }
  for (const auto& [index, reach] : reaches) {
    HE_CHECK_INDEX(index < std::ssize(tensors), given.op(), ": row ", reach.row, " names ",
                   Name(list, index), ", but there are ", tensors.size());
    const int64_t available = tensors[index].extent();
    HE_CHECK_INDEX(reach.last < available, given.op(), ": row ", reach.row, " reaches element ",
                   reach.last, " of ", Name(list, index), ", which has ", available,
                   " elements from its start");
  }
}

// Equal dtypes move bytes; others must be floats that convert.
void choose_dtypes(const Arguments& given, In source, In destination, StridedCopyParams& params) {
  const ScalarType src = source.scalar_type(), dst = destination.scalar_type();
  if (src == dst) {
    given.expect(src.bytes() <= 8, "dtype ", src, " is not supported");
    params.src_dtype = params.dst_dtype = raw_dtype(src.bytes());
    return;
  }
  const Types floats(kAllFloats);
  given.expect(floats.have(src) && floats.have(dst), "no cast from ", src, " to ", dst,
               "; float32, float16, bfloat16 and float64 cast to each other, every other "
               "dtype only copies to itself");
  params.src_dtype = dtype_of(src);
  params.dst_dtype = dtype_of(dst);
}

void CopyTable::resolve_destinations(const Arguments& given, const Tensors& destinations,
                                     std::vector<void*>& addresses) const {
  given.expect(overlap_.row < 0, "row ", overlap_.row, " writes ", overlap_.elements,
               " elements to ", overlap_.places,
               "; expected destination slices that do not overlap");
  resolve(given, destinations, dst_reach_, "destinations", addresses);
}

// Sets the table and the addresses, of `sources` and then of destinations.
template <typename Params>
void CopyTable::set_tables(const Arguments& given, Params& params,
                           const std::vector<void*>& addresses, size_t sources) {
  params.num_rows = std::ssize(rows_);
  params.rows = rows_.data();
  params.num_chunks = num_chunks_;
  const void* of_tensors = addresses.data();
  if (!given.device().is_cpu()) {
    if (!given.device().is_cuda()) given.no_kernel();
    upload_tables(given, addresses);
    params.chunks = static_cast<const CopyChunk*>(device_chunks_.data());
    params.num_chunks = num_device_chunks_;
    of_tensors = device_addresses_.data();
  }
  params.sources = static_cast<const char* const*>(of_tensors);
  params.destinations = static_cast<char* const*>(of_tensors) + sources;
}

void CopyTable::copy(const Tensors& sources, const Tensors& destinations) {
  if (rows_.empty()) return;
  HE_CHECK_VALUE(!sources.empty() && !destinations.empty(), kCopy,
                 ": a table with rows needs sources and destinations, got ", sources.size(),
                 " and ", destinations.size());
  const Arguments given(kCopy, "sources[0]", sources[0]);
  StridedCopyParams params{};
  std::vector<void*> addresses;
  resolve(given, sources, src_reach_, "sources", addresses);
  resolve_destinations(given, destinations, addresses);
  choose_dtypes(given, sources[0], destinations[0], params);
  set_tables(given, params, addresses, sources.size());
  given.run(params, strided_copy_cpu, HE_CUDA(strided_copy_cuda));
}

// The destinations are of a type of one byte. per_block: see QuantizeParams.
void CopyTable::run_blocks(const Tensors& sources, const Tensors* destinations, In per_block,
                           ScalarType dtype) {
  if (rows_.empty()) return;
  HE_CHECK_VALUE(num_blocks_ > 0, kQuantize, ": the table was made without blocks");
  HE_CHECK_VALUE(!sources.empty() && !(destinations && destinations->empty()), kQuantize,
                 ": a table with rows needs sources and destinations, got none");
  const Arguments given(kQuantize, "sources[0]", sources[0]);
  QuantizeParams params{};
  int64_t blocks;
  params.src_dtype = given.dtype("sources[0]", sources[0].scalar_type());
  params.engine_dtype = given.dtype("dtype", dtype);
  if (destinations) {
    params.scale = given.data<float>("scale", per_block, {&blocks});
  } else {
    params.absmax = given.data<int32_t>("absmax", per_block, {&blocks});
  }
  given.expect(blocks >= num_blocks_, "got numbers of ", blocks, " blocks; expected ", num_blocks_);
  std::vector<void*> addresses;
  resolve(given, sources, src_reach_, "sources", addresses);
  if (destinations) {
    resolve_destinations(given, *destinations, addresses);
    given.dtype("destinations[0]", (*destinations)[0].scalar_type(), kFloat8_e4m3fn);
  }
  set_tables(given, params, addresses, sources.size());
  destinations ? given.run(params, block_quantize_cpu, HE_CUDA(block_quantize_cuda))
               : given.run(params, block_absmax_cpu, HE_CUDA(block_absmax_cuda));
}

// The quantized matrices [..., rows, columns] and the scales of their blocks.
std::tuple<Tensor, Tensor> block_quantize(In weight) {
  const Arguments given(kQuantize, "weight", weight);
  QuantizeMatricesParams p{};
  p.dtype = given.dtype("weight", weight.scalar_type());
  p.weight = given.data("weight", weight, kFloats, Shape::any());
  const Sizes shape = weight.sizes();
  given.expect(shape.size() >= 2, "weight has ", shape.size(), " dimensions; expected at least 2");
  std::vector<int64_t> grid(shape.begin(), shape.end());
  p.rows = grid.end()[-2];
  p.columns = grid.end()[-1];
  p.matrices = std::accumulate(grid.begin(), grid.end() - 2, int64_t{1}, std::multiplies<>());
  for (auto size = grid.end() - 2; size != grid.end(); ++size)
    *size = (*size + kQuantizeBlock - 1) / kQuantizeBlock;
  Tensor quantized = given.make(p.quantized, shape, kFloat8_e4m3fn);
  Tensor scale = given.make(p.scale, grid);
  if (weight.numel()) {
    given.number("the number of blocks", num_blocks(p), 0, INT32_MAX);
    given.run(p, quantize_matrices_cpu, HE_CUDA(quantize_matrices_cuda));
  }
  return {std::move(quantized), std::move(scale)};
}

void CopyTable::upload_tables(const Arguments& given, const std::vector<void*>& addresses) {
  const Device& device = given.device();
  if (!device_chunks_.defined() || device_chunks_.device() != device) {
    std::vector<CopyChunk> chunks;
    for (const CopyRow& row : rows_)
      cut_row(row, [&](const CopyChunk& chunk) { chunks.push_back(chunk); });
    num_device_chunks_ = given.number("the number of chunks", std::ssize(chunks), 0, INT32_MAX);
    device_chunks_ = upload(chunks.data(), chunks.size() * sizeof(CopyChunk), device);
    uploaded_.clear();
  }
  if (uploaded_ != addresses) {
    device_addresses_ = upload(addresses.data(), addresses.size() * sizeof(void*), device);
    uploaded_ = addresses;
  }
}

}  // namespace

void register_strided_copy(py::module_& m) {
  py::class_<CopyTable>(m, "CopyTable")
      .def(py::init<const Tensor&, const std::optional<Tensor>&>(), py::arg("table"),
           py::arg("blocks") = py::none())
      .def("copy", &CopyTable::copy, py::arg("sources"), py::arg("destinations"))
      .def("absmax", &CopyTable::absmax, py::arg("sources"), py::arg("absmax"), py::arg("dtype"))
      .def("quantize", &CopyTable::quantize, py::arg("sources"), py::arg("destinations"),
           py::arg("scale"), py::arg("dtype"));
  def(m, "block_quantize", &block_quantize, "weight");
  m.def(
      "strided_copy",
      [](const Tensors& sources, const Tensors& destinations, In table) {
        CopyTable(table, std::nullopt).copy(sources, destinations);
      },
      py::arg("sources"), py::arg("destinations"), py::arg("table"));
}

}  // namespace hybridengine
