#include <algorithm>

#include "common/binding.h"
#include "paged_attention/params.h"

namespace hybridengine {

namespace {

// Fills the blocks [blocks, kv_heads, block_size, dim + value_dim] of the cache, for keys of `dim`.
// Returns how many there are.
int64_t fill(const Arguments& given, PagedCache& p, In cache, int64_t dim) {
  given.on_cpu();
  p.dtype = given.dtype("kv_cache", cache.scalar_type(), kWideFloats);
  given.expect(cache.dim() == 4 && cache.size(1) > 0 && cache.size(2) > 0 && dim > 0 &&
                   cache.size(2) % kCacheUnit == 0 && dim % kCacheUnit == 0 &&
                   cache.size(3) > dim && cache.size(3) % kCacheUnit == 0 && cache.stride(3) == 1 &&
                   cache.stride(2) == cache.size(3),
               "kv_cache has shape ", cache.sizes(), " and strides ", cache.strides(),
               ", for keys of ", dim, "; expected [blocks, H_kv, block_size, D + D_v] with ",
               "contiguous heads, block_size, D and D_v multiples of ", kCacheUnit);
  p.data = cache.data();
  p.block_stride = cache.stride(0), p.head_stride = cache.stride(1);
  p.kv_heads = cache.size(1), p.block_size = cache.size(2);
  p.dim = dim, p.value_dim = cache.size(3) - dim;
  return cache.size(0);
}

void write_kv_cache(In key, In value, In kv_cache, In slot_mapping) {
  const Arguments given("write_kv_cache", "kv_cache", kv_cache);
  const ScalarType type = kv_cache.scalar_type();
  PagedWrite p{};
  int64_t heads, dim;
  p.key = given.heads("key", key, type, {&p.tokens, &heads, &dim});
  const int64_t blocks = fill(given, p, kv_cache, dim);
  p.key = given.heads("key", key, type, {p.tokens, p.kv_heads, p.dim});
  p.value = given.heads("value", value, type, {p.tokens, p.kv_heads, p.value_dim});
  p.slot_mapping = given.data<int64_t>("slot_mapping", slot_mapping, {p.tokens});
  const int64_t head_size = p.block_size * (p.dim + p.value_dim), slots = blocks * p.block_size;
  given.expect((blocks <= 1 || p.block_stride >= head_size) &&
                   (p.kv_heads == 1 || p.head_stride >= head_size),
               "kv_cache has shape ", kv_cache.sizes(), " and strides ", kv_cache.strides(),
               "; expected blocks and heads that do not share memory");
  given.run_rows(p, &PagedWrite::tokens, [op = given.op(), slots](const PagedWrite& p) {
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

void paged_attention(In query, In kv_cache, In block_table, In query_start_loc, In seq_lens,
                     double softmax_scale, std::optional<int64_t> window_size,
                     std::optional<double> softcap, OptionalIn sinks, In out) {
  const Arguments given("paged_attention", "kv_cache", kv_cache);
  const ScalarType type = kv_cache.scalar_type();
  PagedAttention p{};
  int64_t tokens, dim, table_size;
  p.query = given.heads("query", query, type, {&tokens, &p.heads, &dim});
  const int64_t blocks = fill(given, p, kv_cache, dim);
  given.expect(p.heads > 0 && p.heads % p.kv_heads == 0, "query has ", p.heads, " heads, kv_cache ",
               p.kv_heads, "; expected a multiple");
  const HeadRows rows = given.heads("out", out, type, {tokens, p.heads, p.value_dim});
  given.expect(out.numel() == 0 || p.heads == 1 || rows.head_stride == p.value_dim,
               "out has strides ", out.strides(), "; expected contiguous heads");
  p.out = out.data(), p.out_stride = rows.token_stride;
  p.seq_lens = given.data<int32_t>("seq_lens", seq_lens, {&p.sequences});
  p.query_start_loc = given.data<int32_t>("query_start_loc", query_start_loc, {p.sequences + 1});
  p.block_table =
      given.data<int32_t>("block_table", block_table, {p.sequences, &table_size}, &p.table_stride);
  const int64_t window = given.number("window_size", window_size.value_or(INT32_MAX), 1, INT64_MAX);
  p.window = static_cast<int32_t>(std::min<int64_t>(window, INT32_MAX));
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap.value_or(0.0));
  p.sinks = given.data<float>("sinks", sinks, {p.heads});
  given.run_rows(p, &PagedAttention::sequences,
                 [op = given.op(), tokens, sequences = p.sequences, table_size,
                  blocks](const PagedAttention& p) {
                   const int64_t queries =
                       sequences == 0 ? tokens : tokens * p.sequences / sequences;
                   check_sequences(op, p, queries, table_size, blocks);
                   if (tokens > 0) paged_attention_cpu(p);
                 });
}

}  // namespace

void register_paged_attention(py::module_& m) {
  def(m, "write_kv_cache", &write_kv_cache, "key value kv_cache slot_mapping");
  def(m, "paged_attention", &paged_attention,
      "query kv_cache block_table query_start_loc seq_lens softmax_scale window_size softcap sinks "
      "out");
}

}  // namespace hybridengine
