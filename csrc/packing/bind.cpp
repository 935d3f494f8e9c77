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

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // what cu_seqlens can count
constexpr ScalarType kMasks[] = {kBool, scalar_type_of<int8_t>(), kByte, kInt, kLong};

// capacity < 0: as many rows as the mask has tokens, which on a GPU waits for the device.
Layout pack_layout(In mask, int64_t capacity) {
  const Arguments given("pack", "mask", mask);
  PackLayoutParams p{};
  p.mask = given.data("mask", mask, kMasks, {&p.batch, &p.seqlen}, &p.mask_row_stride);
  p.mask_element_size = static_cast<int>(mask.element_size());
  const Tensor counts = given.make(p.counts, {p.batch});
  const Tensor starts = given.make(p.starts, {p.batch + 1});
  if (p.batch > 0) given.run(p, pack_count_cpu, HE_CUDA(pack_count_cuda));

  int64_t max_seqlen = p.seqlen;
  if (capacity < 0 || mask.is_cpu()) {
    const Tensor host = counts.call("cpu");
    const int64_t* lengths = host.data<int64_t>();
    int64_t total = 0, longest = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      total += lengths[b];
      longest = std::max(longest, lengths[b]);
    }
    given.expect(capacity < 0 || total <= capacity, "the mask has ", total,
                 " tokens, but capacity is ", capacity, "; give a larger capacity");
    if (capacity < 0) {
      capacity = total;
      max_seqlen = longest;
    }
  }
  given.expect(capacity <= kMaxTokens, capacity,
               " tokens do not fit cu_seqlens, which is int32; pack fewer sequences at once");
  p.capacity = capacity;
  Tensor cu_seqlens = given.make(p.cu_seqlens, {p.batch + 1});
  Tensor position_ids = given.make(p.position_ids, {capacity});
  Tensor indices = given.make(p.indices, {capacity});
  Tensor inverse = given.make(p.inverse, {p.batch * p.seqlen});
  Tensor num_dropped = given.make(p.num_dropped, {});
  if (p.batch > 0) {
    given.run(p, pack_layout_cpu, HE_CUDA(pack_layout_cuda));
  } else {
    for (const Tensor* result : {&cu_seqlens, &num_dropped, &position_ids}) result->call("zero_");
    indices.call("fill_", -1);
  }
  return {cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen};
}

