#include <dlfcn.h>

#include "common/binding.h"
#include "mixed_gemm/params.h"

namespace hybridengine {

namespace {

// brgemm of torch, which calls oneDNN. It is not of torch's stable interface: where the library has
// no function of this name, or it does not multiply as expected, there is no mixed_gemm.
template <typename T>
using Brgemm = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const T*,
                        const T*, float*, bool);
template <typename T>
Brgemm<T> brgemm = nullptr;
void (*brgemm_release)(bool) = nullptr;

template <typename T>
void multiply_tile(int64_t depth, int64_t lda, bool accumulate, const uint16_t* a,
                   const uint16_t* b, float* c) {
  brgemm<T>(kTileRows, kTileColumns, depth, lda, kTileColumns, kTileColumns, accumulate,
            reinterpret_cast<const T*>(a), reinterpret_cast<const T*>(b), c, true);
}

// Whether torch has the kernel on this machine and expects B in the layout of MultiplyTile. It
// needs AVX512-BF16 (float16: AVX512-FP16); without it oneDNN throws an exception.
template <typename T>
bool works(const char* symbol) {
  void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return false;
  brgemm<T> = reinterpret_cast<Brgemm<T>>(dlsym(library, symbol));
  brgemm_release =
      reinterpret_cast<void (*)(bool)>(dlsym(library, "_ZN2at6native7cpublas14brgemm_releaseEb"));
  if (!brgemm<T> || !brgemm_release) return false;
  T a[kTileRows * 32], b[kTileColumns * 32];
  float c[kTileRows * kTileColumns];
  for (int64_t i = 0; i < kTileRows * 32; ++i) a[i] = FromFloat<T>::of(i * 7 % 13 - 6);
  for (int64_t i = 0; i < kTileColumns * 32; ++i) b[i] = FromFloat<T>::of(i * 5 % 11 - 5);
  try {
    multiply_tile<T>(32, 32, false, reinterpret_cast<const uint16_t*>(a),
                     reinterpret_cast<const uint16_t*>(b), c);
    brgemm_release(true);
  } catch (const std::exception&) {
    return false;
  }
  for (int64_t m = 0; m < kTileRows; ++m) {
    for (int64_t n = 0; n < kTileColumns; ++n) {
      float sum = 0;  // of small integers: exact
      for (int64_t k = 0; k < 32; ++k) {
        sum += to_float(a[m * 32 + k]) * to_float(b[(k / 2 * kTileColumns + n) * 2 + k % 2]);
      }
      if (c[m * kTileColumns + n] != sum) return false;
    }
  }
  return true;
}

bool has_mixed_gemm(ScalarType dtype) {
  if (cpu_isa() != Isa::avx512_bf16) return false;
  static const bool bfloat16 =
      works<bf16>("_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb");
  static const bool half = works<f16>("_ZN2at6native7cpublas6brgemmEllllllbPKN3c104HalfES5_Pfb");
  return (dtype == kBFloat16 && bfloat16) || (dtype == kHalf && half);
}

// `x` [rows, k], with stride 1 along one of them.
Operand operand(const Arguments& given, const char* name, In x, ScalarType dtype) {
  given.same_device(name, x);
  given.expect(x.dim() == 2 && x.scalar_type() == dtype && (x.stride(0) == 1 || x.stride(1) == 1),
               name, " has shape ", x.sizes(), ", strides ", x.strides(), " and dtype ",
               x.scalar_type(), "; expected a ", dtype, " matrix with stride 1 along a dimension");
  // A [rows, 1] matrix with row stride 1 counts as either layout.
  return {static_cast<const uint16_t*>(x.data()), x.stride(0), x.stride(1)};
}

// out [m, n] float32 (+)= a [m, k] @ b [n, k].T (+ bias [n]), a and b bfloat16 or float16.
void mixed_gemm(In a, In b, OptionalIn bias, Tensor& out, bool accumulate) {
  const Arguments given("mixed_gemm", "a", a);
  const ScalarType type = a.scalar_type();
  HE_CHECK(a.is_cpu() && has_mixed_gemm(type),
           "mixed_gemm: no 16-bit kernel with a float32 result for ", type, " on ", a.device(),
           " of this machine; convert the operands to float32");
  MixedGemm p{};
  p.a = operand(given, "a", a, type);
  p.b = operand(given, "b", b, type);
  p.m = a.size(0), p.n = b.size(0), p.k = a.size(1);
  given.expect(b.size(1) == p.k, "a is ", a.sizes(), ", b ", b.sizes(),
               "; expected [m, k] and [n, k]");
  given.expect(!bias || !accumulate, "bias and accumulate exclude each other");
  p.bias = given.data<float>("bias", bias, {p.n});
  p.out = given.data<float>("out", out, {p.m, p.n}, &p.out_stride);
  given.expect(p.m <= 1 || p.out_stride >= p.n, "out has strides ", out.strides(),
               "; expected rows that do not share memory");
  if (p.m == 0 || p.n == 0) return;
  p.accumulate = accumulate;
  p.share_a = p.m <= p.n;
  const int64_t rows = p.share_a ? rounded_up(p.m, kTileRows) : rounded_up(p.n, kTileColumns);
  const Tensor shared = given.make(p.shared, {rows * padded_depth(p.k)}, type);
  p.multiply_tile = type == kHalf ? multiply_tile<f16> : multiply_tile<bf16>;
  p.release = [] { brgemm_release(true); };
  given.run(p, mixed_gemm_cpu);
}

}  // namespace

void register_mixed_gemm(py::module_& m) {
  def(m, "has_mixed_gemm", &has_mixed_gemm, "dtype");
  def(m, "mixed_gemm", &mixed_gemm, "a b bias out accumulate");
}

}  // namespace hybridengine
