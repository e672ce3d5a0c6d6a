// wgmma against other users of shared memory: what issuing costs the warps, other N, and ldmatrix, stmatrix, stores, shuffles
// and PRMT of a warpgroup beside products of others; the same moves alone, a row of 128 bytes apart and swizzled.
#include "common.cuh"

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(d, i) ACC4(d, i), ACC4(d, i + 4), ACC4(d, i + 8), ACC4(d, i + 12)
#define TEN(a) "%" #a "0,%" #a "1,%" #a "2,%" #a "3,%" #a "4,%" #a "5,%" #a "6,%" #a "7,%" #a "8,%" #a "9"
#define ONES "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9"
#define LIST48 "{" ONES "," TEN(1) "," TEN(2) "," TEN(3) ",%40,%41,%42,%43,%44,%45,%46,%47}"
#define LIST64 "{" ONES "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) ",%60,%61,%62,%63}"
#define LIST80 "{" ONES "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "}"
#define REGS48 ACC16(d, 0), ACC16(d, 16), ACC16(d, 32)
#define REGS64 REGS48, ACC16(d, 48)
#define REGS80 REGS64, ACC16(d, 64)

// One instruction: 64 rows, N columns, 32 bytes of depth.
template <int n, bool fp8, bool registers>
__device__ inline void product(float* d, const u32* a, u64 da, u64 db);

