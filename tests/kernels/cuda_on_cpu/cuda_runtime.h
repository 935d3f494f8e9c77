// Runs CUDA kernels on the CPU, for tests: one block after the other, its threads as fibers that
// take turns at barriers and shuffles. __init__.py turns launches into calls of `emulate`.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1;
inline int cudaGetLastError() { return cudaSuccess; }
inline int cudaGetDevice(int* device) { return *device = 0; }
constexpr int cudaDevAttrMultiProcessorCount = 16;
inline int cudaDeviceGetAttribute(int* value, int, int) {
  *value = 2;  // fewer than chunks: blocks copy several
  return cudaSuccess;
}

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace emulation {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 1 << 16;

struct Barrier {
  unsigned expected = 0, arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done;
};

struct Warp {
  Barrier barrier;
  uint64_t slots[2][kWarp];  // in turn: a slot is read before its next but one write
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier block_barrier;
inline ucontext_t scheduler;
inline const std::function<void()>* kernel;
inline bool progress;

inline void wait(Barrier& barrier) {
  const unsigned generation = barrier.generation, thread = threadIdx.x;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    progress = true;
  }
  while (barrier.generation == generation) swapcontext(&fibers[thread].context, &scheduler);
}

inline void run_fiber() {
  const unsigned thread = threadIdx.x;
  (*kernel)();
  fibers[thread].done = progress = true;
}

inline void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  warps.assign((threads + kWarp - 1) / kWarp, Warp{});
  for (Warp& warp : warps) warp.barrier.expected = kWarp;
  block_barrier = {threads, 0, 0};
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.get(), 0, kStackBytes};
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (unsigned left = threads; left;) {
    progress = false;
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
      Fiber& fiber = fibers[threadIdx.x];
      if (fiber.done) continue;
      swapcontext(&scheduler, &fiber.context);
      left -= fiber.done;
    }
    if (left && !progress) {
      std::fprintf(stderr, "cuda_on_cpu: %u threads wait at a barrier for others that ended\n",
                   left);
      std::abort();
    }
  }
}

}  // namespace emulation

inline void emulate(const std::function<void()>& kernel, dim3 grid, dim3 block, int, cudaStream_t) {
  emulation::kernel = &kernel;
  gridDim = grid;
  blockDim = block;
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) emulation::run_block(block.x);
  }
}

inline float __fmul_rn(float a, float b) { return a * b; }

inline int atomicMax(int* address, int value) {  // threads take turns
  const int old = *address;
  *address = old > value ? old : value;
  return old;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  const unsigned long long old = *address;
  *address += value;
  return old;
}

inline void __syncthreads() { emulation::wait(emulation::block_barrier); }

// The value of lane `source` of the warp.
template <typename V>
V __shfl_sync(unsigned, V value, int source) {
  static_assert(sizeof(V) <= 8);
  emulation::Warp& warp = emulation::warps[threadIdx.x / emulation::kWarp];
  uint64_t* slots = warp.slots[warp.barrier.generation % 2];
  std::memcpy(&slots[threadIdx.x % emulation::kWarp], &value, sizeof(V));
  emulation::wait(warp.barrier);
  std::memcpy(&value, &slots[source], sizeof(V));
  return value;
}

template <typename V>
V __shfl_xor_sync(unsigned mask, V value, int lanes) {
  return __shfl_sync(mask, value, threadIdx.x % emulation::kWarp ^ lanes);
}
