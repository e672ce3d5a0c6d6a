// Products of matrices, matrix loads and stores, and special functions, each by itself, for products.py.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u32 = uint32_t;
using u64 = uint64_t;

__device__ inline u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 8 rows x 16 bytes lie together; pieces along K lie 128 bytes apart, groups of 8 rows 256 bytes.
__device__ inline u64 described(const void* tile) {
  return u64(shared_address(tile) >> 4) | u64(128 >> 4) << 16 | u64(256 >> 4) << 32;
}

// One CTA a case: 64 x 32 bytes of A, 8 x 32 bytes of B, for each of STEPS products on top of each other.
#define PRODUCT(NAME, STEPS, SHAPE, TRANSPOSED)                                                                           \
  extern "C" __global__ void __launch_bounds__(128)                                                                \
      NAME(const uint4* a, const uint4* b, const float* c, float* d) {                                  \
    __shared__ alignas(1024) uint4 left[STEPS][128];                                                                   \
    __shared__ alignas(1024) uint4 right[STEPS][16];                                                                   \
    const u32 t = threadIdx.x, lane = t % 32, warp = t / 32;                                                       \
    _Pragma("unroll") for (u32 s = 0; s < STEPS; s++) {                                                                              \
      u32 row = t / 2, piece = t % 2;                                                                              \
      left[s][row / 8 * 16 + piece * 8 + row % 8] = a[(blockIdx.x * STEPS + s) * 128 + t];                         \
      if (t < 16) right[s][piece * 8 + row] = b[(blockIdx.x * STEPS + s) * 16 + t];                                \
    }                                                                                                              \
    float sum[4];                                                                                                  \
    const u32 place = blockIdx.x * 512 + (warp * 16 + lane / 4) * 8 + lane % 4 * 2;                                \
    for (u32 q = 0; q < 4; q++) sum[q] = c[place + q / 2 * 64 + q % 2];                                            \
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                   \
    __syncthreads();                                                                                               \
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");                                                        \
    _Pragma("unroll") for (u32 s = 0; s < STEPS; s++)                                                                                \
      asm volatile("wgmma.mma_async.sync.aligned." SHAPE " {%0, %1, %2, %3}, %4, %5, 1, 1, 1" TRANSPOSED ";"       \
                   : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                        \
                   : "l"(described(left[s])), "l"(described(right[s])));                                           \
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");                                                 \
    asm volatile("wgmma.wait_group.sync.aligned 0;"                                                                \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])::"memory");                              \
    for (u32 q = 0; q < 4; q++) d[place + q / 2 * 64 + q % 2] = sum[q];                                            \
  }

#define PRODUCTS(NAME, SHAPE, TRANSPOSED)     \
  PRODUCT(NAME, 1, SHAPE, TRANSPOSED)         \
  PRODUCT(NAME##_four, 4, SHAPE, TRANSPOSED)

PRODUCTS(wgmma_bf16, "m64n8k16.f32.bf16.bf16", ", 0, 0")
PRODUCTS(wgmma_f16, "m64n8k16.f32.f16.f16", ", 0, 0")
PRODUCTS(wgmma_e4m3, "m64n8k32.f32.e4m3.e4m3", "")
PRODUCTS(wgmma_e5m2, "m64n8k32.f32.e5m2.e5m2", "")
PRODUCTS(wgmma_e4m3_e5m2, "m64n8k32.f32.e4m3.e5m2", "")

// One warp a case: 16 rows x 32 bytes of A, 8 x 32 bytes of B.
#define WARP_PRODUCT(NAME, SHAPE)                                                                                  \
  extern "C" __global__ void __launch_bounds__(32)                                                                 \
      NAME(const u32* a, const u32* b, const float* c, float* d) {                                      \
    const u32 lane = threadIdx.x, row = lane / 4, word = lane % 4;                                                 \
    float sum[4];                                                                                                  \
    const u32 place = blockIdx.x * 128 + row * 8 + word * 2;                                                       \
    for (u32 q = 0; q < 4; q++) sum[q] = c[place + q / 2 * 64 + q % 2];                                            \
    const u32 *left = a + blockIdx.x * 128, *right = b + blockIdx.x * 64;                                          \
      asm volatile("mma.sync.aligned." SHAPE " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
                   : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                        \
                   : "r"(left[row * 8 + word]), "r"(left[row * 8 + 64 + word]), "r"(left[row * 8 + word + 4]),     \
                     "r"(left[row * 8 + 64 + word + 4]), "r"(right[row * 8 + word]), "r"(right[row * 8 + word + 4])); \
    for (u32 q = 0; q < 4; q++) d[place + q / 2 * 64 + q % 2] = sum[q];                                            \
  }

WARP_PRODUCT(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
WARP_PRODUCT(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32")

// Four 8 x 8 matrices of 16 bits: stored from registers, and loaded transposed.
extern "C" __global__ void __launch_bounds__(32) matrices(const uint4* from, uint4* stored, uint4* loaded) {
  __shared__ alignas(1024) uint4 rows[32];
  const u32 lane = threadIdx.x;
  uint4 v = from[lane];
  const u32 place = shared_address(rows + (lane * 5 + 3) % 32);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
  __syncwarp();
  stored[lane] = rows[lane];
  const u32 other = shared_address(rows + (lane * 7 + 1) % 32);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(other)
               : "memory");
  loaded[lane] = v;
}

#define SPECIAL(NAME, FUNCTION)                                                                                    \
  extern "C" __global__ void __launch_bounds__(128) NAME(const u32* x, u32* y, u32 count) {                        \
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)                    \
      asm volatile(FUNCTION ".approx.ftz.f32 %0, %1;" : "=r"(y[i]) : "r"(x[i]));                                   \
  }

SPECIAL(special_ex2, "ex2")
SPECIAL(special_lg2, "lg2")
SPECIAL(special_rcp, "rcp")
SPECIAL(special_rsqrt, "rsqrt")
