// What code costs that runs for the first time in a launch, by how far behind its kernel's beginning it lies.
#include "common.cuh"

// 64 instructions of 16 bytes.
__device__ __forceinline__ void kilobyte(u32 (&of)[8], u32 x, u32 y) {
#pragma unroll
  for (int i = 0; i < 64; i++) asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(of[i % 8]) : "r"(x), "r"(y));
}

constexpr int TIMED = 8;  // kilobytes

// One warp an SM; `before` kilobytes of code that never runs, then TIMED that run twice: out[pass] = clocks.
template <int before>
__global__ void behind(u64* out, u32 never, u32 x, u32 y, u32 passes) {
  u32 of[8] = {x, y, x + 1, y + 1, x + 2, y + 2, x + 3, y + 3};
  if (never) {
#pragma unroll
    for (int i = 0; i < before; i++) kilobyte(of, x, y);
  }
  u64 taken[2];
  for (u32 pass = 0; pass < passes; pass++) {
    u64 begin = clock_now();
#pragma unroll
    for (int i = 0; i < TIMED; i++) kilobyte(of, x, y);
    taken[pass & 1] = clock_now() - begin;
  }
  if (threadIdx.x == 0) {
    u64* mine = out + 4 * blockIdx.x;
    mine[0] = taken[0], mine[1] = taken[1], mine[2] = of[0] + of[1] + of[2] + of[3] + of[4] + of[5] + of[6] + of[7];
  }
}

template <int before>
void measure(Numbers<u64>& out, int sms, void* large, size_t bytes) {
  std::vector<double> first, second;
  for (int launch = 0; launch < 9; launch++) {
    CHECK(cudaMemset(large, launch, bytes));                     // L2 has none of the code
    behind<200><<<sms, 32>>>(out.device, 1 + launch, 3, 5, 1);   // nor has any cache of an SM: this runs 208 KB
    CHECK(cudaMemset(large, launch, bytes));
    behind<before><<<sms, 32>>>(out.device, 0, 3, 5, 2);
    auto& got = out.get();
    for (int i = 0; i < sms; i++) first.push_back(double(got[4 * i])), second.push_back(double(got[4 * i + 1]));
  }
  std::string name = "code.behind_" + std::to_string(before) + "_kb";
  result(name + ".first", median(first) / (64 * TIMED), "clk an instruction");
  result(name + ".again", median(second) / (64 * TIMED), "clk an instruction");
}

int main() {
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  Numbers<u64> out(4 * sms);
  const size_t bytes = size_t(256) << 20;
  void* large;
  CHECK(cudaMalloc(&large, bytes));
  measure<0>(out, sms, large, bytes), measure<16>(out, sms, large, bytes), measure<32>(out, sms, large, bytes);
  measure<40>(out, sms, large, bytes), measure<48>(out, sms, large, bytes), measure<56>(out, sms, large, bytes);
  measure<64>(out, sms, large, bytes), measure<72>(out, sms, large, bytes), measure<80>(out, sms, large, bytes);
  measure<96>(out, sms, large, bytes), measure<128>(out, sms, large, bytes), measure<160>(out, sms, large, bytes);
}
