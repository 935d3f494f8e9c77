// Marks functions that CPU kernels, CUDA kernels and tests share.
#pragma once

#ifdef __CUDACC__
#define HE_HOST_DEVICE __host__ __device__ __forceinline__
#define HE_UNROLL _Pragma("unroll")  // loops whose arrays must stay in registers
#else
#define HE_UNROLL
// always_inline: otherwise the linker could choose an AVX-512 copy for the portable kernels.
#define HE_HOST_DEVICE inline __attribute__((always_inline))
#endif
