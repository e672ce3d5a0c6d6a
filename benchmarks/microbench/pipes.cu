// Clocks of one warp instruction of one sub-partition, by kind: issued by 1, 2 or 4 of its warps with 8 chains each, and
// the latency of one chain of one warp. "a+b": both kinds in turn, clocks of one pair.
#include "common.cuh"

constexpr int kChains = 8, kTimes = 256;

struct Fma { static __device__ void go(float& x, u32&, float y) { asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x) : "f"(y)); } };
struct Mul { static __device__ void go(float& x, u32&, float y) { asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(y)); } };
struct Exp2 { static __device__ void go(float& x, u32&, float) { asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x)); } };
struct Log2 { static __device__ void go(float& x, u32&, float) { asm volatile("lg2.approx.ftz.f32 %0, %0;" : "+f"(x)); } };
struct Max { static __device__ void go(float& x, u32&, float y) { asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(y)); } };
struct Logic { static __device__ void go(float&, u32& n, float y) { asm volatile("lop3.b32 %0, %0, %1, %1, 0x96;" : "+r"(n) : "r"(__float_as_uint(y))); } };
struct Add { static __device__ void go(float&, u32& n, float y) { asm volatile("{.reg .u32 t; xor.b32 t, %0, %1; add.u32 %0, t, %0;}" : "+r"(n) : "r"(__float_as_uint(y))); } };
struct Mad { static __device__ void go(float&, u32& n, float y) { asm volatile("mad.lo.u32 %0, %0, %1, %1;" : "+r"(n) : "r"(__float_as_uint(y))); } };
struct Select { static __device__ void go(float& x, u32&, float y) { asm volatile("{.reg .pred p; setp.gt.f32 p, %0, %1; selp.f32 %0, %0, %1, p;}" : "+f"(x) : "f"(y)); } };
struct PackBf16 { static __device__ void go(float& x, u32&, float y) { u32 n; asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(n) : "f"(x), "f"(y)); x = __uint_as_float(n); } };
struct PackE4m3 { static __device__ void go(float& x, u32&, float y) { unsigned short n; asm volatile("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(n) : "f"(x), "f"(y)); x = __uint_as_float(u32(n)); } };
struct Permute { static __device__ void go(float&, u32& n, float y) { asm volatile("prmt.b32 %0, %0, %1, 0x5410;" : "+r"(n) : "r"(__float_as_uint(y))); } };
struct Shuffle { static __device__ void go(float& x, u32&, float) { asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;" : "+f"(x)); } };
template <class A, class B>
struct Both {};

template <class Kind>
struct Step { static __device__ void go(float& x, u32& n, float&, float y) { Kind::go(x, n, y); } };
template <class A, class B>
struct Step<Both<A, B>> { static __device__ void go(float& x, u32& n, float& z, float y) { u32 m = 0; A::go(x, n, y); B::go(z, m, y); } };

template <class Kind, int chains>
__global__ void time_kind(u64* clocks, float y, float* sink) {
  float x[chains], z[chains];
  u32 n[chains];
  for (int i = 0; i < chains; i++) x[i] = y + threadIdx.x + i, n[i] = threadIdx.x + i, z[i] = x[i];
  u64 begin = 0;
  for (int pass = 0; pass < 2; pass++) {  // the first fills the instruction cache
    __syncthreads();
    begin = clock_now();
#pragma unroll 1
    for (int t = 0; t < kTimes / 16; t++)
#pragma unroll
      for (int u = 0; u < 16; u++)
#pragma unroll
        for (int i = 0; i < chains; i++) Step<Kind>::go(x[i], n[i], z[i], y);
  }
  u64 end = clock_now();
  float sum = 0;
  for (int i = 0; i < chains; i++) sum += x[i] + z[i] + float(n[i]);
  sink[threadIdx.x] = sum;
  if (threadIdx.x % 32 == 0) clocks[2 * (threadIdx.x / 32)] = begin, clocks[2 * (threadIdx.x / 32) + 1] = end;
}

template <class Kind, int chains>
double clocks_of(int warps) {
  Numbers<u64> clocks(64);
  Numbers<float> sink(1024);
  time_kind<Kind, chains><<<1, 32 * warps>>>(clocks.device, 1.0f, sink.device);
  auto& got = clocks.get();
  u64 first = ~0ull, last = 0;
  for (int w = 0; w < warps; w++) first = std::min(first, got[2 * w]), last = std::max(last, got[2 * w + 1]);
  int per_partition = std::max(1, warps / 4);
  return double(last - first) / kTimes / chains / per_partition;
}

template <class Kind>
void kind(const std::string& name) {
  for (int warps : {1, 4, 8, 16}) result("pipe." + name + ".warps" + std::to_string(warps), clocks_of<Kind, kChains>(warps), "clk");
  result("latency." + name, clocks_of<Kind, 1>(1), "clk");
}

int main() {
  kind<Fma>("fma");
  kind<Mul>("mul");
  kind<Exp2>("ex2");
  kind<Log2>("lg2");
  kind<Max>("max");
  kind<Logic>("lop3");
  kind<Add>("xor_add_u32");
  kind<Mad>("mad_u32");
  kind<Select>("setp_selp");
  kind<PackBf16>("cvt_bf16x2");
  kind<PackE4m3>("cvt_e4m3x2");
  kind<Permute>("prmt");
  kind<Shuffle>("shfl");
  kind<Both<Exp2, PackBf16>>("ex2+cvt_bf16x2");
  kind<Both<Exp2, Max>>("ex2+max");
  kind<Both<Exp2, Fma>>("ex2+fma");
  kind<Both<Fma, Max>>("fma+max");
  kind<Both<Max, PackBf16>>("max+cvt_bf16x2");
  kind<Both<Logic, PackBf16>>("lop3+cvt_bf16x2");
  kind<Both<Fma, PackBf16>>("fma+cvt_bf16x2");
  return 0;
}
