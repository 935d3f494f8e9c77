// hybridengine._C: one registration per domain, nothing else.

#include <pybind11/stl.h>

#include "common/graph.h"
#include "common/isa.h"
#include "common/tensor.h"

namespace hybridengine {

void register_advantage(pybind11::module_& m);
void register_attention(pybind11::module_& m);
void register_balance(pybind11::module_& m);
void register_causal_conv1d(pybind11::module_& m);
void register_changes(pybind11::module_& m);
void register_checksum(pybind11::module_& m);
void register_decode_linear(pybind11::module_& m);
void register_delta(pybind11::module_& m);
void register_distillation(pybind11::module_& m);
void register_grouped_linear(pybind11::module_& m);
void register_layer(pybind11::module_& m);
void register_linear_recurrence(pybind11::module_& m);
void register_logprob(pybind11::module_& m);
void register_mixed_gemm(pybind11::module_& m);
void register_packing(pybind11::module_& m);
void register_paged_attention(pybind11::module_& m);
void register_policy_loss(pybind11::module_& m);
void register_sampling(pybind11::module_& m);
void register_sparse_linear(pybind11::module_& m);
void register_strided_copy(pybind11::module_& m);

namespace {

void register_graph(pybind11::module_& m) {
  pybind11::class_<Graph>(m, "Graph")
      .def(pybind11::init<int64_t>(), pybind11::arg("rows"))
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("refuse", &Graph::refuse, pybind11::arg("reason"))
      .def("replay", &Graph::replay, pybind11::arg("rows"))
      .def_property_readonly("rows", &Graph::rows)
      .def_property_readonly("num_calls", &Graph::num_calls)
      .def_property_readonly("bytes", [](const Graph& graph) { return graph.memory()->bytes(); });
}

}  // namespace

}  // namespace hybridengine

PYBIND11_MODULE(_C, m) {
  using namespace hybridengine;
  require_torch();
  constexpr const char* isa_names[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  m.attr("cpu_isa") = isa_names[static_cast<int>(cpu_isa())];
#ifdef HYBRIDENGINE_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  register_advantage(m);
  register_attention(m);
  register_balance(m);
  register_causal_conv1d(m);
  register_changes(m);
  register_checksum(m);
  register_decode_linear(m);
  register_delta(m);
  register_distillation(m);
  register_graph(m);
  register_grouped_linear(m);
  register_layer(m);
  register_linear_recurrence(m);
  register_logprob(m);
  m.def(
      "empty_from_pool",
      [](const std::vector<int64_t>& shape, ScalarType dtype) { return empty(shape, dtype); },
      py::arg("shape"), py::arg("dtype"));
  register_mixed_gemm(m);
  register_packing(m);
  register_paged_attention(m);
  register_policy_loss(m);
  register_sampling(m);
  register_sparse_linear(m);
  register_strided_copy(m);
}
