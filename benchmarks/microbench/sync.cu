// Clocks of barriers, of shared memory from threads, and of a change of the register count.
#include "common.cuh"

constexpr int kTimes = 64;

__global__ void named(u64* out, int warps) {
  for (int i = 0; i < 4; i++) asm volatile("bar.sync 1, %0;" ::"r"(32 * warps) : "memory");
  u64 begin = clock_now();
  for (int i = 0; i < kTimes; i++) asm volatile("bar.sync 1, %0;" ::"r"(32 * warps) : "memory");
  if (threadIdx.x == 0) *out = clock_now() - begin;
}

// Two warps hand a token to and fro: two arrivals that the other one waits for in each turn.
__global__ void mbarrier_turns(u64* out) {
  __shared__ u64 storage[2];
  u32 barrier[2] = {shared_address(&storage[0]), shared_address(&storage[1])};
  if (threadIdx.x == 0) mbarrier_init(barrier[0], 1), mbarrier_init(barrier[1], 1);
  __syncthreads();
  int me = threadIdx.x / 32;
  u64 begin = 0;
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kTimes + 4; i++) {
      if (i == 4) begin = clock_now();
      if (me == 0) mbarrier_arrive(barrier[0]), mbarrier_wait(barrier[1], i & 1);
      if (me == 1) mbarrier_wait(barrier[0], i & 1), mbarrier_arrive(barrier[1]);
    }
    if (me == 0) *out = clock_now() - begin;
  }
}

__global__ void mbarrier_alone(u64* out, int wait) {
  __shared__ u64 storage;
  u32 barrier = shared_address(&storage);
  mbarrier_init(barrier, 1);
  u64 begin = 0;
  for (int i = 0; i < kTimes + 4; i++) {
    if (i == 4) begin = clock_now();
    mbarrier_arrive(barrier);
    if (wait) mbarrier_wait(barrier, i & 1);
  }
  *out = clock_now() - begin;
}

__global__ void mbarrier_ready(u64* out) {
  __shared__ u64 storage;
  u32 barrier = shared_address(&storage);
  mbarrier_init(barrier, 1);
  mbarrier_wait(barrier, 1);
  u64 begin = clock_now();
  for (int i = 0; i < kTimes; i++) mbarrier_wait(barrier, 1);
  *out = clock_now() - begin;
}

template <int kind>
__global__ void shared_moves(u64* out, u32* sink) {
  extern __shared__ __align__(1024) u32 memory[];
  u32 at = shared_address(memory) + threadIdx.x * 16, a = threadIdx.x, b = 1, c = 2, d = 3;
  u32 row = shared_address(memory) + (threadIdx.x / 32) * 512 + (threadIdx.x % 32) * 16;
  u64 begin = 0;
  for (int pass = 0; pass < 2; pass++) {
    __syncthreads();
    begin = clock_now();
#pragma unroll 8
    for (int i = 0; i < kTimes; i++) {
      if (kind == 0) asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at));
      if (kind == 1) asm volatile("st.volatile.shared.v4.b32 [%4], {%0, %1, %2, %3};" ::"r"(a), "r"(b), "r"(c), "r"(d), "r"(at) : "memory");
      if (kind == 2) asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(row));
      if (kind == 3) asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};" ::"r"(a), "r"(b), "r"(c), "r"(d), "r"(row) : "memory");
    }
    __syncthreads();
  }
  u64 end = clock_now();
  sink[threadIdx.x] = a + b + c + d;
  if (threadIdx.x == 0) *out = end - begin;
}

__global__ void load_latency(u64* out, u32* sink) {
  __shared__ u32 chain[32];
  chain[threadIdx.x] = shared_address(&chain[threadIdx.x]);
  __syncthreads();
  u32 at = chain[threadIdx.x];
  u64 begin = clock_now();
#pragma unroll 8
  for (int i = 0; i < kTimes; i++) asm volatile("ld.shared.b32 %0, [%0];" : "+r"(at)::"memory");
  u64 end = clock_now();
  sink[threadIdx.x] = at;
  if (threadIdx.x == 0) *out = end - begin;
}

__global__ void global_latency(u64* out, u32* sink, u64* memory, u64 bytes, u64 stride) {
  u64 at = 0;
  for (u64 i = 0; i < bytes; i += stride) memory[i / 8] = (i + stride) % bytes;
  __threadfence();
  for (u64 i = 0; i < bytes; i += stride) at = __ldcg(&memory[at / 8]);
  u64 begin = clock_now();
  for (int i = 0; i < kTimes; i++) at = __ldcg(&memory[at / 8]);
  u64 end = clock_now();
  *sink = u32(at);
  *out = end - begin;
}

__global__ void __launch_bounds__(384, 1) registers(u64* out) {
  u64 begin = clock_now();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  }
  u64 taken = clock_now() - begin;
  if (threadIdx.x % 128 == 0) out[threadIdx.x / 128] = taken;
}

int main() {
  Numbers<u64> out(8);
  Numbers<u32> sink(1024);
  for (int warps : {1, 4, 8, 12}) {
    named<<<1, 32 * warps>>>(out.device, warps);
    result("bar.sync.warps" + std::to_string(warps), double(out.get()[0]) / kTimes, "clk");
  }
  mbarrier_alone<<<1, 1>>>(out.device, 0);
  result("mbarrier.arrive", double(out.get()[0]) / kTimes, "clk");
  mbarrier_alone<<<1, 1>>>(out.device, 1);
  result("mbarrier.arrive+wait.one_thread", double(out.get()[0]) / kTimes, "clk");
  mbarrier_ready<<<1, 1>>>(out.device);
  result("mbarrier.wait.ready", double(out.get()[0]) / kTimes, "clk");
  mbarrier_turns<<<1, 64>>>(out.device);
  result("mbarrier.handover.two_warps", double(out.get()[0]) / kTimes / 2, "clk");
  mbarrier_turns<<<1, 64>>>(out.device);
  result("mbarrier.handover.two_warps.again", double(out.get()[0]) / kTimes / 2, "clk");
  load_latency<<<1, 32>>>(out.device, sink.device);
  result("latency.ld_shared", double(out.get()[0]) / kTimes, "clk");
  const char* names[] = {"ld_shared_v4", "st_shared_v4", "ldmatrix_x4", "stmatrix_x4"};
  for (int warps : {1, 4, 8}) {
    for (int kind = 0; kind < 4; kind++) {
      if (kind == 0) shared_moves<0><<<1, 32 * warps, 8192>>>(out.device, sink.device);
      if (kind == 1) shared_moves<1><<<1, 32 * warps, 8192>>>(out.device, sink.device);
      if (kind == 2) shared_moves<2><<<1, 32 * warps, 8192>>>(out.device, sink.device);
      if (kind == 3) shared_moves<3><<<1, 32 * warps, 8192>>>(out.device, sink.device);
      result(std::string("shared.") + names[kind] + ".warps" + std::to_string(warps), double(out.get()[0]) / kTimes / warps, "clk");
    }
  }
  u64* memory;
  CHECK(cudaMalloc(&memory, 1ull << 30));
  global_latency<<<1, 1>>>(out.device, sink.device, memory, 64 * 1024, 256);
  result("latency.ld_global.l2", double(out.get()[0]) / kTimes, "clk");
  registers<<<1, 384>>>(out.device);
  result("setmaxnreg.dec", double(out.get()[0]), "clk");
  result("setmaxnreg.inc", double(out.get()[1]), "clk");
  return 0;
}
