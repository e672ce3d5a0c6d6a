// Gathers of whole rows into shared memory, from a cold L2: lists of 2,048 rows chosen at random of 131,072, dealt to
// all SMs, by cp.async (16 bytes a lane) and by bulk copies (a row each). Nothing reads what was gathered, so the rate
// is the most that a kernel of so many lists can hope for. "in order": the lists name rows one behind the other. With an
// argument: lists of a prompt's tokens, of fewer rows ("of N"), most of which come from L2.
//
// Times are between events around a launch, as those of `python -m benchmarks decode-chosen`: launching is part of
// them. A result's name ends in warps x stages of a warp's ring x rows of a stage.
#include "common.cuh"

#include <numeric>
#include <random>

constexpr u32 kSlots = 131072, kListRows = 2048, kRounds = 30;
constexpr u32 kPromptLists = 4096, kPromptRounds = 10;

struct Work {
  const char* cache;
  const int* lists;
  u32 rows;        // of all lists together
  u32 stage_rows;  // at most 32, that a warp gathers as one stage of its ring
  u32 stages;      // a power of two, at most 4
  u32* sums;       // for each warp, of the 32-bit words that it gathered; null: nobody reads them
};

// Rows [first, end) of this warp, which are gathered in `batches` stages.
struct Part {
  u32 warp, first, end, batches;
};

__device__ inline Part part_of(const Work& work) {
  u32 warps = gridDim.x * (blockDim.x / 32), warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  u32 first = u32(u64(work.rows) * warp / warps), end = u32(u64(work.rows) * (warp + 1) / warps);
  return {warp, first, end, (end - first + work.stage_rows - 1) / work.stage_rows};
}

template <u32 kRowBytes>
__device__ inline u32 sum_of(const char* stage, u32 rows) {
  u32 sum = 0;
  for (u32 i = threadIdx.x % 32; i < rows * kRowBytes / 4; i += 32) sum += reinterpret_cast<const u32*>(stage)[i];
  return sum;
}