#define PRODUCT(n, fp8, shape, list, regs, i0, i1, i2, i3, i4, ss, rs)                                                 \
  template <>                                                                                                          \
  __device__ inline void product<n, fp8, false>(float* d, const u32*, u64 da, u64 db) {                                \
    asm volatile("wgmma.mma_async.sync.aligned." shape " " list ", %" #i0 ", %" #i1 ", " ss ";" : regs : "l"(da), "l"(db)); \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ inline void product<n, fp8, true>(float* d, const u32* a, u64, u64 db) {                                  \
    asm volatile("wgmma.mma_async.sync.aligned." shape " " list ", {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 ", " rs ";" \
                 : regs                                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));                                               \
  }
PRODUCT(96, false, "m64n96k16.f32.bf16.bf16", LIST48, REGS48, 48, 49, 50, 51, 52, "1, 1, 1, 0, 0", "1, 1, 1, 0")
PRODUCT(96, true, "m64n96k32.f32.e4m3.e4m3", LIST48, REGS48, 48, 49, 50, 51, 52, "1, 1, 1", "1, 1, 1")
PRODUCT(128, false, "m64n128k16.f32.bf16.bf16", LIST64, REGS64, 64, 65, 66, 67, 68, "1, 1, 1, 0, 0", "1, 1, 1, 0")
PRODUCT(128, true, "m64n128k32.f32.e4m3.e4m3", LIST64, REGS64, 64, 65, 66, 67, 68, "1, 1, 1", "1, 1, 1")
PRODUCT(160, true, "m64n160k32.f32.e4m3.e4m3", LIST80, REGS80, 80, 81, 82, 83, 84, "1, 1, 1", "1, 1, 1")

__device__ inline u64 descriptor(u32 address) {  // 128-byte swizzle, K-major
  return u64(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

enum Move { kNone, kLdmatrix, kLdmatrixTrans, kStmatrix, kStmatrixTrans, kStore16, kShuffle, kPrmt, kExp2Store };
constexpr int kTimes = 64;

template <int move>
__device__ inline void moved(u32 at, u32* x) {
  if (move == kLdmatrix) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
  if (move == kLdmatrixTrans) asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
  if (move == kStmatrix) asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};" ::"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(at) : "memory");
  if (move == kStmatrixTrans) asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};" ::"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(at) : "memory");
  if (move == kStore16) asm volatile("st.shared.v4.b32 [%4], {%0, %1, %2, %3};" ::"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(at) : "memory");
  if (move == kShuffle) asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(x[0]));
  if (move == kPrmt) asm volatile("prmt.b32 %0, %0, %1, 0x6240;" : "+r"(x[0]) : "r"(x[1]));
  if (move == kExp2Store) {
    asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+r"(x[4]));
    asm volatile("st.shared.b32 [%1], %0;" ::"r"(x[0]), "r"(at) : "memory");
  }
}

// Warpgroups 0 .. groups - 1 multiply in batches until each did `times`; the one after them moves until they are done.
// out: begin, end of each; clocks and times of moves; clocks of issuing a batch, of the last one.
template <int n, bool fp8, bool registers, int batch, int move, int stride>
__global__ void __launch_bounds__(384, 1) beside(u64* out, float* sink, int groups, int times, u32 toggle) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ volatile int done;
  if (threadIdx.x == 0) done = 0;
  for (int i = threadIdx.x; i < 128 * 1024 / 4; i += blockDim.x) reinterpret_cast<u32*>(shared)[i] = 0x3c003c00u + i % 7;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  int group = threadIdx.x / 128;
  float d[n / 2];
  for (int i = 0; i < n / 2; i++) d[i] = 0;
  u32 x[8] = {1, 2, 3, 4, 0x3f000000, 6, 7, 8};
  if (group < groups) {
    u32 a[4] = {1, 2, 3, 4};
    u64 da = descriptor(shared_address(shared) + group * 8192), db = descriptor(shared_address(shared) + 32768);
    u64 begin = 0, issued = 0;
#pragma unroll 1
    for (int t = 0; t < times + 4; t++) {
      if (t == 4) begin = clock_now();
      if (batch == 0) {
        __nanosleep(1000);
        continue;
      }
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      u64 before = clock_now();
#pragma unroll
      for (int i = 0; i < batch; i++) product<n, fp8, registers>(d, a, da + (i % 4) * 2, db + (i % 4) * 2);
      issued = clock_now() - before;
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    u64 end = clock_now();
    if (threadIdx.x % 128 == 0) {
      out[2 * group] = begin, out[2 * group + 1] = end, out[6 + group] = issued;
      done = 1;
    }
  } else {
    u32 at = shared_address(shared) + 98304 + (threadIdx.x / 32 % 4) * 16384;
    u32 lane = threadIdx.x % 32;
    at += stride == 16 ? lane * 16 : lane * 128 + ((lane & 7) * 16);  // rows of 128 bytes, swizzled
    u64 count = 0, begin = clock_now();
    while (!done) {
#pragma unroll
      for (int u = 0; u < 64; u++) {  // other addresses each time, and results that are used: ptxas drops repetitions
        moved<move>(at + u * 128, x);
        if (move == kLdmatrix || move == kLdmatrixTrans) x[5] ^= x[0];
      }
      at ^= toggle;
      count += 64;
    }
    u64 end = clock_now();
    if (threadIdx.x % 128 == 0) out[4] = count, out[5] = end - begin;
  }
  float sum = 0;
  for (int i = 0; i < n / 2; i++) sum += d[i];
  sink[threadIdx.x] = sum + x[5] + x[0] + x[1] + x[2] + x[3] + x[4];
}

template <int n, bool fp8, bool registers, int batch, int move = kNone, int stride = 128>
void run(const std::string& name, int groups) {
  Numbers<u64> out(8);
  Numbers<float> sink(1024);
  auto* kernel = beside<n, fp8, registers, batch, move, stride>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 164 * 1024));
  kernel<<<1, 128 * (groups + (move != kNone)), 164 * 1024>>>(out.device, sink.device, groups, kTimes, 8192);
  auto& got = out.get();
  u64 first = got[0], last = got[1];
  if (groups == 2) first = std::min(first, got[2]), last = std::max(last, got[3]);
  if (batch) result("shared.wgmma." + name + ".batch" + std::to_string(batch), double(last - first) / kTimes, "clk");
  if (batch) result("shared.issue." + name + ".batch" + std::to_string(batch), double(got[6]), "clk");
  if (move != kNone) result("shared.move." + name + ".batch" + std::to_string(batch), double(got[5]) / double(got[4]), "clk");
}