bool rows_are_contiguous(In tensor, int64_t leading) {
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

// Moves the rows of all sources, kMaxRowTensors per launch; sources share their leading dimensions.
std::vector<Tensor> move_rows(const std::vector<Tensor>& sources, In index, OptionalIn position_ids,
                              int64_t leading, const std::vector<int64_t>& out_shape,
                              const std::vector<double>& fills,
                              const std::vector<int64_t>& shifts) {
  std::vector<Tensor> results;
  if (sources.empty()) return results;
  const Arguments given("move_rows", "tensors[0]", sources[0]);
  const Sizes first = sources[0].sizes();
  int64_t bad_index = -1, rows = 1;
  MoveRowsParams p{};
  p.index = given.data<int64_t>("index", index, {&p.rows});
  p.position_ids = given.data<int64_t>("position_ids", position_ids, {p.rows});
  p.bad_index = &bad_index;
  given.number("leading", leading, 1, std::min<int64_t>(2, first.size()));
  p.source_inner = std::max<int64_t>(1, first[leading - 1]);
  p.source_rows = leading == 2 ? first[0] * first[1] : first[0];
  given.expect(fills.size() == sources.size() && shifts.size() == sources.size(), fills.size(),
               " fills and ", shifts.size(), " shifts for ", sources.size(),
               " tensors; expected one each");
  bool fits = true;
  for (const int64_t size : out_shape)
    fits = fits && size >= 0 && !__builtin_mul_overflow(rows, size, &rows);
  given.expect(fits && rows == p.rows, "out_shape is ", Sizes(out_shape), "; expected ", p.rows,
               " rows, as in index");
  std::vector<Tensor> contiguous;
  for (int64_t i = 0; i < std::ssize(sources); ++i) {
    const Name name("tensors", i);
    given.same_device(name, sources[i]);
    given.expect(
        sources[i].dim() >= leading && sources[i].sizes().first(leading) == first.first(leading),
        name, " has shape ", sources[i].sizes(), ", tensors[0] ", first,
        "; expected the same leading dimensions");
    given.number({"shifts", i}, shifts[i], 0, position_ids ? 1 : 0);
    const int64_t bytes = sources[i].element_size();
    given.expect(bytes <= 8, name, " has dtype ", sources[i].scalar_type(),
                 ", which is not supported; view it as a real type");
    const Tensor source =
        rows_are_contiguous(sources[i], leading) ? sources[i] : sources[i].call("contiguous");
    contiguous.push_back(source);
    std::vector<int64_t> shape(out_shape);
    shape.insert(shape.end(), source.sizes().begin() + leading, source.sizes().end());
    RowTensor& row = p.tensors[p.num_tensors];
    results.push_back(given.make(row.destination, shape, source.scalar_type()));
    row.row_bytes = bytes;
    for (int64_t dim = leading; dim < source.dim(); ++dim) row.row_bytes *= source.size(dim);
    row.source = static_cast<const char*>(source.data());
    row.outer_stride = leading == 2 ? source.stride(0) * bytes : 0;
    row.inner_stride = source.stride(leading - 1) * bytes;
    row.fill = fill_bits(fills[i], source.scalar_type());
    row.element_size = static_cast<int>(bytes);
    row.shift = static_cast<int>(shifts[i]);
    if (row.row_bytes > 0) ++p.num_tensors;
    if (p.num_tensors == kMaxRowTensors || i + 1 == std::ssize(sources)) {
      if (p.rows && p.num_tensors) given.run(p, move_rows_cpu, HE_CUDA(move_rows_cuda));
      p.num_tensors = 0;
    }
  }
  HE_CHECK_INDEX(bad_index == -1, "pack: index ", bad_index, " is outside the ", p.source_rows,
                 " rows there are");
  return results;
}

using ForestTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// (input_ids, position_ids, subtree_ends, cu_seqlens of the trees, token_index)
ForestTensors pack_forest(In tokens, In ends) {
  const Arguments given("pack_forest", "tokens", tokens);
  given.on_cpu();
  int64_t num_tokens, num_ends;
  const int64_t* token = given.data<int64_t>("tokens", tokens, {&num_tokens});
  const int64_t* end = given.data<int64_t>("ends", ends, {&num_ends});
  given.expect(num_ends > 0 && end[0] == 0 && std::is_sorted(end, end + num_ends) &&
                   end[num_ends - 1] == num_tokens,
               "ends must start at 0, not decrease and end at ", num_tokens);
  std::optional<Forest> forest;
  without_gil([&] { forest.emplace(token, end, num_ends - 1); });
  const std::vector<int64_t>& starts = forest->tree_starts();
  const int64_t total = forest->num_tokens();
  given.expect(total <= kMaxTokens, total,
               " tokens do not fit subtree_ends, which is int32; pack fewer sequences at once");
  int64_t *input_id, *position_id, *index;
  int32_t *subtree_end, *tree_end;
  Tensor input_ids = given.make(input_id, {total});
  Tensor position_ids = given.make(position_id, {total});
  Tensor subtree_ends = given.make(subtree_end, {total});
  Tensor token_index = given.make(index, {num_tokens});
  Tensor cu_seqlens = given.make(tree_end, {std::ssize(starts) + 1});
  *std::copy(starts.begin(), starts.end(), tree_end) = static_cast<int32_t>(total);
  without_gil([&] {
    forest->write_tokens(input_id, position_id, subtree_end);
    forest->write_index(index);
  });
  return {input_ids, position_ids, subtree_ends, cu_seqlens, token_index};
}

}  // namespace

void register_packing(py::module_& m) {
  def(m, "pack_layout", &pack_layout, "mask capacity");
  def(m, "pack_forest", &pack_forest, "tokens ends");
  def(m, "move_rows", &move_rows, "sources index position_ids leading out_shape fills shifts");
}

}  // namespace hybridengine
