#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "common/binding.h"
#include "common/memory_pool.h"
#include "packing/forest.h"
#include "packing/params.h"

namespace hybridengine {

namespace {

using Layout = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t>;

void count(const PackLayoutParams& params, const at::Device& device) {
  if (params.batch == 0) return;
  if (device.is_cpu()) {
    py::gil_scoped_release no_gil;
    return pack_count_cpu(params);
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) return check_cuda(pack_count_cuda(params, current_stream(device)), "pack");
#endif
  no_kernel_for(device, "pack");
}

void layout(const PackLayoutParams& params, const at::Device& device) {
  if (params.batch == 0) return;
  if (device.is_cpu()) {
    py::gil_scoped_release no_gil;
    return pack_layout_cpu(params);
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  check_cuda(pack_layout_cuda(params, current_stream(device)), "pack");
#endif
}

// capacity < 0: as many rows as the mask has tokens, which on a GPU waits for the device.
Layout pack_layout(const at::Tensor& mask, int64_t capacity) {
  const int64_t bytes = mask.element_size();
  TORCH_CHECK_VALUE(mask.dim() == 2 && at::isIntegralType(mask.scalar_type(), true) &&
                        (bytes == 1 || bytes == 4 || bytes == 8) &&
                        (mask.size(1) <= 1 || mask.stride(1) == 1),
                    "pack: mask has shape ", mask.sizes(), " and dtype ", mask.scalar_type(),
                    "; expected [B, L] of bool, int8, uint8, int32 or int64 with contiguous rows");
  const at::Device device = mask.device();
  const c10::DeviceGuard guard(device);
  const auto longs = at::TensorOptions(at::kLong).device(device);
  const int64_t batch = mask.size(0);
  at::Tensor counts = at::empty({batch}, longs), starts = at::empty({batch + 1}, longs);
  PackLayoutParams params{};
  params.mask = mask.const_data_ptr();
  params.mask_element_size = static_cast<int>(bytes);
  params.mask_row_stride = mask.stride(0);
  params.batch = batch;
  params.seqlen = mask.size(1);
  params.counts = counts.mutable_data_ptr<int64_t>();
  params.starts = starts.mutable_data_ptr<int64_t>();
  params.num_threads = at::get_num_threads();
  count(params, device);

  int64_t max_seqlen = params.seqlen;
  if (capacity < 0 || device.is_cpu()) {
    const at::Tensor host = counts.cpu();
    const int64_t* lengths = host.const_data_ptr<int64_t>();
    int64_t total = 0, longest = 0;
    for (int64_t b = 0; b < batch; ++b) {
      total += lengths[b];
      longest = std::max(longest, lengths[b]);
    }
    TORCH_CHECK_VALUE(capacity < 0 || total <= capacity, "pack: the mask has ", total,
                      " tokens, but capacity is ", capacity, "; give a larger capacity");
    if (capacity < 0) {
      capacity = total;
      max_seqlen = longest;
    }
  }
  TORCH_CHECK_VALUE(capacity <= std::numeric_limits<int32_t>::max(), "pack: ", capacity,
                    " tokens do not fit cu_seqlens, which is int32; pack fewer sequences at once");

  at::Tensor cu_seqlens = at::empty({batch + 1}, longs.dtype(at::kInt));
  at::Tensor position_ids = at::empty({capacity}, longs), indices = at::empty({capacity}, longs);
  at::Tensor inverse = at::empty({batch * params.seqlen}, longs);
  at::Tensor num_dropped = at::empty({}, longs);
  if (batch == 0) {  // no kernel runs
    cu_seqlens.zero_();
    num_dropped.zero_();
    position_ids.zero_();
    indices.fill_(-1);
  }
  params.capacity = capacity;
  params.cu_seqlens = cu_seqlens.mutable_data_ptr<int32_t>();
  params.position_ids = position_ids.mutable_data_ptr<int64_t>();
  params.indices = indices.mutable_data_ptr<int64_t>();
  params.inverse = inverse.mutable_data_ptr<int64_t>();
  params.num_dropped = num_dropped.mutable_data_ptr<int64_t>();
  layout(params, device);
  return {cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen};
}

bool rows_are_contiguous(const at::Tensor& tensor, int64_t leading) {
  int64_t expected = 1;
  for (int64_t dim = tensor.dim() - 1; dim >= leading; --dim) {
    if (tensor.size(dim) != 1 && tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

uint64_t fill_bits(double fill, at::ScalarType dtype) {
  uint64_t bits = 0;
  if (fill == 0) return bits;
  const at::Tensor value = at::full({}, fill, at::TensorOptions(dtype));
  std::memcpy(&bits, value.const_data_ptr(), value.element_size());
  return bits;
}

void move(const MoveRowsParams& params, const at::Device& device) {
  if (params.rows == 0 || params.num_tensors == 0) return;
  if (device.is_cpu()) {
    py::gil_scoped_release no_gil;
    return move_rows_cpu(params);
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda())
    return check_cuda(move_rows_cuda(params, current_stream(device)), "move_rows");
#endif
  no_kernel_for(device, "move_rows");
}

void check_rows(const std::vector<at::Tensor>& sources, const at::Tensor& index,
                const std::optional<at::Tensor>& position_ids, int64_t leading,
                const std::vector<int64_t>& out_shape, size_t num_fills,
                const std::vector<int64_t>& shifts) {
  TORCH_CHECK_VALUE(leading == 1 || leading == 2, "move_rows: leading is ", leading,
                    "; expected 1 or 2");
  TORCH_CHECK_VALUE(num_fills == sources.size() && shifts.size() == sources.size(),
                    "move_rows: ", num_fills, " fills and ", shifts.size(), " shifts for ",
                    sources.size(), " tensors; expected one each");
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& source = sources[i];
    TORCH_CHECK_VALUE(source.device() == sources[0].device(), "move_rows: tensors[", i, "] is on ",
                      source.device(), ", tensors[0] on ", sources[0].device(),
                      "; move them to one device");
    TORCH_CHECK_VALUE(source.dim() >= leading && sources[0].dim() >= leading &&
                          source.sizes().slice(0, leading) == sources[0].sizes().slice(0, leading),
                      "move_rows: tensors[", i, "] has shape ", source.sizes(), ", tensors[0] ",
                      sources[0].sizes(), "; expected the same leading dimensions");
    TORCH_CHECK_VALUE(shifts[i] == 0 || (shifts[i] == 1 && position_ids), "move_rows: shifts[", i,
                      "] is ", shifts[i], "; expected 0, or 1 with position_ids");
  }
  int64_t rows = 1;
  bool fits = true;
  for (const int64_t size : out_shape)
    fits = fits && size >= 0 && !__builtin_mul_overflow(rows, size, &rows);
  TORCH_CHECK_VALUE(fits && rows == index.numel(), "move_rows: out_shape is ",
                    at::IntArrayRef(out_shape), ", which has ", rows, " rows; expected ",
                    index.numel(), " as in index");
}

// Moves the rows of all sources, kMaxRowTensors per launch; sources share their leading dimensions.
std::vector<at::Tensor> move_rows(const std::vector<at::Tensor>& sources, const at::Tensor& index,
                                  const std::optional<at::Tensor>& position_ids, int64_t leading,
                                  const std::vector<int64_t>& out_shape,
                                  const std::vector<double>& fills,
                                  const std::vector<int64_t>& shifts) {
  std::vector<at::Tensor> results;
  if (sources.empty()) return results;
  const at::Device device = sources[0].device();
  check_same_device("move_rows",
                    {{"tensors[0]", sources[0]}, {"index", index}, {"position_ids", position_ids}});
  check_vector(index, "index", at::kLong, index.numel());
  if (position_ids) check_vector(*position_ids, "position_ids", at::kLong, index.numel());
  check_rows(sources, index, position_ids, leading, out_shape, fills.size(), shifts);
  const c10::DeviceGuard guard(device);
  int64_t bad_index = -1;
  MoveRowsParams params{};
  params.rows = index.numel();
  params.source_inner = std::max<int64_t>(1, sources[0].size(leading - 1));
  params.source_rows = leading == 2 ? sources[0].size(0) * sources[0].size(1) : sources[0].size(0);
  params.index = index.const_data_ptr<int64_t>();
  params.position_ids = position_ids ? position_ids->const_data_ptr<int64_t>() : nullptr;
  params.bad_index = &bad_index;
  params.num_threads = at::get_num_threads();
  std::vector<at::Tensor> contiguous;
  for (size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor source =
        rows_are_contiguous(sources[i], leading) ? sources[i] : sources[i].contiguous();
    contiguous.push_back(source);
    std::vector<int64_t> shape(out_shape);
    shape.insert(shape.end(), source.sizes().begin() + leading, source.sizes().end());
    results.push_back(empty_from_pool(shape, source.options()));
    const int64_t bytes = source.element_size();
    TORCH_CHECK_VALUE(bytes <= 8, "pack: tensors[", i, "] has dtype ", source.scalar_type(),
                      ", which is not supported; view it as a real type");
    RowTensor& row = params.tensors[params.num_tensors];
    row.row_bytes = bytes;
    for (int64_t dim = leading; dim < source.dim(); ++dim) row.row_bytes *= source.size(dim);
    row.source = static_cast<const char*>(source.const_data_ptr());
    row.destination = static_cast<char*>(results[i].mutable_data_ptr());
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
  TORCH_CHECK_INDEX(bad_index == -1, "pack: index ", bad_index, " is outside the ",
                    params.source_rows, " rows there are");
  return results;
}

using ForestTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// (input_ids, position_ids, subtree_ends, cu_seqlens of the trees, token_index)
ForestTensors pack_forest(const at::Tensor& tokens, const at::Tensor& ends) {
  TORCH_CHECK_VALUE(tokens.device().is_cpu() && ends.device().is_cpu(),
                    "pack_forest: tokens is on ", tokens.device(), ", ends on ", ends.device(),
                    "; expected the CPU");
  check_vector(tokens, "pack_forest: tokens", at::kLong, tokens.numel());
  check_vector(ends, "pack_forest: ends", at::kLong, std::max<int64_t>(1, ends.numel()));
  const int64_t* end = ends.const_data_ptr<int64_t>();
  const int64_t num_sequences = ends.numel() - 1;
  TORCH_CHECK_VALUE(end[0] == 0 && std::is_sorted(end, end + ends.numel()) &&
                        end[num_sequences] == tokens.numel(),
                    "pack_forest: ends must start at 0, not decrease and end at ", tokens.numel());
  py::gil_scoped_release no_gil;
  const Forest forest(tokens.const_data_ptr<int64_t>(), end, num_sequences);
  const int64_t total = forest.num_tokens();
  TORCH_CHECK_VALUE(
      total <= std::numeric_limits<int32_t>::max(), "pack_forest: ", total,
      " tokens do not fit subtree_ends, which is int32; pack fewer sequences at once");
  const auto longs = at::TensorOptions(at::kLong), ints = at::TensorOptions(at::kInt);
  at::Tensor input_ids = at::empty({total}, longs), position_ids = at::empty({total}, longs);
  at::Tensor subtree_ends = at::empty({total}, ints), token_index = at::empty_like(tokens);
  const std::vector<int64_t>& starts = forest.tree_starts();
  at::Tensor cu_seqlens = at::empty({static_cast<int64_t>(starts.size()) + 1}, ints);
  int32_t* tree_end = cu_seqlens.mutable_data_ptr<int32_t>();
  *std::copy(starts.begin(), starts.end(), tree_end) = static_cast<int32_t>(total);
  forest.write_tokens(input_ids.mutable_data_ptr<int64_t>(),
                      position_ids.mutable_data_ptr<int64_t>(),
                      subtree_ends.mutable_data_ptr<int32_t>());
  forest.write_index(token_index.mutable_data_ptr<int64_t>());
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
