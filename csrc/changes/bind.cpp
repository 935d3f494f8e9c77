
#include <tuple>
#include <vector>

#include "changes/params.h"
#include "common/binding.h"

namespace hybridengine {

namespace {

using Tensors = std::vector<Tensor>;

constexpr const char* kOp = "take_changed";
constexpr const char* kMark = "mark_changed_";
constexpr int64_t kMaxNarrow = int64_t{1} << 31;  // elements that int32 can index
constexpr int64_t kMaxElements = int64_t{1} << 60;

// The table of masks and, unless they are counted only, sources; `p` is set up for it.
std::vector<ChangedTensor> table_of(Tensors& masks, const std::vector<int64_t>& numels,
                                    ChangesParams& p) {
  HE_CHECK_VALUE(masks.size() == numels.size(), kOp, ": there are ", masks.size(), " masks and ",
                 numels.size(), " sources; expected one each");
  std::vector<ChangedTensor> tensors;
  for (size_t i = 0; i < masks.size(); ++i) {
    Tensor& mask = masks[i];
    HE_CHECK_VALUE(numels[i] >= 0 && numels[i] <= kMaxElements, kOp, ": numels[", i, "] is ",
                   numels[i], "; expected the number of elements of a tensor");
    const int64_t words = num_mask_words(numels[i]);
    HE_CHECK_VALUE(mask.scalar_type() == kInt && mask.numel() == words && mask.is_contiguous() &&
                       mask.device() == masks[0].device(),
                   kOp, ": masks[", i, "] has ", mask.numel(), " elements and dtype ",
                   mask.scalar_type(), " on ", mask.device(), "; expected ", words, " int32 on ",
                   masks[0].device(), ": make it with change_mask()");
    ChangedTensor tensor{};
    tensor.mask = static_cast<uint32_t*>(mask.data());
    tensor.numel = numels[i];
    tensor.first_chunk = p.num_chunks;
    tensors.push_back(tensor);
    p.num_chunks += num_chunks_of(tensor.numel);
  }
  p.tensors = tensors.data();
  p.num_tensors = static_cast<int64_t>(tensors.size());
  p.num_threads = get_num_threads();
  return tensors;
}

void run(const Device& device, const ChangesParams& p, void (*on_cpu)(const ChangesParams&),
         [[maybe_unused]] int (*on_cuda)(const ChangesParams&, void*)) {
  if (device.is_cpu()) {
    without_gil([&] { on_cpu(p); });
    return;
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (device.is_cuda()) {
    const DeviceGuard guard(device);
    check_cuda(on_cuda(p, current_stream(device)), kOp);
    return;
  }
#endif
  no_kernel_for(device, kOp);
}

#ifdef HYBRIDENGINE_WITH_CUDA
constexpr auto kCountOnCuda = &count_changed_cuda;
constexpr auto kTakeOnCuda = &take_changed_cuda;
#else
constexpr int (*kCountOnCuda)(const ChangesParams&, void*) = nullptr;
constexpr int (*kTakeOnCuda)(const ChangesParams&, void*) = nullptr;
#endif

// The number of changed elements of every chunk: int32 [num_chunks].
Tensor count_changed(Tensors masks, const std::vector<int64_t>& numels) {
  ChangesParams p{};
  const std::vector<ChangedTensor> tensors = table_of(masks, numels, p);
  const Device device = masks.empty() ? kCPU : masks[0].device();
  Tensor counts = empty({p.num_chunks}, kInt, device);
  p.counts = counts.data<int32_t>();
  if (p.num_chunks)
    run(device, p, [](const ChangesParams& q) { count_changed_cpu(q); }, kCountOnCuda);
  return counts;
}

// On CUDA the ends are not checked: reading them would synchronize.
void check_ends(const Tensor& ends, int64_t num_changed) {
  if (!ends.is_cpu()) return;
  const int64_t* end = ends.data<int64_t>();
  int64_t last = 0;
  for (int64_t i = 0; i < ends.numel(); ++i) {
    HE_CHECK_VALUE(end[i] >= last, kOp, ": ends[", i, "] is ", end[i],
                   ", less than what comes before it; expected sums of counts");
    last = end[i];
  }
  HE_CHECK_VALUE(last == num_changed, kOp, ": num_changed is ", num_changed, ", but ends goes to ",
                 last);
}

// ends: int64 [num_chunks], the inclusive sums of count_changed; num_changed: the last one.
std::tuple<Tensor, Tensor> take_changed(Tensors masks, const Tensors& sources, const Tensor& ends,
                                        int64_t num_changed) {
  std::vector<int64_t> numels;
  for (const Tensor& source : sources) numels.push_back(source.numel());
  ChangesParams p{};
  std::vector<ChangedTensor> tensors = table_of(masks, numels, p);
  const Device device = masks.empty() ? kCPU : masks[0].device();
  const ScalarType dtype = sources.empty() ? kBFloat16 : sources[0].scalar_type();
  HE_CHECK_VALUE(dtype == kBFloat16 || dtype == kHalf, kOp, ": sources[0] has dtype ", dtype,
                 "; expected bfloat16 or float16");
  check_vector(ends, "ends", kLong, p.num_chunks);
  HE_CHECK_VALUE(ends.device() == device, kOp, ": ends is on ", ends.device(), "; expected ",
                 device, ", as the masks");
  check_ends(ends, num_changed);
  for (size_t i = 0; i < sources.size(); ++i) {
    const Tensor& source = sources[i];
    HE_CHECK_VALUE(
        source.scalar_type() == dtype && source.is_contiguous() && source.device() == device, kOp,
        ": sources[", i, "] has dtype ", source.scalar_type(), " and strides ", source.strides(),
        " on ", source.device(), "; expected contiguous ", dtype, " on ", device);
    tensors[i].source = static_cast<const uint16_t*>(source.data());
    p.wide_indices |= source.numel() > kMaxNarrow;
  }
  Tensor indices = empty({num_changed}, p.wide_indices ? kLong : kInt, device);
  Tensor values = empty({num_changed}, dtype, device);
  if (sources.empty()) return {indices, values};
  p.ends = ends.data<int64_t>();
  p.indices = indices.data();
  p.values = static_cast<uint16_t*>(values.data());
  int32_t disagrees = 0;
  p.disagrees = &disagrees;
  if (p.num_chunks)
    run(device, p, [](const ChangesParams& q) { take_changed_cpu(q); }, kTakeOnCuda);
  HE_CHECK_VALUE(!disagrees, kOp,
                 ": the masks do not mark as many elements as ends says; "
                 "expected ends to be the sums of count_changed");
  return {indices, values};
}

// sent becomes the cast of current; what differs is added to the mask.
void mark_changed(const Tensor& current, const Tensor& sent, const Tensor& mask) {
  check_same_device(kMark, {{"current", current}, {"sent", sent}, {"mask", mask}});
  const ScalarType type = sent.scalar_type();
  HE_CHECK_VALUE(type == kBFloat16 || type == kHalf, kMark, ": sent has dtype ", type,
                 "; expected bfloat16 or float16");
  const int64_t numel = current.numel();
  check_vector(sent, "mark_changed_: sent", type, numel);
  check_vector(current, "mark_changed_: current", current.scalar_type(), numel);
  check_vector(mask, "mark_changed_: mask", kInt, num_mask_words(numel));
  const auto* begin = static_cast<const char*>(current.data());
  const auto* written = static_cast<const char*>(sent.data());
  HE_CHECK_VALUE(written + sent.nbytes() <= begin || begin + current.nbytes() <= written, kMark,
                 ": sent shares memory with current; expected a copy");
  CompareParams p{};
  p.current = current.data();
  p.sent = sent.data();
  p.mask = static_cast<uint32_t*>(mask.data());
  p.numel = numel;
  p.current_dtype = float_dtype(current, "mark_changed_: current");
  p.sent_dtype = float_dtype(sent, "mark_changed_: sent");
  p.num_threads = get_num_threads();
  if (sent.device().is_cpu()) {
    without_gil([&] { mark_changed_cpu(p); });
    return;
  }
#ifdef HYBRIDENGINE_WITH_CUDA
  if (sent.device().is_cuda()) {
    const DeviceGuard guard(sent.device());
    if (numel) check_cuda(mark_changed_cuda(p, current_stream(sent.device())), kMark);
    return;
  }
#endif
  no_kernel_for(sent.device(), kMark);
}

}  // namespace

void register_changes(py::module_& m) {
  m.def("mark_changed", &mark_changed, py::arg("current"), py::arg("sent"), py::arg("mask"));
  m.attr("tensor_chunk") = kTensorChunk;
  m.def("count_changed", &count_changed, py::arg("masks"), py::arg("numels"));
  m.def("take_changed", &take_changed, py::arg("masks"), py::arg("sources"), py::arg("ends"),
        py::arg("num_changed"));
}

}  // namespace hybridengine
