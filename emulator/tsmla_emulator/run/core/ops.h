// The instructions that are not lane-wise, by family, and what they share.
#pragma once
#include "events.h"
#include "machine.h"

#include "complex_ops.inc"

constexpr u32 kWideAddress = 1u << 9, kSigned = 1u << 8, kFloat = 1u << 10;
constexpr u32 kStrong = 1u << 20, kAcquire = 1u << 21, kRelease = 1u << 22;  // of loads, stores and atomics
constexpr u32 kMulticast = 1u << 16, kPairGroup = 1u << 17, kRelaxed = 1u << 19;
constexpr u32 kGather4 = 1u << 18;       // a tensor copy of four rows that lie anywhere
constexpr u32 kNeedsNoFence = 1u << 23;  // an mbarrier of machine code, as soon as it is initialised
constexpr u32 kToWarp = 1u << 24;  // the result goes to all lanes, whoever executes it
enum Space : u32 { kGeneric = 0, kGlobal = 1, kShared = 2, kSharedCluster = 3, kParam = 4 };

struct Context {
  Cluster& cluster;
  Warp& warp;
  Group& group;
  const Insn& in;
  u32 mask;

  u64 address(u32 lane) const { return address_of(in.a, in.imm, in.flags & kWideAddress, lane); }
  u64 address_of(s32 slot, s64 offset, bool wide, u32 lane) const {
    const u32* p = warp.read(slot);
    return wide ? (u64(p[lane + 32]) << 32 | p[lane]) + u64(offset) : u32(p[lane] + u32(offset));
  }
  u64 value64(s32 slot, u32 lane) const {
    const u32* p = warp.read(slot);
    return u64(p[lane + 32]) << 32 | p[lane];
  }
  // The descriptor of a product's B. Mutants have an operand `e`, the bits of it that they have wrong.
  u64 b_descriptor(s32 slot, u32 lane) const {
    u64 right = value64(slot, lane);
    return in.e == kNone ? right : right ^ value64(in.e, lane);
  }
  // Who executes it, to those who listen: the warp, or one lane alone.
  u32 actor() const {
    bool alone = !(mask & (mask - 1)) && cluster.events;
    return alone ? cluster.events->lane(warp.actor, lane()) : warp.actor;
  }
  u32 lane() const { return u32(__builtin_ctz(mask)); }
  u32 item(u32 index, u32 lane) const { return warp.read(cluster.program.list(in)[index])[lane]; }
  // Blocks the lanes until `wait` is satisfied; the instruction then runs again.
  Step block(Wait wait, Cta* where, u32 argument, u32 generation) const;
  // True when all live lanes are here; otherwise the caller returns block(Wait::Converge ..).
  bool converged() const;
  // Faults when a guard keeps a part of a converged warp away.
  void whole(const char* what) const;
};

void execute_lanes(const Insn&, Warp&, u32 mask);
void execute_sass_lanes(const Insn&, Warp&, u32 mask);
Step execute_complex(Context&);

// memory.cpp
Step op_load(Context&);
Step op_store(Context&);
Step op_atomic(Context&);
Step op_matrix_move(Context&, bool load);
Step op_warp_product(Context&);
// The CTA whose shared memory an address names; shared::cta addresses must be the executing CTA's.
Cta& window(Context&, Space, u64 address);
u8* shared_at(Cluster&, Cta& cta, u32 offset, u32 bytes, u32 align, const char* what);
void shared_written(Cta&, u32 offset, u32 bytes);
void shared_read(Cluster&, Cta&, u32 offset, u32 bytes, const char* what);
u8* global_at(Cluster&, u64 address, u64 bytes, bool write, const char* what);
// Tells those who listen of an access to global memory.
void global_touched(Cluster&, u32 actor, u32 pc, Proxy, Kind, u64 address, u64 bytes, Lanes = {}, bool strong = false);

// copy_async.cpp
Step op_cp_async(Context&);
bool copies_satisfied(const Warp&, u32 allowed);

// barriers.cpp
Step op_mbarrier(Context&);
Step op_named(Context&, bool waits);
// A warp has waited at a named barrier; for those who listen.
void pass_named(Cluster&, const Warp&, const NamedBarrier&);
Step op_cluster_arrive(Context&);
Step op_cluster_wait(Context&);
void mbarrier_arrive(Cluster&, Mbarrier&, s64 count, Warp* by, u32 pc, u32 actor, bool relaxed = false);
void mbarrier_transact(Cluster&, Mbarrier&, s64 bytes, u32 actor);
void recheck_after_exit(Cluster&, Cta&);
void mbarrier_fence(Warp&);
Mbarrier& mbarrier_of(Cluster&, u32 address, const char* what);
// For an asynchronous operation: the initialisation must have been fenced.
Mbarrier& mbarrier_of_engine(Cluster&, u32 address, const char* what);

// warp_ops.cpp
Step op_shuffle(Context&);
Step op_vote(Context&);
Step op_elect(Context&);
Step op_reduce(Context&);
Step op_warp_sync(Context&);
Step op_special(Context&);
Step op_pack(Context&);
Step op_unpack(Context&);
Step op_set_registers(Context&);

// bulk.cpp
Step op_bulk(Context&);
void check_bulk_at_exit(Context&);
bool bulk_satisfied(const Warp&, u32 lanes, u32 allowed, bool reads_only);

// sass_ops.cpp
Step op_sass(Context&);
void open_reserved(Cta&);
bool lanes_met(const Warp&, u32 barrier, u32 lanes);

// cancel.cpp
Step op_cancel(Context&);
Step op_query_cancel(Context&);

// wgmma.cpp
Step op_wgmma(Context&);
bool wgmma_satisfied(const Warp&, u32 allowed);
void touch_registers(Cluster&, Warp&, const Insn&, u32 mask);

// tensor_memory.cpp
Step op_tensor(Context&);
void follow_loads(Cluster&, Warp&, const Insn&);

// Runs at once in eager mode, else when its turn comes.
void submit(Cluster&, Stream*, std::unique_ptr<AsyncOp>);
