// Clocks of wgmma: batches of 1 to 32 instructions between fence and wait, so that a rate and a latency come out; with A in
// registers or shared memory, by one or two warpgroups at once, and beside other work of the SM.
#include "common.cuh"

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(d, i) ACC4(d, i), ACC4(d, i + 4), ACC4(d, i + 8), ACC4(d, i + 12)
#define ACC64(d) ACC16(d, 0), ACC16(d, 16), ACC16(d, 32), ACC16(d, 48)
#define LIST32                                                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31}"
#define LIST64                                                                                                         \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"   \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63}"

// One instruction: 64 rows, N columns, 32 bytes of depth.
template <int n, bool fp8, bool registers>
__device__ inline void product(float* d, const u32* a, u64 da, u64 db);

#define SHARED_A(n, fp8, shape, list, regs, i0, i1, tail)                                                  \
  template <>                                                                                              \
  __device__ inline void product<n, fp8, false>(float* d, const u32*, u64 da, u64 db) {                    \
    asm volatile("wgmma.mma_async.sync.aligned." shape " " list ", %" #i0 ", %" #i1 ", " tail ";" : regs : "l"(da), "l"(db)); \
  }
#define REGISTER_A(n, fp8, shape, list, regs, i0, i1, i2, i3, i4, tail)                                    \
  template <>                                                                                              \
  __device__ inline void product<n, fp8, true>(float* d, const u32* a, u64, u64 db) {                      \
    asm volatile("wgmma.mma_async.sync.aligned." shape " " list ", {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 ", " tail ";" \
                 : regs                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));                                   \
  }
#define REGS32 ACC16(d, 0), ACC16(d, 16)
#define REGS64 ACC64(d)
SHARED_A(64, false, "m64n64k16.f32.bf16.bf16", LIST32, REGS32, 32, 33, "1, 1, 1, 0, 0")
SHARED_A(64, true, "m64n64k32.f32.e4m3.e4m3", LIST32, REGS32, 32, 33, "1, 1, 1")
SHARED_A(128, false, "m64n128k16.f32.bf16.bf16", LIST64, REGS64, 64, 65, "1, 1, 1, 0, 0")
SHARED_A(128, true, "m64n128k32.f32.e4m3.e4m3", LIST64, REGS64, 64, 65, "1, 1, 1")
REGISTER_A(64, false, "m64n64k16.f32.bf16.bf16", LIST32, REGS32, 32, 33, 34, 35, 36, "1, 1, 1, 0")
REGISTER_A(64, true, "m64n64k32.f32.e4m3.e4m3", LIST32, REGS32, 32, 33, 34, 35, 36, "1, 1, 1")
REGISTER_A(128, false, "m64n128k16.f32.bf16.bf16", LIST64, REGS64, 64, 65, 66, 67, 68, "1, 1, 1, 0")
REGISTER_A(128, true, "m64n128k32.f32.e4m3.e4m3", LIST64, REGS64, 64, 65, 66, 67, 68, "1, 1, 1")

__device__ inline u64 descriptor(u32 address) {  // 128-byte swizzle, K-major
  return u64(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

enum Beside { kNothing, kFma, kMax, kExp2, kCopies };
constexpr int kTimes = 64;

// Warpgroups 0 .. groups - 1 multiply in batches; the one after them, if any, does other work until they are done.
template <int n, bool fp8, bool registers, int batch, int beside, int unroll>
__global__ void __launch_bounds__(384, 1) multiply(u64* out, float* sink, int groups, int times, const char* memory) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ volatile int done;
  __shared__ u64 storage[4];
  u32 barrier[4];
  for (int i = 0; i < 4; i++) barrier[i] = shared_address(&storage[i]);
  if (threadIdx.x == 0) {
    done = 0;
    for (int i = 0; i < 4; i++) mbarrier_init(barrier[i], 1);
  }
  for (int i = threadIdx.x; i < 96 * 1024 / 4; i += blockDim.x) reinterpret_cast<u32*>(shared)[i] = 0x3c003c00u + i % 7;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  int group = threadIdx.x / 128;
  float d[n / 2];
  for (int i = 0; i < n / 2; i++) d[i] = 0;
  if (group < groups) {
    u32 a[4] = {1, 2, 3, 4};
    u64 da = descriptor(shared_address(shared) + group * 8192), db = descriptor(shared_address(shared) + 32768);
    u64 begin = 0, ns = 0;
#pragma unroll 1
    for (int t = 0; t < times + 4; t++) {
      if (t == 4) begin = clock_now(), ns = nanoseconds();
      if (batch == 0) {  // a control: other work alone
        __nanosleep(1000);
        continue;
      }
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < batch; i++) product<n, fp8, registers>(d, a, da + (i % 4) * 2, db + (i % 4) * 2);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    u64 end = clock_now();
    if (threadIdx.x % 128 == 0) {
      out[2 * group] = begin, out[2 * group + 1] = end, out[6] = nanoseconds() - ns;
      done = 1;
    }
  } else if (beside == kCopies) {  // 16 KB copies into 64 KB that the products do not read, four in flight
    if (threadIdx.x % 128 == 0) {
      u64 copied = 0, begin = clock_now();
      u32 to = shared_address(shared) + 98304;
      for (int i = 0; !done || i % 4; i++) {
        if (i >= 4) mbarrier_wait(barrier[i % 4], (i / 4 - 1) & 1);
        mbarrier_expect(barrier[i % 4], 16384);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to + (i % 4) * 16384),
                     "l"(memory + (u64(blockIdx.x * 64 + i) % 1024) * 16384), "r"(16384), "r"(barrier[i % 4])
                     : "memory");
        copied = i + 1;
      }
      u64 end = clock_now();
      for (u64 i = copied - 4; i < copied; i++) mbarrier_wait(barrier[i % 4], (i / 4) & 1);
      out[4] = copied * 16384, out[5] = end - begin;
    }
  } else {
    float x[8], y = threadIdx.x + 9.5f;
    for (int i = 0; i < 8; i++) x[i] = threadIdx.x + i;
    u64 done_times = 0, begin = clock_now();
    while (!done) {
#pragma unroll
      for (int u = 0; u < unroll; u++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (beside == kFma) asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x[i]) : "f"(y));
          if (beside == kMax) asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(y));
          if (beside == kExp2) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
        }
      done_times += 8 * unroll;
    }
    u64 end = clock_now();
    if (threadIdx.x % 128 == 0) out[4] = done_times, out[5] = end - begin;
    for (int i = 0; i < 8; i++) d[0] += x[i];
  }
  float sum = 0;
  for (int i = 0; i < n / 2; i++) sum += d[i];
  sink[threadIdx.x] = sum;
}

