// What lies between kernels and between the CTAs that follow each other on an SM, and the SM's clock.
#include "common.cuh"

__global__ void nothing() {}

__global__ void mark(u64* out) {
  u64* mine = out + 2 * sm_id();
  mine[0] = clock_now(), mine[1] = nanoseconds();
}

// One CTA an SM, as large as attention's; each stays for a while.
__global__ void __launch_bounds__(384, 1) stay(u64* out, u64 clocks) {
  u64 begin = clock_now();
  __syncthreads();
  while (clock_now() - begin < clocks) {}
  __syncthreads();
  if (threadIdx.x == 0) {
    u64* mine = out + 4 * blockIdx.x;
    mine[0] = sm_id(), mine[1] = begin, mine[2] = clock_now(), mine[3] = nanoseconds();
  }
}

int main() {
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const int waves = 8, ctas = sms * waves;
  Numbers<u64> out(4 * ctas), before(2 * 256), after(2 * 256);
  CHECK(cudaFuncSetAttribute(stay, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
  for (int pass = 0; pass < 2; pass++) {
    CHECK(cudaMemset(out.device, 0, 32 * ctas));
    stay<<<ctas, 384, 200 * 1024>>>(out.device, 20000);
  }
  auto& got = out.get();
  std::vector<std::vector<std::pair<u64, u64>>> of_sm(256);
  for (int i = 0; i < ctas; i++) of_sm[got[4 * i]].push_back({got[4 * i + 1], got[4 * i + 2]});
  std::vector<double> gaps;
  for (auto& list : of_sm) {
    std::sort(list.begin(), list.end());
    for (size_t i = 1; i < list.size(); i++) gaps.push_back(double(list[i].first) - double(list[i - 1].second));
  }
  result("launch.cta_gap", median(gaps), "clk");
  // Clocks of an SM between two kernels that note them, with k kernels between: of no work, and of 132 CTAs.
  auto between = [&](const std::string& name, int kind, int kernels, u64 clocks) {
    std::vector<double> taken, ns;
    for (int pass = 0; pass < 9; pass++) {
      CHECK(cudaMemset(before.device, 0, 4096));
      CHECK(cudaMemset(after.device, 0, 4096));
      stay<<<sms, 384, 200 * 1024>>>(out.device, 400000);  // the host queues meanwhile
      mark<<<sms * 4, 32>>>(before.device);
      for (int i = 0; i < kernels; i++) {
        if (kind == 0) nothing<<<1, 32>>>();
        if (kind == 1) stay<<<sms, 384, 200 * 1024>>>(out.device, clocks);
      }
      mark<<<sms * 4, 32>>>(after.device);
      auto &a = before.get(), &b = after.get();
      std::vector<double> per_sm, per_ns;
      for (int i = 0; i < 256; i++)
        if (a[2 * i] && b[2 * i]) per_sm.push_back(double(b[2 * i]) - double(a[2 * i])), per_ns.push_back(double(b[2 * i + 1]) - double(a[2 * i + 1]));
      taken.push_back(median(per_sm)), ns.push_back(median(per_ns));
    }
    result("launch.between." + name, median(taken), "clk");
    result("launch.between_ns." + name, median(ns), "ns");
  };
  between("nothing", 0, 0, 0);
  between("empty1", 0, 1, 0);
  between("empty2", 0, 2, 0);
  between("large1", 1, 1, 1000);
  between("large2", 1, 2, 1000);
  between("large1.1M", 1, 1, 1000000);
  return 0;
}
