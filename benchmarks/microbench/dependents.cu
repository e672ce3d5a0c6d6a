// What a kernel adds to a stream when it is launched as a dependent (programmatic dependent launch) of the one before it,
// beside what it adds when it is not. The pair is that of a split decode: one CTA an SM that takes most of its shared
// memory, and smaller CTAs, two of an SM at a time, that wait for its end.
#include "common.cuh"

constexpr u64 OWN = 1000;  // clocks that a CTA of the second kernel stays

__device__ inline void stay(u64 clocks) {
  u64 begin = clock_now();
  while (clock_now() - begin < clocks) {}
}

__global__ void mark(u64* out) { out[sm_id()] = clock_now(); }

// `early`: clocks after which dependents may start; more than `clocks`: when the CTA ends.
__global__ void __launch_bounds__(256, 1) first(u64 clocks, u64 early) {
  u64 begin = clock_now();
  bool told = false;
  while (clock_now() - begin < clocks) {
    if (!told && clock_now() - begin >= early) {
      asm volatile("griddepcontrol.launch_dependents;");
      told = true;
    }
  }
}

__global__ void __launch_bounds__(256, 2) second() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  stay(OWN);
}

template <class... Arguments>
void launch(void (*kernel)(Arguments...), int ctas, int shared, bool dependent, Arguments... given) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas), config.blockDim = dim3(256), config.dynamicSmemBytes = shared;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute, config.numAttrs = dependent;
  CHECK(cudaLaunchKernelEx(&config, kernel, given...));
}

int main() {
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const int large = 220 * 1024, small = 75 * 1024;
  const u64 taken = 60000, never = ~0ull;
  CHECK(cudaFuncSetAttribute(first, cudaFuncAttributeMaxDynamicSharedMemorySize, large));
  CHECK(cudaFuncSetAttribute(second, cudaFuncAttributeMaxDynamicSharedMemorySize, small));
  Numbers<u64> before(256), after(256);
  // Clocks of an SM between two kernels that note them; `kind` 0: the first alone, 1: both, 2: the second a dependent.
  auto once = [&](int kind, u64 early, int shared) {
    CHECK(cudaMemset(before.device, 0, 2048));
    CHECK(cudaMemset(after.device, 0, 2048));
    launch(first, sms, large, false, u64(600000), never);  // the host queues meanwhile
    mark<<<sms * 4, 32>>>(before.device);
    launch(first, sms, large, false, u64(taken), early);
    if (kind) launch(second, 2 * sms, shared, kind == 2);
    mark<<<sms * 4, 32>>>(after.device);
    auto &a = before.get(), &b = after.get();
    std::vector<double> per_sm;
    for (int i = 0; i < 256; i++)
      if (a[i] && b[i]) per_sm.push_back(double(b[i]) - double(a[i]));
    return median(per_sm);
  };
  struct Case {
    const char* name;
    int kind;
    u64 early;
    int shared;
  };
  const Case cases[] = {
      {"alone", 0, never, 0},          {"behind", 1, never, small},     {"told_at_the_end", 2, never, small},
      {"told_late", 2, 55000, small},  {"told_early", 2, 5000, small},  {"told_late_beside", 2, 55000, 0},
      {"behind_small", 1, never, 0},
  };
  const int count = sizeof(cases) / sizeof(*cases);
  std::vector<std::vector<double>> found(count);
  for (int pass = 0; pass < 25; pass++)
    for (int i = 0; i < count; i++) {
      int at = (i * 3 + pass) % count;  // another order in each pass
      double clocks = once(cases[at].kind, cases[at].early, cases[at].shared);
      if (pass >= 3) found[at].push_back(clocks);
    }
  double alone = median(found[0]);
  result("dependents.alone", alone, "clk");
  for (int i = 1; i < count; i++) {
    // Less its own time: the clocks that starting it adds.
    result(std::string("dependents.added.") + cases[i].name, median(found[i]) - alone - OWN, "clk");
    auto sorted = found[i];
    std::sort(sorted.begin(), sorted.end());
    result(std::string("dependents.least.") + cases[i].name, sorted.front() - alone - OWN, "clk");
    result(std::string("dependents.most.") + cases[i].name, sorted.back() - alone - OWN, "clk");
  }
  return 0;
}