template <u32 kRowBytes>
__global__ void by_lanes(Work work) {
  extern __shared__ __align__(128) char shared[];
  constexpr u32 kVectors = kRowBytes / 16;
  Part part = part_of(work);
  u32 lane = threadIdx.x % 32, sum = 0;
  char* ring = shared + threadIdx.x / 32 * work.stages * work.stage_rows * kRowBytes;
  auto rows_of = [&](u32 batch) { return min(work.stage_rows, part.end - part.first - batch * work.stage_rows); };
  auto stage_of = [&](u32 batch) { return ring + (batch & (work.stages - 1)) * work.stage_rows * kRowBytes; };
  auto slot_of = [&](u32 batch) {
    u32 row = part.first + batch * work.stage_rows + lane;
    return lane < work.stage_rows && row < part.end ? __ldg(work.lists + row) : 0;
  };
  int ahead = slot_of(0);
  auto start = [&](u32 batch) {
    int slot = ahead;
    ahead = slot_of(batch + 1);
    u32 vectors = rows_of(batch) * kVectors, target = shared_address(stage_of(batch));
#pragma unroll 8
    for (u32 step = 0; step < vectors; step += 32) {
      u32 vector = step + lane, row = vector / kVectors;
      int from = __shfl_sync(0xffffffff, slot, row & 31);
      if (vector < vectors)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + vector * 16),
                     "l"(work.cache + u64(from) * kRowBytes + (vector - row * kVectors) * 16)
                     : "memory");
    }
  };
  for (u32 batch = 0; batch < work.stages; batch++) {
    if (batch < part.batches) start(batch);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (u32 batch = 0; batch < part.batches; batch++) {
    if (work.stages == 4) asm volatile("cp.async.wait_group 3;" ::: "memory");
    if (work.stages == 2) asm volatile("cp.async.wait_group 1;" ::: "memory");
    if (work.stages == 1) asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    if (work.sums) sum += sum_of<kRowBytes>(stage_of(batch), rows_of(batch));
    __syncwarp();
    if (batch + work.stages < part.batches) start(batch + work.stages);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  if (work.sums) atomicAdd(work.sums + part.warp, sum);
}

template <u32 kRowBytes>
__global__ void by_bulk_copies(Work work) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 storage[32 * 4];
  Part part = part_of(work);
  u32 lane = threadIdx.x % 32, sum = 0, barriers = shared_address(storage + threadIdx.x / 32 * 4);
  char* ring = shared + threadIdx.x / 32 * work.stages * work.stage_rows * kRowBytes;
  auto rows_of = [&](u32 batch) { return min(work.stage_rows, part.end - part.first - batch * work.stage_rows); };
  auto stage_of = [&](u32 batch) { return ring + (batch & (work.stages - 1)) * work.stage_rows * kRowBytes; };
  auto slot_of = [&](u32 batch) {
    u32 row = part.first + batch * work.stage_rows + lane;
    return lane < work.stage_rows && row < part.end ? __ldg(work.lists + row) : 0;
  };
  int ahead = slot_of(0);
  if (lane < work.stages) mbarrier_init(barriers + 8 * lane, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncwarp();
  auto start = [&](u32 batch) {
    int slot = ahead;
    ahead = slot_of(batch + 1);
    u32 rows = rows_of(batch), barrier = barriers + 8 * (batch & (work.stages - 1));
    if (lane == 0) mbarrier_expect(barrier, rows * kRowBytes);
    __syncwarp();
    if (lane < rows)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       shared_address(stage_of(batch)) + lane * kRowBytes),
                   "l"(work.cache + u64(slot) * kRowBytes), "r"(kRowBytes), "r"(barrier)
                   : "memory");
  };
  for (u32 batch = 0; batch < work.stages; batch++) {
    if (batch < part.batches) start(batch);
  }
  for (u32 batch = 0; batch < part.batches; batch++) {
    mbarrier_wait(barriers + 8 * (batch & (work.stages - 1)), batch / work.stages & 1);
    if (work.sums) sum += sum_of<kRowBytes>(stage_of(batch), rows_of(batch));
    __syncwarp();
    if (batch + work.stages < part.batches) start(batch + work.stages);
  }
  if (work.sums) atomicAdd(work.sums + part.warp, sum);
}

// Reads as much of something else as the L2 holds, and twice that.
__global__ void flush(const uint4* other, u64 vectors, u32* sink) {
  u32 sum = 0;
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += u64(gridDim.x) * blockDim.x)
    sum += __ldcg(other + i).x;
  if (sum == 12345) *sink = sum;
}

template <u32 kRowBytes>
std::vector<char> random_rows() {
  std::vector<char> rows(size_t(kSlots) * kRowBytes);
  std::mt19937 random(kRowBytes);
  for (size_t i = 0; i < rows.size(); i += 4) *reinterpret_cast<u32*>(rows.data() + i) = random();
  return rows;
}

// Slots of so many lists, of the first `slots`; a list has none twice.
std::vector<int> lists_of(u32 lists, u32 slots, bool in_order) {
  std::vector<int> all(slots), chosen;
  std::iota(all.begin(), all.end(), 0);
  std::mt19937 random(1);
  for (u32 list = 0; list < lists; list++) {
    for (u32 i = 0; i < kListRows; i++) {
      if (in_order) {
        chosen.push_back(int((list * kListRows + i) % slots));
        continue;
      }
      std::swap(all[i], all[i + random() % (slots - i)]);
      chosen.push_back(all[i]);
    }
  }
  return chosen;
}

struct Rings {
  u32 warps, stages, stage_rows;
};

constexpr Rings kRings[] = {{4, 4, 2}, {4, 4, 8}, {4, 2, 16}, {8, 1, 2}, {8, 2, 4}, {8, 4, 4},
                            {8, 4, 6}, {16, 1, 2}, {16, 1, 8}, {16, 2, 4}, {32, 1, 2}, {32, 2, 2}};

std::string name_of(Rings rings) {
  return std::to_string(rings.warps) + "x" + std::to_string(rings.stages) + "x" + std::to_string(rings.stage_rows);
}

