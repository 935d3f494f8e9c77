// Causal attention of the newest tokens of sequences whose keys and values are in a paged cache.
//
// A row has the bits that attention_forward_cpu (attention/params.h) gives the token at its
// position of its sequence: dot products, weights and sums have that order, and the chains of
// kChain keys are cut by the position in the sequence. Every chain is computed on its own, with a
// maximum of its own, and chains are joined in ascending order. As a maximum is an integral power
// of two, it does not matter which threads compute the chains of a sequence.
//
// The cache is [blocks, kv_heads, block_size, dim + value_dim]. The memory of a block and head is
// its keys, then its values, in steps of n numbers (n = 2 for bfloat16, else 1):
//   keys [dim / n, block_size, n], so that a vector has consecutive keys;
//   values [block_size / n, value_dim, n], so that a vector has consecutive elements.
// A token whose key or value is not finite is stored as a key of NaN and zeros and a value of
// zeros: rows that see it become NaN, others are not affected.
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace hybridengine {

constexpr int64_t kCacheUnit = 16;  // block_size, dim and value_dim are multiples of it

struct PagedCache {
  void* data;
  int64_t block_stride, head_stride;  // elements
  DType dtype;                        // f32 or bf16, of all tensors
  int64_t kv_heads, block_size;
  int64_t dim, value_dim;
};

struct PagedWrite : PagedCache {
  HeadRows key, value;          // [tokens, kv_heads, dim] and [tokens, kv_heads, value_dim]
  const int64_t* slot_mapping;  // [tokens], block * block_size + offset; negative: not written
  int64_t tokens;
  int num_threads;
};

struct PagedAttention : PagedCache {
  HeadRows query;  // [tokens, heads, dim]
  int64_t heads, sequences;
  const int32_t* block_table;  // [sequences, table_stride]
  int64_t table_stride;
  const int32_t* query_start_loc;  // [sequences + 1]
  const int32_t* seq_lens;         // [sequences], cached tokens, of which the last are the queries
  int32_t window;                  // INT32_MAX: none
  float softmax_scale;
  float softcap;       // 0: none
  const float* sinks;  // [heads], null: none
  void* out;           // [tokens, heads, value_dim], inner dimensions contiguous
  int64_t out_stride;
  int num_threads;
};

HE_CPU_KERNEL_BF16(paged_write_cpu, PagedWrite)
HE_CPU_KERNEL_BF16(paged_attention_cpu, PagedAttention)

}  // namespace hybridengine
