// Barriers in memory (mbarrier), named barriers and the cluster barrier.
#include "ops.h"

namespace {

void complete_if_due(Cluster& cluster, Mbarrier& b) {
  if (b.pending < 0)
    fault("barrier", "mbarrier at shared offset 0x%x: more arrivals in phase %u than its count of %lld", b.offset,
          b.phase, (long long)b.expected);
  if (b.pending == 0 && b.transactions == 0) {
    b.phase++;
    b.pending = b.expected;
    if (cluster.events) cluster.events->publish(b.sync);
    cluster.progress++;
  }
}

// PTX ISA 9.7.13.15.2: the range of a transaction count.
void transact(Mbarrier& b, s64 bytes) {
  b.transactions += bytes;
  if (b.transactions > Mbarrier::most_transactions || b.transactions < -Mbarrier::most_transactions)
    fault("barrier", "mbarrier at shared offset 0x%x: a transaction count of %lld bytes; 2^20 - 1 is the most", b.offset,
          (long long)b.transactions);
}

void note_arrival(Mbarrier& b, Warp* by, u32 pc) {
  for (auto& arrival : b.arrivals) {
    if (arrival.warp == by && arrival.pc == pc) {
      arrival.phase = b.phase;
      return;
    }
  }
  if (b.arrivals.size() < 64) b.arrivals.push_back({by, pc, b.phase});
}

Cta& owner_of(Context& c, u64 address, const char* what) {
  if ((c.in.flags & 7) == kShared && (u32(address) >> kRankShift) != c.warp.cta->rank)
    fault("barrier", "%s in shared::cta at 0x%llx, which belongs to CTA %u of the cluster", what,
          (unsigned long long)address, u32(address) >> kRankShift);
  return c.cluster.cta_at(u32(address), what);
}

Step initialise(Context& c) {
  u32 first = u32(__builtin_ctz(c.mask));
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    bool alike = address == c.address(first) && c.warp.read(c.in.b)[lane] == c.warp.read(c.in.b)[first];
    if (lane != first && alike && c.cluster.machine.options.lenient_tensor) continue;
    Cta& cta = owner_of(c, address, "mbarrier.init");
    u32 offset = u32(address) & kOffsetMask;
    shared_at(c.cluster, cta, offset, 8, 8, "mbarrier.init");
    u32 count = c.warp.read(c.in.b)[lane];
    if (count == 0 || count >= 1u << 20) fault("barrier", "mbarrier.init with count %u (1 to 2^20 - 1)", count);
    if (cta.mbarrier_at[offset / 8] >= 0 && cta.mbarriers[size_t(cta.mbarrier_at[offset / 8])].live)
      fault("barrier", "mbarrier at shared offset 0x%x is initialised again while it is live", offset);
    if (cta.mbarrier_at[offset / 8] < 0) {
      cta.mbarrier_at[offset / 8] = s16(cta.mbarriers.size());
      cta.mbarriers.emplace_back();
    }
    Mbarrier& b = cta.mbarriers[size_t(cta.mbarrier_at[offset / 8])];
    b = Mbarrier{};
    b.offset = offset, b.live = true, b.pending = b.expected = count;
    if (c.warp.trace) c.warp.trace->note(Note::kInit, u32(address), count);
    std::fill_n(cta.shadow.begin() + offset, 8, u8(kBarrier));
    if (c.cluster.events) {
      b.sync = c.cluster.events->new_sync(), b.unfenced = c.in.flags & kNeedsNoFence ? nullptr : &c.warp;
      c.cluster.events->shared(c.actor(), c.group.pc, Proxy::Generic, Kind::Write, cta.rank, offset, 8, {u8(lane)});
    }
  }
  return Step::Next;
}

Step invalidate(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    Cta& cta = owner_of(c, address, "mbarrier.inval");
    Mbarrier& b = mbarrier_of(c.cluster, u32(address), "mbarrier.inval");
    b.live = false;
    std::fill_n(cta.shadow.begin() + b.offset, 8, u8(kUnwritten));
    if (c.cluster.events)
      c.cluster.events->shared(c.actor(), c.group.pc, Proxy::Generic, Kind::Write, cta.rank, b.offset, 8, {u8(lane)});
  }
  return Step::Next;
}

// The initialisation must be known to whoever uses the barrier.
void uses(Context& c, Cta& cta, u32 offset, u32 lane) {
  if (c.cluster.events)
    c.cluster.events->shared(c.actor(), c.group.pc, Proxy::Generic, Kind::Read, cta.rank, offset, 8, {u8(lane)});
}

// A barrier that lanes of an instruction, one after the other, find complete. Only those who listen are interested.
struct Waited {
  Context& c;
  Mbarrier* barrier = nullptr;
  Cta* cta = nullptr;
  u32 lane = 0;

  void add(Mbarrier& b, Cta& of, u32 by) {
    if (!c.cluster.events) return;
    if (barrier == &b) {
      lane = Lanes::all;
      return;
    }
    flush();
    barrier = &b, cta = &of, lane = by;
  }
  void flush() {
    if (!barrier) return;
    uses(c, *cta, barrier->offset, lane);
    c.cluster.events->acquire(c.actor(), barrier->sync, c.in.flags & kRelaxed);
    barrier = nullptr;
  }
};