template <int n, bool fp8, bool registers, int batch, int beside = kNothing, int unroll = 32>
void run(const std::string& name, int groups, const char* memory = nullptr, int ctas = 1, int times = kTimes) {
  Numbers<u64> out(8);
  Numbers<float> sink(1024);
  auto* kernel = multiply<n, fp8, registers, batch, beside, unroll>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 160 * 1024));
  kernel<<<ctas, 128 * (groups + (beside != kNothing)), 160 * 1024>>>(out.device, sink.device, groups, times, memory);
  auto& got = out.get();
  u64 first = got[0], last = got[1];
  if (groups == 2) first = std::min(first, got[2]), last = std::max(last, got[3]);
  result("wgmma." + name + ".batch" + std::to_string(batch), double(last - first) / times, "clk");
  if (times > kTimes) result("clock." + name, double(last - first) / double(got[6]), "GHz");
  if (beside != kNothing) result("beside." + name + ".batch" + std::to_string(batch), double(got[5]) / double(got[4]), beside == kCopies ? "clk/byte" : "clk");
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
    run<n, fp8, registers, 32>(all, groups);
  }
}

int main() {
  shape<128, false, false>("bf16.n128.ss");
  shape<128, false, true>("bf16.n128.rs");
  shape<128, true, false>("e4m3.n128.ss");
  shape<128, true, true>("e4m3.n128.rs");
  shape<64, false, false>("bf16.n64.ss");
  shape<64, false, true>("bf16.n64.rs");
  shape<64, true, true>("e4m3.n64.rs");
  char* memory;
  CHECK(cudaMalloc(&memory, 32 << 20));
  CHECK(cudaMemset(memory, 0, 32 << 20));
  run<128, false, false, 16, kFma>("bf16.n128.ss.one.fma", 1);
  run<128, false, false, 16, kMax>("bf16.n128.ss.one.max", 1);
  run<128, false, false, 16, kExp2>("bf16.n128.ss.one.ex2", 1);
  run<128, false, true, 16, kFma>("bf16.n128.rs.one.fma", 1);
  run<128, false, false, 16, kCopies>("bf16.n128.ss.one.copies", 1, memory);
  run<128, false, false, 16, kCopies>("bf16.n128.ss.two.copies", 2, memory);
  run<64, false, false, 16, kCopies>("bf16.n64.ss.two.copies", 2, memory);
  run<128, false, false, 16, kCopies>("bf16.n128.ss.two.copies.all_sms", 2, memory, 132);
  run<128, true, false, 16, kCopies>("e4m3.n128.ss.two.copies.all_sms", 2, memory, 132);
  run<128, false, false, 0, kFma>("none.fma", 1);
  run<128, false, false, 0, kMax>("none.max", 1);
  run<128, false, false, 0, kExp2>("none.ex2", 1);
  run<128, false, false, 0, kFma, 8>("none.fma.loop64", 1);
  run<128, false, false, 0, kMax, 8>("none.max.loop64", 1);
  run<128, false, false, 0, kExp2, 8>("none.ex2.loop64", 1);
  run<128, false, false, 16, kFma, 8>("bf16.n128.ss.one.fma.loop64", 1);
  run<128, false, false, 16, kMax, 8>("bf16.n128.ss.one.max.loop64", 1);
  run<128, false, false, 16, kExp2, 8>("bf16.n128.ss.one.ex2.loop64", 1);
  run<128, false, true, 16, kMax, 8>("bf16.n128.rs.one.max.loop64", 1);
  run<128, false, false, 16, kFma, 8>("bf16.n128.ss.two.fma.loop64", 2);
  run<128, false, false, 16, kMax, 8>("bf16.n128.ss.two.max.loop64", 2);
  run<128, false, false, 16, kExp2, 8>("bf16.n128.ss.two.ex2.loop64", 2);
  run<128, false, false, 16>("bf16.n128.ss.two.all_sms.50ms", 2, nullptr, 132, 50000);
  run<128, false, true, 16>("bf16.n128.rs.two.all_sms.50ms", 2, nullptr, 132, 50000);
  run<128, false, false, 16, kExp2>("bf16.n128.ss.two.ex2.all_sms.50ms", 2, nullptr, 132, 50000);
  return 0;
}
