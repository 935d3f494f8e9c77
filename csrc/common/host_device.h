// Marks functions that the CPU kernels, the CUDA kernels and the tests share.
#pragma once

#ifdef __CUDACC__
#define HE_HOST_DEVICE __host__ __device__ __forceinline__
#else
// always_inline: an out-of-line copy compiled for AVX-512 must never serve the portable kernels.
#define HE_HOST_DEVICE inline __attribute__((always_inline))
#endif
