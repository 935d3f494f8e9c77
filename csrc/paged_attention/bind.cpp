
#include <algorithm>

#include "common/binding.h"
#include "paged_attention/params.h"

namespace hybridengine {

namespace {

// [tokens, heads, dim] of the cache's dtype.
HeadRows head_rows(const char* op, const Tensor& x, const char* name, const Tensor& cache,
                   int64_t tokens, int64_t heads, int64_t dim) {
  HE_CHECK_VALUE(x.sizes() == Sizes({tokens, heads, dim}) &&
                     x.scalar_type() == cache.scalar_type() && x.has_unit_inner_stride(),
                 op, ": ", name, " has shape ", x.sizes(), ", strides ", x.strides(), " and dtype ",
                 x.scalar_type(), "; expected [", tokens, ", ", heads, ", ", dim, "] of ",
                 cache.scalar_type(), " with inner stride 1");
  return {x.data(), x.stride(0), x.stride(1)};
}

void fill(const char* op, PagedCache& p, const Tensor& cache, int64_t dim) {
  if (!cache.device().is_cpu()) no_kernel_for(cache.device(), op);
  HE_CHECK_VALUE(cache.scalar_type() == kFloat || cache.scalar_type() == kBFloat16, op,
                 ": kv_cache has dtype ", cache.scalar_type(), "; expected float32 or bfloat16");
  HE_CHECK_VALUE(cache.dim() == 4 && cache.size(1) > 0 && cache.size(2) > 0 && dim > 0 &&
                     cache.size(2) % kCacheUnit == 0 && dim % kCacheUnit == 0 &&
                     cache.size(3) > dim && cache.size(3) % kCacheUnit == 0 &&
                     cache.stride(3) == 1 && cache.stride(2) == cache.size(3),
                 op, ": kv_cache has shape ", cache.sizes(), " and strides ", cache.strides(),
                 ", for keys of ", dim, "; expected [blocks, H_kv, block_size, D + D_v] with ",
                 "contiguous heads, block_size, D and D_v multiples of ", kCacheUnit);
  p.data = cache.data();
  p.block_stride = cache.stride(0), p.head_stride = cache.stride(1);
  p.dtype = float_dtype(cache, "kv_cache");
  p.kv_heads = cache.size(1), p.block_size = cache.size(2);
  p.dim = dim, p.value_dim = cache.size(3) - dim;
}

void write_kv_cache(const Tensor& key, const Tensor& value, const Tensor& kv_cache,
                    const Tensor& slot_mapping) {
  const char* op = "write_kv_cache";
  check_same_device(
      op, {{"kv_cache", kv_cache}, {"key", key}, {"value", value}, {"slot_mapping", slot_mapping}});
  PagedWrite p{};
  HE_CHECK_VALUE(key.dim() == 3, op, ": key has shape ", key.sizes(), "; expected [T, H_kv, D]");
  fill(op, p, kv_cache, key.size(2));
  const int64_t head_size = p.block_size * kv_cache.size(3);
  HE_CHECK_VALUE((kv_cache.size(0) <= 1 || p.block_stride >= head_size) &&
                     (p.kv_heads == 1 || p.head_stride >= head_size),
                 op, ": kv_cache has shape ", kv_cache.sizes(), " and strides ", kv_cache.strides(),
                 "; expected blocks and heads that do not share memory");
  p.tokens = key.size(0);
  p.key = head_rows(op, key, "key", kv_cache, p.tokens, p.kv_heads, p.dim);
  p.value = head_rows(op, value, "value", kv_cache, p.tokens, p.kv_heads, p.value_dim);
  check_vector(slot_mapping, "slot_mapping", kLong, p.tokens);
  p.slot_mapping = slot_mapping.data<int64_t>();
  const int64_t slots = kv_cache.size(0) * p.block_size;
  p.num_threads = get_num_threads();
  run_rows(op, p, &PagedWrite::tokens, [op, slots](const PagedWrite& p) {
    for (int64_t i = 0; i < p.tokens; ++i)
      HE_CHECK_VALUE(p.slot_mapping[i] < slots, op, ": slot_mapping[", i, "] is ",
                     p.slot_mapping[i], "; expected less than ", slots, ", the slots of kv_cache");
    paged_write_cpu(p);
  });
}

// Raises ValueError unless all sequences have their queries among their tokens and their tokens
// in blocks of the cache.
void check_sequences(const char* op, const PagedAttention& p, int64_t tokens, int64_t table_size,
                     int64_t blocks) {
  HE_CHECK_VALUE(p.query_start_loc[0] == 0 && p.query_start_loc[p.sequences] == tokens, op,
                 ": query_start_loc begins at ", p.query_start_loc[0], " and ends at ",
                 p.query_start_loc[p.sequences], "; expected 0 and ", tokens,
                 ", the number of queries");
  for (int64_t i = 0; i < p.sequences; ++i) {
    const int64_t queries = int64_t{p.query_start_loc[i + 1]} - p.query_start_loc[i];
    HE_CHECK_VALUE(queries >= 0 && p.query_start_loc[i] >= 0, op, ": query_start_loc[", i, "] is ",
                   p.query_start_loc[i], ", the next one ", p.query_start_loc[i + 1],
                   "; expected ascending numbers");
    if (queries == 0) continue;
    const int64_t length = p.seq_lens[i], used = (length + p.block_size - 1) / p.block_size;
    HE_CHECK_VALUE(length >= queries && used <= table_size, op, ": seq_lens[", i, "] is ", length,
                   " for ", queries, " queries and ", table_size, " blocks of ", p.block_size,
                   "; expected at least the queries, and blocks for all");
    for (int64_t b = 0; b < used; ++b) {
      const int32_t block = p.block_table[i * p.table_stride + b];
      HE_CHECK_VALUE(block >= 0 && block < blocks, op, ": block_table[", i, ", ", b, "] is ", block,
                     "; expected a block of kv_cache, which has ", blocks);
    }
  }
}

void paged_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                     const Tensor& query_start_loc, const Tensor& seq_lens, double softmax_scale,
                     std::optional<int64_t> window_size, std::optional<double> softcap,
                     const std::optional<Tensor>& sinks, const Tensor& out) {
  const char* op = "paged_attention";
  check_same_device(op, {{"kv_cache", kv_cache},
                         {"query", query},
                         {"block_table", block_table},
                         {"query_start_loc", query_start_loc},
                         {"seq_lens", seq_lens},
                         {"sinks", sinks},
                         {"out", out}});
  HE_CHECK_VALUE(query.dim() == 3, op, ": query has shape ", query.sizes(), "; expected [T, H, D]");
  PagedAttention p{};
  fill(op, p, kv_cache, query.size(2));
  const int64_t tokens = query.size(0);
  p.heads = query.size(1);
  HE_CHECK_VALUE(p.heads > 0 && p.heads % p.kv_heads == 0, op, ": query has ", p.heads,
                 " heads, kv_cache ", p.kv_heads, "; expected a multiple");
  p.query = head_rows(op, query, "query", kv_cache, tokens, p.heads, p.dim);
  const HeadRows rows = head_rows(op, out, "out", kv_cache, tokens, p.heads, p.value_dim);
  HE_CHECK_VALUE(out.numel() == 0 || p.heads == 1 || rows.head_stride == p.value_dim, op,
                 ": out has strides ", out.strides(), "; expected contiguous heads");
  p.out = out.data(), p.out_stride = rows.token_stride;
  p.sequences = seq_lens.numel();
  check_vector(seq_lens, "seq_lens", kInt, p.sequences);
  check_vector(query_start_loc, "query_start_loc", kInt, p.sequences + 1);
  HE_CHECK_VALUE(block_table.dim() == 2 && block_table.size(0) == p.sequences &&
                     block_table.scalar_type() == kInt && block_table.has_unit_inner_stride(),
                 op, ": block_table has shape ", block_table.sizes(), " and dtype ",
                 block_table.scalar_type(), "; expected [", p.sequences,
                 ", blocks] of int32 with inner stride 1");
  p.block_table = block_table.data<int32_t>(), p.table_stride = block_table.stride(0);
  p.query_start_loc = query_start_loc.data<int32_t>();
  p.seq_lens = seq_lens.data<int32_t>();
  const int64_t window = window_size.value_or(INT32_MAX);
  HE_CHECK_VALUE(window > 0, op, ": window_size is ", window, "; expected at least 1");
  p.window = static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX));
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap.value_or(0.0));
  if (sinks) {
    check_vector(*sinks, "sinks", kFloat, p.heads);
    p.sinks = sinks->data<float>();
  }
  p.num_threads = get_num_threads();
  const int64_t table_size = block_table.size(1), blocks = kv_cache.size(0);
  run_rows(op, p, &PagedAttention::sequences,
           [op, tokens, sequences = p.sequences, table_size, blocks](const PagedAttention& p) {
             const int64_t queries = sequences == 0 ? tokens : tokens * p.sequences / sequences;
             check_sequences(op, p, queries, table_size, blocks);
             if (tokens > 0) paged_attention_cpu(p);
           });
}

}  // namespace

void register_paged_attention(py::module_& m) {
  m.def("write_kv_cache", &write_kv_cache, py::arg("key"), py::arg("value"), py::arg("kv_cache"),
        py::arg("slot_mapping"));
  m.def("paged_attention", &paged_attention, py::arg("query"), py::arg("kv_cache"),
        py::arg("block_table"), py::arg("query_start_loc"), py::arg("seq_lens"),
        py::arg("softmax_scale"), py::arg("window_size"), py::arg("softcap"), py::arg("sinks"),
        py::arg("out"));
}

}  // namespace hybridengine
