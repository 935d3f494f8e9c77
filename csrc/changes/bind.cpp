#include <tuple>
#include <vector>

#include "changes/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

using Tensors = std::vector<Tensor>;

constexpr int64_t kMaxNarrow = int64_t{1} << 31;  // elements that int32 can index
constexpr int64_t kMaxTensorElements = int64_t{1} << 60;

Arguments arguments_of(const Tensors& masks) {
  return masks.empty() ? Arguments("take_changed")
                       : Arguments("take_changed", "masks[0]", masks[0]);
}

// The table of masks and, unless they are counted only, sources; `p` is set up for it.
std::vector<ChangedTensor> table_of(const Arguments& given, const Tensors& masks,
                                    const std::vector<int64_t>& numels, ChangesParams& p) {
  given.expect(masks.size() == numels.size(), "there are ", masks.size(), " masks and ",
               numels.size(), " sources; expected one each");
  std::vector<ChangedTensor> tensors;
  for (int64_t i = 0; i < std::ssize(masks); ++i) {
    const int64_t numel = given.number({"numels", i}, numels[i], 0, kMaxTensorElements);
    auto* mask = given.data<int32_t>({"masks", i}, masks[i], {num_mask_words(numel)});
    tensors.push_back({reinterpret_cast<uint32_t*>(mask), nullptr, numel, p.num_chunks});
    p.num_chunks += num_chunks_of(numel);
  }
  p.tensors = tensors.data();
  p.num_tensors = std::ssize(tensors);
  return tensors;
}

// The number of changed elements of every chunk: int32 [num_chunks].
Tensor count_changed(const Tensors& masks, const std::vector<int64_t>& numels) {
  const Arguments given = arguments_of(masks);
  ChangesParams p{};
  const std::vector<ChangedTensor> tensors = table_of(given, masks, numels, p);
  Tensor counts = given.make(p.counts, {p.num_chunks});
  if (p.num_chunks) given.run(p, count_changed_cpu, HE_CUDA(count_changed_cuda));
  return counts;
}

// ends: int64 [num_chunks], the inclusive sums of count_changed; num_changed: the last one. On CUDA
// they are not checked: reading them would synchronize.
std::tuple<Tensor, Tensor> take_changed(const Tensors& masks, const Tensors& sources, In ends,
                                        int64_t num_changed) {
  const Arguments given = arguments_of(masks);
  std::vector<int64_t> numels;
  for (const Tensor& source : sources) numels.push_back(source.numel());
  ChangesParams p{};
  std::vector<ChangedTensor> tensors = table_of(given, masks, numels, p);
  p.ends = given.data<int64_t>("ends", ends, {p.num_chunks});
  if (given.device().is_cpu()) {
    int64_t last = 0;
    for (int64_t i = 0; i < p.num_chunks; last = p.ends[i++])
      given.expect(p.ends[i] >= last, Name("ends", i), " is ", p.ends[i],
                   ", less than what comes before it; expected sums of counts");
    given.expect(last == num_changed, "num_changed is ", num_changed, ", but ends goes to ", last);
  }
  const ScalarType dtype = sources.empty() ? kBFloat16 : sources[0].scalar_type();
  given.dtype("sources[0]", dtype, kShortFloats);
  for (int64_t i = 0; i < std::ssize(sources); ++i) {
    tensors[i].source =
        static_cast<const uint16_t*>(given.data({"sources", i}, sources[i], dtype, Shape::any()));
    p.wide_indices |= tensors[i].numel > kMaxNarrow;
  }
  Tensor indices = given.make(p.indices, {num_changed}, p.wide_indices ? kLong : kInt);
  Tensor values = given.make(p.values, {num_changed}, dtype);
  int32_t disagrees = 0;
  p.disagrees = &disagrees;
  if (p.num_chunks) given.run(p, take_changed_cpu, HE_CUDA(take_changed_cuda));
  given.expect(!disagrees, "the masks do not mark as many elements as ends says; ",
               "expected ends to be the sums of count_changed");
  return {indices, values};
}

// sent becomes the cast of current; what differs is added to the mask.
void mark_changed(In current, In sent, In mask) {
  const Arguments given("mark_changed_", "current", current);
  CompareParams p{};
  p.current_dtype = given.dtype("current", current.scalar_type(), kAllFloats);
  p.sent_dtype = given.dtype("sent", sent.scalar_type(), kShortFloats);
  p.current = given.data("current", current, kAllFloats, {&p.numel});
  p.sent = given.data("sent", sent, kShortFloats, {p.numel});
  p.mask =
      reinterpret_cast<uint32_t*>(given.data<int32_t>("mask", mask, {num_mask_words(p.numel)}));
  const auto *begin = static_cast<const char*>(p.current), *written = static_cast<char*>(p.sent);
  given.expect(written + sent.nbytes() <= begin || begin + current.nbytes() <= written,
               "sent shares memory with current; expected a copy");
  if (p.numel) given.run(p, mark_changed_cpu, HE_CUDA(mark_changed_cuda));
}

}  // namespace

void register_changes(py::module_& m) {
  m.attr("tensor_chunk") = kTensorChunk;
  def(m, "mark_changed", &mark_changed, "current sent mask");
  def(m, "count_changed", &count_changed, "masks numels");
  def(m, "take_changed", &take_changed, "masks sources ends num_changed");
}

}  // namespace hybridengine
