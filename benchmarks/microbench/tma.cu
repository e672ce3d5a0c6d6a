// Copies into shared memory: latency of one, and the rate of rings of copies on 1 to all SMs, from L2 and from memory.
// "rows": boxes of rows of 128 bytes, far apart, by a tensor map with 128-byte swizzle; "flat": contiguous bytes.
#include "common.cuh"

constexpr int kMostStages = 16;

struct Plan {
  u64 window;      // bytes that the copies of one SM, or of all when `same`, come from: a power of two of boxes
  u32 bytes, stages, copies, same, rows;
};

__global__ void copies(const __grid_constant__ CUtensorMap map, const char* memory, Plan plan, u64* out) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ u64 storage[kMostStages];
  u32 barriers = shared_address(storage), base = shared_address(shared);
  for (u32 i = 0; i < plan.stages; i++) mbarrier_init(barriers + 8 * i, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  u64 per = plan.window / plan.bytes;
  u64 place = plan.same ? 0 : u64(blockIdx.x) * per;
  u32 skew = plan.same ? blockIdx.x / 2 * 3 : 0, mask = u32(per - 1), rows_of_box = plan.bytes / 128;
  auto start = [&](u32 i, u32 stage) {
    u64 box = place + ((i + skew) & mask);
    u32 barrier = barriers + 8 * stage;
    mbarrier_expect(barrier, plan.bytes);
    u32 to = base + stage * plan.bytes;
    if (plan.rows) {
      int row = int(box) * int(rows_of_box);
      asm volatile(
          "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
          "l"(&map), "r"(0), "r"(row), "r"(barrier)
          : "memory");
    } else {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                   "l"(memory + box * plan.bytes), "r"(plan.bytes), "r"(barrier)
                   : "memory");
    }
  };
  u64 begin = clock_now(), ns = nanoseconds();
  for (u32 i = 0; i < plan.stages; i++) start(i, i);
  u64 issued = clock_now() - begin;
  u32 stage = 0, parity = 0;
  for (u32 i = plan.stages; i < plan.copies + plan.stages; i++) {
    mbarrier_wait(barriers + 8 * stage, parity);
    if (i < plan.copies) start(i, stage);
    if (++stage == plan.stages) stage = 0, parity ^= 1;
  }
  u64 end = clock_now();
  u64* mine = out + 4 * blockIdx.x;
  mine[0] = end - begin, mine[1] = nanoseconds() - ns, mine[2] = issued;
}

__global__ void touch(const char* memory, u64 bytes, u32* sink) {
  u32 sum = 0;
  for (u64 i = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * 16; i < bytes; i += u64(gridDim.x) * blockDim.x * 16)
    sum += __ldcg(reinterpret_cast<const uint4*>(memory + i)).x;
  if (sum == 12345) *sink = sum;
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

int main() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state;
#if CUDART_VERSION >= 12050
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &state));
#else
  CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &state));
#endif
  auto encode = reinterpret_cast<Encode>(found);
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  u64 size = 6ull << 30, stride = 128 * 384;
  char* memory;
  CHECK(cudaMalloc(&memory, size));
  CHECK(cudaMemset(memory, 0, size));
  Numbers<u32> sink(1);
  CHECK(cudaFuncSetAttribute(copies, cudaFuncAttributeMaxDynamicSharedMemorySize, 224 * 1024));

  auto run = [&](const std::string& name, Plan plan, int ctas, bool warm) {
    CUtensorMap map;
    cuuint64_t dims[2] = {64, size / stride}, strides[1] = {stride};
    cuuint32_t box[2] = {64, plan.rows ? plan.bytes / 128 : 1}, steps[2] = {1, 1};
    if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, memory, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)) {
      std::fprintf(stderr, "%s: no tensor map\n", name.c_str());
      return;
    }
    Numbers<u64> out(4 * ctas);
    for (int pass = 0; pass < (warm ? 3 : 1); pass++) {
      if (!warm) touch<<<528, 256>>>(memory + (4ull << 30), 256ull << 20, sink.device);
      copies<<<ctas, 1, plan.bytes * plan.stages>>>(map, memory, plan, out.device);
    }
    auto& got = out.get();
    std::vector<double> clocks, rates;
    for (int i = 0; i < ctas; i++) {
      clocks.push_back(double(got[4 * i]));
      rates.push_back(double(plan.copies) * plan.bytes / double(got[4 * i]));
    }
    if (plan.copies == 1)
      result("tma.latency." + name, median(clocks), "clk");
    else
      result("tma.rate." + name, median(rates), "byte/clk/SM");
    if (plan.stages > 1) result("tma.issue." + name, double(got[2]) / plan.stages, "clk");
  };
  auto label = [](const char* kind, const char* from, u32 bytes, u32 stages, int ctas) {
    return std::string(kind) + "." + from + "." + std::to_string(bytes / 1024) + "KBx" + std::to_string(stages) + ".sms" + std::to_string(ctas);
  };
  for (u32 rows : {0u, 1u}) {
    const char* kind = rows ? "rows" : "flat";
    for (u32 bytes : {1024u, 8192u, 16384u}) {
      run(label(kind, "L2", bytes, 1, 1), {bytes, bytes, 1, 1, 0, rows}, 1, true);
      run(label(kind, "HBM", bytes, 1, 1), {bytes, bytes, 1, 1, 0, rows}, 1, false);
    }
    for (int ctas : {1, sms / 2, sms}) {
      for (u32 stages : {1u, 2u, 4u, 6u, 8u, 12u}) {
        u32 bytes = 16384;
        u64 window = rows ? 8ull << 20 : 16ull << 20;
        if (rows && stages != 4 && stages != 6 && stages != 12) continue;
        run(label(kind, "L2.same", bytes, stages, ctas), {window, bytes, stages, 1024, 1, rows}, ctas, true);
        if (!rows) run(label(kind, "L2.own", bytes, stages, ctas), {131072, bytes, stages, 1024, 0, rows}, ctas, true);
        if (rows && ctas == sms) {
          run(label(kind, "L2.same.32MB", bytes, stages, ctas), {32ull << 20, bytes, stages, 1024, 1, rows}, ctas, true);
        }
        if (!rows) run(label(kind, "HBM", bytes, stages, ctas), {16ull << 20, bytes, stages, 1024, 0, rows}, ctas, false);
      }
    }
  }
  for (u32 bytes : {2048u, 4096u, 8192u}) run(label("flat", "L2.same", bytes, 8, 1), {8ull << 20, bytes, 8, 2048, 1, 0}, 1, true);
  for (u32 bytes : {2048u, 4096u, 8192u}) run(label("flat", "HBM", bytes, 16, sms), {16ull << 20, bytes, 16, 2048, 0, 0}, sms, false);
  for (u32 bytes : {8192u}) run(label("flat", "HBM", bytes, 12, sms), {16ull << 20, bytes, 12, 2048, 0, 0}, sms, false);
  return 0;
}
