
#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "common/binding.h"
#include "packing/forest.h"
#include "packing/params.h"

namespace hybridengine {

namespace {

using Layout = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, int64_t>;

void count(const PackLayoutParams& params, const Device& device) {
  if (params.batch == 0) return;
  if (device.is_cpu()) {
    return without_gil([&] { pack_count_cpu(params); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) return check_cuda(pack_count_cuda(params, current_stream(device)), "pack");
#endif
  no_kernel_for(device, "pack");
}

void layout(const PackLayoutParams& params, const Device& device) {
  if (params.batch == 0) return;
  if (device.is_cpu()) {
    return without_gil([&] { pack_layout_cpu(params); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  check_cuda(pack_layout_cuda(params, current_stream(device)), "pack");
#endif
}

bool holds_integers(const ScalarType& type) {
  return type.code == dlpack::kInt || type.code == dlpack::kUInt || type == kBool;
}

// capacity < 0: as many rows as the mask has tokens, which on a GPU waits for the device.
Layout pack_layout(const Tensor& mask, int64_t capacity) {
  const int64_t bytes = mask.element_size();
  HE_CHECK_VALUE(mask.dim() == 2 && holds_integers(mask.scalar_type()) &&
                     (bytes == 1 || bytes == 4 || bytes == 8) && mask.has_unit_inner_stride(),
                 "pack: mask has shape ", mask.sizes(), " and dtype ", mask.scalar_type(),
                 "; expected [B, L] of bool, int8, uint8, int32 or int64 with contiguous rows");
  const Device device = mask.device();
  const DeviceGuard guard(device);
  const int64_t batch = mask.size(0);
  Tensor counts = empty({batch}, kLong, device), starts = empty({batch + 1}, kLong, device);
  PackLayoutParams params{};
  params.mask = mask.data();
  params.mask_element_size = static_cast<int>(bytes);
  params.mask_row_stride = mask.stride(0);
  params.batch = batch;
  params.seqlen = mask.size(1);
  params.counts = counts.data<int64_t>();
  params.starts = starts.data<int64_t>();
  params.num_threads = get_num_threads();
  count(params, device);

  int64_t max_seqlen = params.seqlen;
  if (capacity < 0 || device.is_cpu()) {
    const Tensor host = counts.call("cpu");
    const int64_t* lengths = host.data<int64_t>();
    int64_t total = 0, longest = 0;
    for (int64_t b = 0; b < batch; ++b) {
      total += lengths[b];
      longest = std::max(longest, lengths[b]);
    }
    HE_CHECK_VALUE(capacity < 0 || total <= capacity, "pack: the mask has ", total,
                   " tokens, but capacity is ", capacity, "; give a larger capacity");
    if (capacity < 0) {
      capacity = total;
      max_seqlen = longest;
    }
  }
  HE_CHECK_VALUE(capacity <= std::numeric_limits<int32_t>::max(), "pack: ", capacity,
                 " tokens do not fit cu_seqlens, which is int32; pack fewer sequences at once");

  Tensor cu_seqlens = empty({batch + 1}, kInt, device);
  Tensor position_ids = empty({capacity}, kLong, device);
  Tensor indices = empty({capacity}, kLong, device);
  Tensor inverse = empty({batch * params.seqlen}, kLong, device);
  Tensor num_dropped = empty({}, kLong, device);
  if (batch == 0) {  // no kernel runs
    for (const Tensor* result : {&cu_seqlens, &num_dropped, &position_ids}) result->call("zero_");
    indices.call("fill_", -1);
  }
  params.capacity = capacity;
  params.cu_seqlens = cu_seqlens.data<int32_t>();
  params.position_ids = position_ids.data<int64_t>();
  params.indices = indices.data<int64_t>();
  params.inverse = inverse.data<int64_t>();
  params.num_dropped = num_dropped.data<int64_t>();
  layout(params, device);
  return {cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen};
}

bool rows_are_contiguous(const Tensor& tensor, int64_t leading) {
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= leading; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

uint64_t fill_bits(double fill, ScalarType dtype) {
  uint64_t bits = 0;
  if (fill == 0) return bits;
  const Tensor value = empty({}, dtype).call("fill_", fill);
  std::memcpy(&bits, value.data(), value.element_size());
  return bits;
}

void move(const MoveRowsParams& params, const Device& device) {
  if (params.rows == 0 || params.num_tensors == 0) return;
  if (device.is_cpu()) {
    return without_gil([&] { move_rows_cpu(params); });
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda())
    return check_cuda(move_rows_cuda(params, current_stream(device)), "move_rows");
#endif
  no_kernel_for(device, "move_rows");
}

void check_rows(const std::vector<Tensor>& sources, const Tensor& index,
                const std::optional<Tensor>& position_ids, int64_t leading,
                const std::vector<int64_t>& out_shape, size_t num_fills,
                const std::vector<int64_t>& shifts) {
  HE_CHECK_VALUE(leading == 1 || leading == 2, "move_rows: leading is ", leading,
                 "; expected 1 or 2");
  HE_CHECK_VALUE(num_fills == sources.size() && shifts.size() == sources.size(),
                 "move_rows: ", num_fills, " fills and ", shifts.size(), " shifts for ",
                 sources.size(), " tensors; expected one each");
  for (size_t i = 0; i < sources.size(); ++i) {
    const Tensor& source = sources[i];
    HE_CHECK_VALUE(source.device() == sources[0].device(), "move_rows: tensors[", i, "] is on ",
                   source.device(), ", tensors[0] on ", sources[0].device(),
                   "; move them to one device");
    HE_CHECK_VALUE(source.dim() >= leading && sources[0].dim() >= leading &&
                       source.sizes().first(leading) == sources[0].sizes().first(leading),
                   "move_rows: tensors[", i, "] has shape ", source.sizes(), ", tensors[0] ",
                   sources[0].sizes(), "; expected the same leading dimensions");
    HE_CHECK_VALUE(shifts[i] == 0 || (shifts[i] == 1 && position_ids), "move_rows: shifts[", i,
                   "] is ", shifts[i], "; expected 0, or 1 with position_ids");
  }
  int64_t rows = 1;
  bool fits = true;
  for (const int64_t size : out_shape)
    fits = fits && size >= 0 && !__builtin_mul_overflow(rows, size, &rows);
  HE_CHECK_VALUE(fits && rows == index.numel(), "move_rows: out_shape is ", Sizes(out_shape),
                 ", which has ", rows, " rows; expected ", index.numel(), " as in index");
}

// Moves the rows of all sources, kMaxRowTensors per launch; sources share their leading dimensions.
std::vector<Tensor> move_rows(const std::vector<Tensor>& sources, const Tensor& index,
                              const std::optional<Tensor>& position_ids, int64_t leading,
                              const std::vector<int64_t>& out_shape,
                              const std::vector<double>& fills,
                              const std::vector<int64_t>& shifts) {
  std::vector<Tensor> results;
  if (sources.empty()) return results;
  const Device device = sources[0].device();
  check_same_device("move_rows",
                    {{"tensors[0]", sources[0]}, {"index", index}, {"position_ids", position_ids}});
  check_vector(index, "index", kLong, index.numel());
  if (position_ids) check_vector(*position_ids, "position_ids", kLong, index.numel());
  check_rows(sources, index, position_ids, leading, out_shape, fills.size(), shifts);
  const DeviceGuard guard(device);
  int64_t bad_index = -1;
  MoveRowsParams params{};
  params.rows = index.numel();
  params.source_inner = std::max<int64_t>(1, sources[0].size(leading - 1));
  params.source_rows = leading == 2 ? sources[0].size(0) * sources[0].size(1) : sources[0].size(0);
  params.index = index.data<int64_t>();
  params.position_ids = position_ids ? position_ids->data<int64_t>() : nullptr;
  params.bad_index = &bad_index;
  params.num_threads = get_num_threads();
  std::vector<Tensor> contiguous;
  for (size_t i = 0; i < sources.size(); ++i) {
    const Tensor source =
        rows_are_contiguous(sources[i], leading) ? sources[i] : sources[i].call("contiguous");
    contiguous.push_back(source);
    std::vector<int64_t> shape(out_shape);
    shape.insert(shape.end(), source.sizes().begin() + leading, source.sizes().end());
    results.push_back(empty(shape, source.scalar_type(), device));
    const int64_t bytes = source.element_size();
    HE_CHECK_VALUE(bytes <= 8, "pack: tensors[", i, "] has dtype ", source.scalar_type(),
                   ", which is not supported; view it as a real type");
    RowTensor& row = params.tensors[params.num_tensors];
    row.row_bytes = bytes;
    for (int64_t dim = leading; dim < source.dim(); ++dim) row.row_bytes *= source.size(dim);
    row.source = static_cast<const char*>(source.data());
    row.destination = static_cast<char*>(results[i].data());
    row.outer_stride = leading == 2 ? source.stride(0) * bytes : 0;
    row.inner_stride = source.stride(leading - 1) * bytes;
    row.fill = fill_bits(fills[i], source.scalar_type());
    row.element_size = static_cast<int>(bytes);
    row.shift = static_cast<int>(shifts[i]);
    if (row.row_bytes > 0) ++params.num_tensors;
    if (params.num_tensors == kMaxRowTensors || i + 1 == sources.size()) {
      move(params, device);
      params.num_tensors = 0;
    }
  }
  HE_CHECK_INDEX(bad_index == -1, "pack: index ", bad_index, " is outside the ", params.source_rows,
                 " rows there are");
  return results;
}

using ForestTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// (input_ids, position_ids, subtree_ends, cu_seqlens of the trees, token_index)
ForestTensors pack_forest(const Tensor& tokens, const Tensor& ends) {
  HE_CHECK_VALUE(tokens.device().is_cpu() && ends.device().is_cpu(), "pack_forest: tokens is on ",
                 tokens.device(), ", ends on ", ends.device(), "; expected the CPU");
  check_vector(tokens, "pack_forest: tokens", kLong, tokens.numel());
  check_vector(ends, "pack_forest: ends", kLong, std::max<int64_t>(1, ends.numel()));
  const int64_t* end = ends.data<int64_t>();
  const int64_t num_sequences = ends.numel() - 1;
  HE_CHECK_VALUE(end[0] == 0 && std::is_sorted(end, end + ends.numel()) &&
                     end[num_sequences] == tokens.numel(),
                 "pack_forest: ends must start at 0, not decrease and end at ", tokens.numel());
  std::optional<Forest> forest;
  without_gil([&] { forest.emplace(tokens.data<int64_t>(), end, num_sequences); });
  const int64_t total = forest->num_tokens();
  HE_CHECK_VALUE(total <= std::numeric_limits<int32_t>::max(), "pack_forest: ", total,
                 " tokens do not fit subtree_ends, which is int32; pack fewer sequences at once");
  Tensor input_ids = empty({total}, kLong), position_ids = empty({total}, kLong);
  Tensor subtree_ends = empty({total}, kInt), token_index = empty_like(tokens);
  const std::vector<int64_t>& starts = forest->tree_starts();
  Tensor cu_seqlens = empty({static_cast<int64_t>(starts.size()) + 1}, kInt);
  int32_t* tree_end = cu_seqlens.data<int32_t>();
  *std::copy(starts.begin(), starts.end(), tree_end) = static_cast<int32_t>(total);
  without_gil([&] {
    forest->write_tokens(input_ids.data<int64_t>(), position_ids.data<int64_t>(),
                         subtree_ends.data<int32_t>());
    forest->write_index(token_index.data<int64_t>());
  });
  return {input_ids, position_ids, subtree_ends, cu_seqlens, token_index};
}

}  // namespace

void register_packing(py::module_& m) {
  m.def("pack_layout", &pack_layout, py::arg("mask"), py::arg("capacity"));
  m.def("pack_forest", &pack_forest, py::arg("tokens"), py::arg("ends"));
  m.def("move_rows", &move_rows, py::arg("sources"), py::arg("index"), py::arg("position_ids"),
        py::arg("leading"), py::arg("out_shape"), py::arg("fills"), py::arg("shifts"));
}

}  // namespace hybridengine
