// The machine's state: program, launch, cluster, CTA, warp; and the fault that ends a run.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "counts.h"
#include "numbers.h"
#include "standard.h"
#include "trace.h"

class Events;
struct Cluster;
struct Cta;
struct Warp;
struct WarpGroup;    // wgmma.cpp
struct Accumulator;  // wgmma.cpp
class GlobalTouches;  // global_touches.h
class Found;          // events.h

// ---- what Python hands over -------------------------------------------------------------------------------------

constexpr s32 kNone = INT32_MIN;  // operand that is absent, or a result that nobody reads

// Operands are register slots (>= 0) or constants (~index). Written by core/binding.py in this layout.
struct Insn {
  u16 op;
  u8 bits;   // 1: the guard is negated; 2: reads what tcgen05.ld loaded; 4: writes a wgmma operand; of machine code
             // alone, if any lane executes it: 8: all lanes do; 16: one lane does
  u8 width;  // element bytes of memory instructions
  s32 guard;
  s32 d, a, b, c, e;
  u32 flags;
  u32 first;  // operand list: program.lists[first .. first + count)
  u16 count;
  u16 extra;
  s64 imm;
};
static_assert(sizeof(Insn) == 48);

struct Program {
  std::vector<Insn> code;
  std::vector<s32> lists;
  std::vector<u32> constants;  // one value per constant slot, the same in every lane
  u32 slots = 0;
  const s32* list(const Insn& in) const { return lists.data() + in.first; }
};

struct Region {
  u64 address, size;
  u32 writable, index;
};

struct LaunchRecord {
  u32 grid[3], block[3], cluster[3];
  u32 static_shared, dynamic_shared, param_bytes, architecture, pdl;  // architecture: 90, 100, 103
  u32 clusters_talk;  // they order each other by atomics, releases or acquires of global memory
  u32 machine_code;   // the system's part of shared memory is the code's own
  u32 cooperative;    // they are all there at the same time, and may wait for each other
  const u8* params;
};

enum AsyncMode : u32 { kEager = 0, kRandom = 1, kLate = 2 };

struct Options {
  u32 mode, quantum, happens_before, lenient_tensor, lockstep, poison, threads, elect_highest, count, findings;
  u32 tests_fail;     // first tries of mbarrier.test_wait
  u32 hardware_sums;  // products of matrices are summed as tensor cores do
  u32 starved_count;
  const u32* starved;
  u32 only_traced;  // run no other clusters
  u32 traced_count;
  const u32* traced;  // clusters
  u64 seed, limit;
};

// ---- faults -----------------------------------------------------------------------------------------------------