Step arrive(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    Cta& cta = owner_of(c, address, "mbarrier.arrive");
    Mbarrier& b = mbarrier_of(c.cluster, u32(address), "mbarrier.arrive");
    uses(c, cta, b.offset, lane);
    u32 value = c.warp.read(c.in.b)[lane];
    if (c.in.d != kNone) {
      u32* state = c.warp.write(c.in.d);
      state[lane] = b.phase, state[lane + 32] = 0;
    }
    if (c.in.extra) transact(b, value);
    if (c.warp.trace) c.warp.trace->note(Note::kArrive, u32(address), c.in.extra ? 1 : value, c.in.extra ? value : 0);
    mbarrier_arrive(c.cluster, b, c.in.extra ? 1 : value, &c.warp, c.group.pc, c.actor(), c.in.flags & kRelaxed);
  }
  return Step::Next;
}

Step expect_or_complete(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    owner_of(c, address, "mbarrier.expect_tx");
    Mbarrier& b = mbarrier_of(c.cluster, u32(address), "mbarrier.expect_tx");
    s64 bytes = s64(c.warp.read(c.in.b)[lane]);
    if (c.warp.trace && c.in.op == OP_MBARRIER_EXPECT) c.warp.trace->note(Note::kArrive, u32(address), 0, u64(bytes));
    if (c.in.op == OP_MBARRIER_EXPECT)
      transact(b, bytes);
    else
      mbarrier_transact(c.cluster, b, bytes, 0);  // it is always relaxed
  }
  return Step::Next;
}

// Each lane asks about its own barrier. A failed try yields; a second one in the same place waits for the phase,
// which the time-limited instruction may always do.
Step try_wait(Context& c) {
  u32* result = c.warp.write(c.in.d);
  bool made_to_fail = c.cluster.machine.options.tests_fail && c.in.extra & 2 && !c.warp.made_fail;
  c.warp.made_fail = made_to_fail;
  u32 failed = 0, failed_address = 0;
  Cta* failed_cta = nullptr;
  u32 failed_phase = 0;
  Waited waited{c};
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    Cta& cta = owner_of(c, address, "mbarrier.try_wait");
    Mbarrier& b = mbarrier_of(c.cluster, u32(address), "mbarrier.try_wait");
    u32 asked = c.warp.read(c.in.b)[lane];
    bool done = c.in.extra & 1 ? b.phase != asked : (b.phase & 1) != (asked & 1);
    done &= !made_to_fail;
    result[lane] = done ? ~0u : 0u;
    if (done && c.warp.trace && rest == c.mask) c.warp.trace->note(Note::kWait, u32(address), b.phase);
    if (done) {
      if (!failed_cta) waited.add(b, cta, lane);
    } else {
      failed |= 1u << lane, failed_address = u32(address), failed_cta = &cta, failed_phase = b.phase;
    }
  }
  waited.flush();
  if (!failed) {
    c.warp.failed_pc = ~0u;
    return Step::Next;
  }
  if (c.in.extra & 4) return Step::Next;
  bool again = c.warp.failed_pc == c.group.pc && c.warp.failed_address == failed_address;
  c.warp.failed_pc = c.group.pc, c.warp.failed_address = failed_address;
  if (again && failed == c.mask && !(c.in.extra & 2)) {
    c.warp.failed_pc = ~0u;
    return c.block(Wait::Mbarrier, failed_cta, failed_address & kOffsetMask, failed_phase);
  }
  return Step::Yield;
}

void release_named(Cluster& cluster, NamedBarrier& b) {
  b.arrived = 0, b.expected = 0;
  b.generation++;
  if (cluster.events) cluster.events->publish(b.sync);
  cluster.progress++;
}

void release_cluster(Cluster& cluster) {
  cluster.barrier_arrived = 0;
  std::fill(cluster.barrier_arrival.begin(), cluster.barrier_arrival.end(), u8(0));
  cluster.barrier_generation++;
  if (cluster.events) cluster.events->publish(cluster.barrier_sync);
  cluster.progress++;
}

u32 live_warps(const Cluster& cluster) {
  u32 count = 0;
  for (const Warp* w : cluster.warps) count += !w->finished();
  return count;
}

}  // namespace

Mbarrier& mbarrier_of(Cluster& cluster, u32 address, const char* what) {
  Cta& cta = cluster.cta_at(address, what);
  u32 offset = address & kOffsetMask;
  shared_at(cluster, cta, offset, 8, 8, what);
  s16 index = cta.mbarrier_at[offset / 8];
  if (index < 0 || !cta.mbarriers[size_t(index)].live)
    fault("barrier", "%s on shared offset 0x%x of CTA %u, where no mbarrier was initialised", what, offset, cta.rank);
  return cta.mbarriers[size_t(index)];
}

void mbarrier_arrive(Cluster& cluster, Mbarrier& b, s64 count, Warp* by, u32 pc, u32 actor, bool relaxed) {
  note_arrival(b, by, pc);
  b.pending -= count;
  if (cluster.events) cluster.events->release(actor, b.sync, relaxed);
  complete_if_due(cluster, b);
}