// Two warpgroups multiply in batches and pause after each, the second one `late` clocks behind at first. out: clocks of 64
// turns of each; when each product of the last batch of each was issued.
template <int batch, bool registers>
__global__ void __launch_bounds__(256, 1) turns(u64* out, float* sink, int pause, int late) {
  extern __shared__ __align__(1024) char shared[];
  for (int i = threadIdx.x; i < 128 * 1024 / 4; i += blockDim.x) reinterpret_cast<u32*>(shared)[i] = 0x3c003c00u + i % 7;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  int group = threadIdx.x / 128;
  float d[64];
  for (int i = 0; i < 64; i++) d[i] = 0;
  u32 a[4] = {1, 2, 3, 4};
  u64 da = descriptor(shared_address(shared) + group * 8192), db = descriptor(shared_address(shared) + 32768);
  u64 begin = 0, issued[batch];
  if (group)
    for (u64 start = clock_now(); clock_now() - start < late;) {}
#pragma unroll 1
  for (int t = 0; t < 32 + kTimes; t++) {
    if (t == 32) begin = clock_now();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < batch; i++) {
      product<128, false, registers>(d, a, da + (i % 4) * 2, db + (i % 4) * 2);
      issued[i] = clock_now();
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (u64 start = clock_now(); clock_now() - start < pause;) {}
  }
  u64 end = clock_now();
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += d[i];
  sink[threadIdx.x] = sum;
  if (threadIdx.x % 128) return;
  out[group] = end - begin;
#pragma unroll
  for (int i = 0; i < batch; i++) out[2 + group * batch + i] = issued[i];
}

template <int batch, bool registers>
void in_turn(const std::string& name, int pause, int late) {
  Numbers<u64> out(2 + 2 * batch);
  Numbers<float> sink(1024);
  auto* kernel = turns<batch, registers>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 164 * 1024));
  kernel<<<1, 256, 164 * 1024>>>(out.device, sink.device, pause, late);
  auto& got = out.get();
  std::string all = name + ".batch" + std::to_string(batch) + ".pause" + std::to_string(pause) + ".late" + std::to_string(late);
  result("turns." + all, double(got[0]) / kTimes, "clk");
  u64 first = std::min(got[2], got[2 + batch]);
  for (int i = 0; i < 2 * batch && late == 300; i++)
    result("turns." + all + ".issued" + std::to_string(i / batch) + "." + std::to_string(i % batch), double(got[2 + i] - first), "clk");
}

template <int n, bool fp8, bool registers>
void shape(const std::string& name) {
  for (int groups : {1, 2}) {
    std::string all = name + (groups == 1 ? ".one" : ".two");
    run<n, fp8, registers, 1>(all, groups);
    run<n, fp8, registers, 2>(all, groups);
    run<n, fp8, registers, 4>(all, groups);
    run<n, fp8, registers, 8>(all, groups);
    run<n, fp8, registers, 16>(all, groups);
  }
}

template <int move, int stride = 128>
void moves(const std::string& name) {
  run<128, false, false, 0, move, stride>(name + ".alone", 1);
  run<128, false, false, 16, move, stride>(name + ".bf16.n128.ss.one", 1);
  run<128, false, true, 16, move, stride>(name + ".bf16.n128.rs.one", 1);
  run<128, true, false, 16, move, stride>(name + ".e4m3.n128.ss.one", 1);
  run<128, true, true, 16, move, stride>(name + ".e4m3.n128.rs.one", 1);
  run<128, false, false, 16, move, stride>(name + ".bf16.n128.ss.two", 2);
  run<128, true, true, 16, move, stride>(name + ".e4m3.n128.rs.two", 2);
  run<160, true, false, 16, move, stride>(name + ".e4m3.n160.ss.one", 1);
}

int main() {
  shape<96, false, false>("bf16.n96.ss");
  shape<96, false, true>("bf16.n96.rs");
  shape<96, true, false>("e4m3.n96.ss");
  shape<96, true, true>("e4m3.n96.rs");
  shape<128, false, false>("bf16.n128.ss");
  shape<128, false, true>("bf16.n128.rs");
  shape<128, true, false>("e4m3.n128.ss");
  shape<128, true, true>("e4m3.n128.rs");
  shape<160, true, false>("e4m3.n160.ss");
  for (int late : {0, 300, 700}) {
    for (int pause : {100, 600, 1200, 1800}) {
      in_turn<20, false>("ss", pause, late);
      in_turn<20, true>("rs", pause, late);
      in_turn<8, true>("rs", pause, late);
    }
  }
  moves<kLdmatrix>("ldmatrix");
  moves<kLdmatrixTrans>("ldmatrix_trans");
  moves<kStmatrix>("stmatrix");
  moves<kStmatrixTrans>("stmatrix_trans");
  moves<kStore16, 16>("st_v4");
  moves<kShuffle>("shuffle");
  moves<kPrmt>("prmt");
  moves<kExp2Store, 16>("ex2_and_store");
  return 0;
}