struct Fault {
  std::string kind, message;
};
[[noreturn]] void fault(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- waiting ----------------------------------------------------------------------------------------------------

enum class Wait : u8 {
  Nothing,
  Converge,
  Mbarrier,
  Named,
  ClusterBarrier,
  BulkGroup,
  Wgmma,
  Tcgen05,
  CpAsync,
  Registers,
  Alloc,
  Pair,
  Lanes
};

// Lanes of one warp that share a program counter. `wait` says why they cannot go on.
struct Group {
  u32 pc = 0, mask = 0;
  Wait wait = Wait::Nothing;
  u32 argument = 0;      // mbarrier address, barrier id, allowed groups, ...
  u32 generation = 0;    // phase or generation waited for
  Cta* where = nullptr;  // CTA that owns the barrier
};

enum class Step { Next, Jump, Yield, Block, Exit };

struct RandomSource {
  u64 state;
  u64 wide() {
    state += 0x9e3779b97f4a7c15ull;
    u64 z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u32 next() { return u32(wide() >> 16); }
  u32 below(u32 n) { return u32(u64(next()) * n >> 32); }
};

// ---- asynchronous work ------------------------------------------------------------------------------------------

// One asynchronous operation; `run` does all its effects.
struct AsyncOp {
  u32 pc = 0;
  Warp* issuer = nullptr;
  u32 actor = 0;  // happens-before actor of this operation, 0 when not tracked
  virtual ~AsyncOp() = default;
  virtual void run(Cluster&) = 0;
};

// Operations that execute in order; streams are unordered among each other.
struct Stream {
  std::deque<std::unique_ptr<AsyncOp>> ops;
  bool queued = false;
  bool alone = false;  // made for one operation, dropped after it
};

class AsyncQueue {
 public:
  void push(Stream& stream, std::unique_ptr<AsyncOp> op);
  void push_alone(std::unique_ptr<AsyncOp> op);
  ~AsyncQueue();
  bool empty() const { return active_.empty(); }
  void run_one(Cluster&, RandomSource&);

 private:
  std::vector<Stream*> active_;
};

// ---- barriers ---------------------------------------------------------------------------------------------------

struct Mbarrier {
  u32 offset = 0;
  bool live = false;
  u32 phase = 0;  // completed phases
  s64 pending = 0, expected = 0, transactions = 0;
  static constexpr s64 most_transactions = (1 << 20) - 1;
  u32 sync = 0;              // happens-before object
  Warp* unfenced = nullptr;  // who initialised it and has not fenced that, when somebody listens
  struct Arrival {
    Warp* warp;
    u32 pc, phase;
  };
  std::vector<Arrival> arrivals;  // who ever arrived and in which phase last, for the deadlock report
};

struct NamedBarrier {
  u32 expected = 0, arrived = 0, generation = 0;
  u32 sync = 0;
  bool used = false;
};

// ---- memories ---------------------------------------------------------------------------------------------------

constexpr u32 kSharedBase = 0x400;  // the first KiB of the window is the system's
constexpr u32 kRankShift = 24;
constexpr u32 kOffsetMask = 0xffffff;
enum Shadow : u8 { kUnwritten = 0, kWritten = 1, kBarrier = 2 };

struct TensorMemory {
  static constexpr u32 lanes = 128, columns = 512;
  std::vector<u32> cells;      // [lane][column]
  std::vector<u8> written;     // same shape
  u8 allocated[columns] = {};  // per column: 0 free, else 1 + allocation number
  u32 allocations = 0, reserved = 0;  // reserved: the first column of the last allocation
  bool relinquished = false;
  u32* at(u32 lane, u32 column) { return cells.data() + lane * columns + column; }
};

struct Cta {
  Cluster* cluster = nullptr;
  u32 id[3] = {};
  u32 rank = 0;
  bool ended = false;          // its shared memory may be another CTA's
  std::vector<u8> shared;  // indexed by window offset
  std::vector<u8> shadow;
  std::vector<s16> mbarrier_at;  // per 8 bytes: index or -1
  std::vector<Mbarrier> mbarriers;
  NamedBarrier named[16];
  std::unique_ptr<TensorMemory> tmem;
  Stream tensor_stream;  // tcgen05 of the CTA, in order
  u32 tensor_actor = 0;  // happens-before actor of the last tcgen05.mma issued
  u32 tensor_copy_actor = 0;  // of the last tcgen05.cp
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<Shared<WarpGroup>> warpgroups;
  std::vector<u32> register_counts;  // per warp, as setmaxnreg leaves them
  u32 register_pool = 0;             // of the CTA: what its warps have at launch, all together

  u32 live_warps() const;
};

// One commit group of bulk stores of a thread.
struct BulkGroup {
  u32 reading = 0, writing = 0;       // operations that still read shared memory, that still write global memory
  std::vector<u32> readers, writers;  // happens-before actors to join when somebody waits for the group
};

// Bulk stores of one thread: groups that it committed, and the one that it will.
struct BulkThread {
  std::deque<Shared<BulkGroup>> groups;
  Shared<BulkGroup> open;
  u32 writer = 0;  // happens-before actor of its last write
};

// A convergence barrier of machine code: whom each lane waits for, and who is there.
struct LaneMeeting {
  u32 members[32] = {}, arrived = 0;
};

struct Warp {
  Cta* cta = nullptr;
  u32 index = 0, number = 0;  // in the CTA; in the cluster
  u32 live = 0;
  std::vector<Group> groups;
  u32 current = 0;
  std::vector<u32> file;
  u32* registers = nullptr;
  const u32* constants = nullptr;
  u64 executed = 0;
  bool polling = false;  // in its last slice it did nothing but try, and failed
  struct Failure {
    u32 pc = ~0u;
    u64 progress = ~0ull, executed = 0;  // the cluster's, and the warp's own, when it failed last
    bool again = false;                  // it failed there before, and nothing has changed since
  } failure;  // of its tries
  u32 polled_pc = ~0u;     // its last strong load of global memory, and what that found
  u64 polled[2] = {};
  u32 failed_pc = ~0u, failed_address = 0;
  bool made_fail = false;  // its last mbarrier instruction was a test that was made to fail
  u32 actor = 0;
  Traced* trace = nullptr;  // null unless somebody asked for it
  u32 role_pc = ~0u;  // of the setmaxnreg that it executed last: warps that share it play one role
  u32 tensor_actors[32] = {};     // of each lane's last tcgen05.mma
  u32 tensor_copy_actors[32] = {};  // of each lane's last tcgen05.cp
  u32 commit_actors[32] = {};     // of each lane's last tcgen05.commit
  u32 load_boards[6] = {};        // per scoreboard of machine code: the tcgen05.ld that it stands for
  std::vector<u32> load_numbers;  // per slot: the tcgen05.ld that its value came from, when somebody listens
  u32 cluster_generation = ~0u;   // of the last barrier.cluster.arrive, until its wait
  LaneMeeting meetings[16];
  u32 meeting = 0;                // 1 + the generation of the meeting that it waits for

  std::array<BulkThread, 32> bulk;
  Stream copies;  // cp.async and their mbarrier arrivals, in order
  u64 copies_issued = 0, copies_done = 0;
  std::deque<u64> copy_groups;                  // number of the last copy of each committed group
  struct LanesCopy {
    u64 number;
    u32 actor, lanes;  // who it is to happens-before, and for which lanes
  };
  std::deque<LanesCopy> copy_actors;  // nobody waited for them yet
  Stream tmem_stores;
  std::vector<u32> tmem_store_actors;
  std::vector<Shared<Accumulator>> accumulators;  // wgmma results that have not landed
  u64 wgmma_issued = 0;
  u32 wgmma_fences = 0;
  std::vector<u32> touched;      // per slot: wgmma_fences when it was last accessed, when somebody listens
  std::vector<u64> multiplied;   // per slot: 1 + the number of the last wgmma whose operand it is, when somebody listens
  std::deque<u64> wgmma_groups;  // open commit groups: number of the last instruction
  u64 wgmma_retired = 0;

  const u32* read(s32 slot) const { return slot >= 0 ? registers + slot * 32 : constants + (~slot) * 32; }
  u32* write(s32 slot) { return registers + (slot == kNone ? 0 : slot) * 32; }
  bool finished() const { return live == 0; }
};

// ---- cluster ----------------------------------------------------------------------------------------------------

// Where the warps of two CTAs meet that execute one tcgen05.alloc or dealloc of a pair.
struct Meeting {
  u32 arrived = 0, generation = 0;
  u32 op = 0, columns = 0;  // of who arrived first
  u32 sync = 0;             // happens-before object
};

struct Machine;  // everything the clusters of a launch share

struct Cluster {
  const Machine& machine;
  const Program& program;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<Warp*> warps;
  std::vector<u32> constants;
  AsyncQueue async;
  RandomSource random;
  u64 index;                       // in the launch
  std::unique_ptr<Events> events;  // null when happens-before is off
  u32 barrier_arrived = 0, barrier_generation = 0, barrier_sync = 0;
  std::vector<u8> barrier_arrival;  // per warp: arrived in this generation
  std::vector<Meeting> meetings;    // per pair of CTAs
  u64 progress = 0;                 // bumped whenever a wait may have become satisfied
  Warp* running = nullptr;
  u32 running_pc = 0;

  Cluster(const Machine&, u64 index);
  ~Cluster();
  // Runs until its end, or for about so many warp instructions (0: any number), or until all of its warps wait, some
  // for other clusters; false when it is not at its end.
  bool run(u64 most);
  bool waits_for_others() const { return waits_for_others_; }
  [[noreturn]] void report_deadlock();
  Cta& cta_at(u32 shared_address, const char* what);

 private:
  void start_warp(Warp&);
  u32 run_slice(Warp&, u32 quantum);
  bool wake(Warp&);
  bool satisfied(Warp&, const Group&);
  void merge(Warp&);
  bool starved(const Warp&) const;
  bool any_runnable_polling();
  bool only_tries(Warp&);
  bool any_polls_global();
  void finish();

  std::vector<Warp*> order_;
  u64 executed_ = 0, idle_rounds_ = 0, seen_progress_ = ~0ull, progressed_at_ = 0;
  bool waits_for_others_ = false;
};

struct Machine {
  const Program& program;
  const LaunchRecord& launch;
  const Options& options;
  std::vector<Region> regions;     // by address
  std::unique_ptr<Counts> counts;  // null unless asked for
  std::unique_ptr<GlobalTouches> touches;  // null when nobody listens, or clusters of a launch that is not cooperative
                                           // order each other by global memory
  std::vector<std::vector<Traced>> traces;  // by traced cluster and warp in it
  std::unique_ptr<Found> found;             // null when nobody listens
  u64 clusters = 0;                         // that run
  mutable std::atomic<u64> next{0};         // the first cluster that has not started
  mutable std::atomic<u64> changes{0};      // of global memory, by stores and atomics

  // For a cluster that asks to do the work of another.
  bool take_cluster(Cluster&, u64& taken) const;
  Traced* trace_of(u64 cluster, u32 warp) const;
  const Region* region_of(u64 address) const;
  // A global address, for a report.
  std::string place(u64 address) const;
};