struct Way {
  void (*kernel)(Work);
  const char* name;
};

struct Lists {
  u32 count, slots, rounds;
  bool in_order;
};

std::vector<Lists> lists_of_requests() {
  std::vector<Lists> all;
  for (u32 count : {1u, 2u, 4u, 8u, 16u, 32u, 64u, 128u}) all.push_back({count, kSlots, kRounds, false});
  all.push_back({128, kSlots, kRounds, true});
  return all;
}

std::vector<Lists> lists_of_prompts() {
  return {{kPromptLists, 8192, kPromptRounds, false}, {kPromptLists, 65536, kPromptRounds, false}};
}

std::string name_of(Lists lists) {
  std::string of = lists.slots == kSlots ? "" : " of " + std::to_string(lists.slots);
  return std::to_string(lists.count) + " lists" + of;
}

template <u32 kRowBytes>
void measure(int sms, const std::vector<Lists>& all_lists) {
  std::vector<char> rows = random_rows<kRowBytes>();
  std::vector<u32> row_sums(kSlots);
  for (size_t i = 0; i < rows.size(); i += 4) row_sums[i / kRowBytes] += *reinterpret_cast<u32*>(rows.data() + i);
  Numbers<char> cache(rows.size());
  CHECK(cudaMemcpy(cache.device, rows.data(), rows.size(), cudaMemcpyHostToDevice));
  int l2;
  CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  u64 others = u64(l2) * 3 / 16;
  Numbers<uint4> other(others);
  Numbers<u32> sink(1);
  cudaEvent_t before, after;
  CHECK(cudaEventCreate(&before));
  CHECK(cudaEventCreate(&after));
  std::vector<Way> ways = {{by_lanes<kRowBytes>, "cp_async"}, {by_bulk_copies<kRowBytes>, "bulk"}};
  for (auto [kernel, way] : ways) {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 224 * 1024));
    for (Lists lists : all_lists) {
      std::vector<int> chosen = lists_of(lists.count, lists.slots, lists.in_order);
      u32 all = u32(chosen.size()), want = 0;
      for (int slot : chosen) want += row_sums[slot];
      Numbers<int> slots(all);
      CHECK(cudaMemcpy(slots.device, chosen.data(), all * sizeof(int), cudaMemcpyHostToDevice));
      for (Rings rings : kRings) {
        u32 bytes = rings.warps * rings.stages * rings.stage_rows * kRowBytes;
        if (bytes > 224 * 1024) continue;
        Numbers<u32> sums(sms * rings.warps);
        Work work{cache.device, slots.device, all, rings.stage_rows, rings.stages, sums.device};
        kernel<<<sms, rings.warps * 32, bytes>>>(work);
        CHECK(cudaGetLastError());
        u32 got = 0;
        for (u32 sum : sums.get()) got += sum;
        if (got != want) {
          std::fprintf(stderr, "%s gathered other rows than its lists name (%u bytes a row)\n", way, kRowBytes);
          std::exit(1);
        }
        work.sums = nullptr;
        std::vector<double> micros;
        for (u32 round = 0; round < lists.rounds; round++) {
          float ms = 0;
          flush<<<sms * 8, 256>>>(other.device, others, sink.device);
          CHECK(cudaEventRecord(before));
          kernel<<<sms, rings.warps * 32, bytes>>>(work);
          CHECK(cudaEventRecord(after));
          CHECK(cudaEventSynchronize(after));
          CHECK(cudaEventElapsedTime(&ms, before, after));
          micros.push_back(ms * 1e3);
        }
        std::string of = "gather." + std::string(way) + (lists.in_order ? ".in order." : ".random.") +
                         std::to_string(kRowBytes) + "B." + name_of(lists) + "." + name_of(rings);
        result(of, median(micros), "us");
      }
    }
  }
}

int main(int argc, char**) {
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  std::vector<Lists> lists = argc > 1 ? lists_of_prompts() : lists_of_requests();
  measure<1152>(sms, lists);
  measure<656>(sms, lists);
  if (argc > 1) measure<576>(sms, lists);
  measure<512>(sms, lists);
  return 0;
}