void mbarrier_transact(Cluster& cluster, Mbarrier& b, s64 bytes, u32 actor) {
  transact(b, -bytes);
  if (cluster.events) cluster.events->release(actor, b.sync);
  complete_if_due(cluster, b);
}

void mbarrier_fence(Warp& w) {
  for (auto& cta : w.cta->cluster->ctas)
    for (Mbarrier& b : cta->mbarriers)
      if (b.unfenced == &w) b.unfenced = nullptr;
}

Mbarrier& mbarrier_of_engine(Cluster& cluster, u32 address, const char* what) {
  Mbarrier& b = mbarrier_of(cluster, address, what);
  if (b.unfenced)
    fault("race",
          "%s on the mbarrier at shared offset 0x%x, which warp %u initialised without a fence.mbarrier_init "
          "after it",
          what, b.offset, b.unfenced->index);
  return b;
}

Step op_mbarrier(Context& c) {
  if (c.in.op != OP_MBARRIER_TRY) c.warp.made_fail = false;
  switch (c.in.op) {
    case OP_MBARRIER_INIT:
      return initialise(c);
    case OP_MBARRIER_INVALIDATE:
      return invalidate(c);
    case OP_MBARRIER_ARRIVE:
      return arrive(c);
    case OP_MBARRIER_TRY:
      return try_wait(c);
    default:
      return expect_or_complete(c);
  }
}

Step op_named(Context& c, bool waits) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("barrier");
  u32 lane = c.lane();
  u32 id = c.warp.read(c.in.a)[lane];
  if (id >= 16) fault("budget", "named barrier %u: a CTA has 16 (0 to 15)", id);
  Cta& cta = *c.warp.cta;
  NamedBarrier& b = cta.named[id];
  u32 threads = c.in.b == kNone ? 0 : c.warp.read(c.in.b)[lane];
  if (threads % 32) fault("barrier", "named barrier %u with %u threads, not a multiple of 32", id, threads);
  if (!waits && !threads) fault("barrier", "bar.arrive on barrier %u without a thread count", id);
  if (threads > cta.warps.size() * 32)
    fault("barrier", "named barrier %u waits for %u threads, the CTA has %zu", id, threads, cta.warps.size() * 32);
  if (b.arrived && b.expected != threads)
    fault("barrier", "named barrier %u is used with %u threads while arrivals for %u wait at it", id, threads,
          b.expected);
  if (c.cluster.events) {
    if (!b.used) b.sync = c.cluster.events->new_sync();
    c.cluster.events->release(c.warp.actor, b.sync);
  }
  b.used = true;
  b.expected = threads;
  b.arrived += 32;
  u32 generation = b.generation;
  u32 needed = threads ? threads : cta.live_warps() * 32;
  if (b.arrived > needed)
    fault("barrier", "named barrier %u: %u threads arrived, it expects %u", id, b.arrived, needed);
  if (c.warp.trace) c.warp.trace->note(Note::kNamed, id, needed);
  if (b.arrived == needed) {
    release_named(c.cluster, b);
    if (waits && c.cluster.events) pass_named(c.cluster, c.warp, b);
    return waits ? Step::Yield : Step::Next;
  }
  return waits ? c.block(Wait::Named, &cta, id, generation) : Step::Next;
}

Step op_cluster_arrive(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  Cluster& cluster = c.cluster;
  if (cluster.barrier_arrival[c.warp.number])
    fault("barrier", "barrier.cluster.arrive twice in one phase, without a wait between");
  cluster.barrier_arrival[c.warp.number] = 1;
  c.warp.cluster_generation = cluster.barrier_generation;
  if (cluster.events) cluster.events->release(c.warp.actor, cluster.barrier_sync, c.in.flags & 1);
  if (++cluster.barrier_arrived == live_warps(cluster)) release_cluster(cluster);
  return Step::Next;
}

Step op_cluster_wait(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  if (c.warp.cluster_generation == ~0u) fault("barrier", "barrier.cluster.wait without an arrive before it");
  if (c.cluster.barrier_generation == c.warp.cluster_generation)
    return c.block(Wait::ClusterBarrier, nullptr, 0, c.warp.cluster_generation);
  c.warp.cluster_generation = ~0u;
  if (c.cluster.events) {
    c.cluster.events->acquire(c.warp.actor, c.cluster.barrier_sync);
    c.cluster.events->warp_sync(c.warp.actor);
  }
  return Step::Next;
}

void pass_named(Cluster& cluster, const Warp& w, const NamedBarrier& b) {
  cluster.events->acquire(w.actor, b.sync);
  cluster.events->warp_sync(w.actor);
}

void recheck_after_exit(Cluster& cluster, Cta& cta) {
  for (NamedBarrier& b : cta.named)
    if (b.arrived && !b.expected && b.arrived == cta.live_warps() * 32) release_named(cluster, b);
  if (cluster.barrier_arrived && cluster.barrier_arrived == live_warps(cluster)) release_cluster(cluster);
}
