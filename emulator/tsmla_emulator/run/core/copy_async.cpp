// cp.async: copies of a few bytes a lane, their groups, and mbarrier arrivals after them.
#include "ops.h"

namespace {

// cp.async of the lanes of one instruction: global bytes to shared memory, zero-filled past the source size.
struct CopyAsync : AsyncOp {
  struct Piece {
    Cta* cta;
    u64 from;
    u32 offset, bytes, given, lane;
  };
  std::vector<Piece> pieces;
  void run(Cluster& cluster) override {
    for (const Piece& p : pieces) {
      u8* to = shared_at(cluster, *p.cta, p.offset, p.bytes, p.bytes, "cp.async");
      std::memset(to, 0, p.bytes);
      if (p.given) {
        std::memcpy(to, global_at(cluster, p.from, p.given, false, "cp.async"), p.given);
        global_touched(cluster, actor, pc, Proxy::Generic, Kind::Read, p.from, p.given);
      }
      shared_written(*p.cta, p.offset, p.bytes);
      if (cluster.events)
        cluster.events->shared(actor, pc, Proxy::Generic, Kind::Write, p.cta->rank, p.offset, p.bytes, {u8(p.lane)});
    }
    issuer->copies_done++;
  }
};

// Arrives once for every thread that asked, when its earlier copies are done.
struct CopyArrival : AsyncOp {
  std::vector<u32> barriers;
  std::vector<u32> copies;
  void run(Cluster& cluster) override {
    for (u32 address : barriers) {
      Mbarrier& barrier = mbarrier_of(cluster, address, "cp.async.mbarrier.arrive");
      if (cluster.events)
        for (u32 copy : copies) cluster.events->release(copy, barrier.sync);
      mbarrier_arrive(cluster, barrier, 1, issuer, pc, actor);
    }
  }
};

Step start_copies(Context& c) {
  Warp& w = c.warp;
  auto op = std::make_unique<CopyAsync>();
  op->pc = c.group.pc, op->issuer = &w;
  w.copies_issued++;
  if (c.cluster.events) {
    op->actor = c.cluster.events->fork(c.actor(), op->pc, 0);
    w.copy_actors.push_back({w.copies_issued, op->actor, c.mask});
  }
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 to = c.address(lane);
    u64 from = c.value64(c.in.b, lane) + s64(s32(w.read(c.in.e)[lane]));
    u32 given = c.in.c == kNone ? c.in.extra : std::min<u32>(c.in.extra, w.read(c.in.c)[lane]);
    if (given && from % c.in.extra)
      fault("memory", "cp.async of %u bytes from global address 0x%llx, not a multiple of %u", c.in.extra,
            (unsigned long long)from, c.in.extra);
    op->pieces.push_back({&window(c, kShared, to), from, u32(to) & kOffsetMask, c.in.extra, given, lane});
  }
  if (w.trace) w.trace->note(Note::kCopy, 0, u32(op->pieces.size()) * c.in.extra);
  submit(c.cluster, &w.copies, std::move(op));
  return Step::Next;
}

Step arrive_after_copies(Context& c) {
  if (!c.in.extra) fault("not implemented", "cp.async.mbarrier.arrive without .noinc");
  auto op = std::make_unique<CopyArrival>();
  op->pc = c.group.pc, op->issuer = &c.warp;
  if (c.cluster.events) {
    op->actor = c.cluster.events->fork(c.actor(), op->pc, 0);
    for (auto& copy : c.warp.copy_actors) op->copies.push_back(copy.actor);
  }
  for (u32 rest = c.mask; rest; rest &= rest - 1) op->barriers.push_back(u32(c.address(u32(__builtin_ctz(rest)))));
  for (u32 barrier : op->barriers)
    if (c.warp.trace) c.warp.trace->note(Note::kCopyArrive, barrier);
  submit(c.cluster, &c.warp.copies, std::move(op));
  return Step::Next;
}

}  // namespace

Step op_cp_async(Context& c) {
  Warp& w = c.warp;
  if (c.in.op == OP_CP_ASYNC) return start_copies(c);
  if (c.in.op == OP_CP_ASYNC_ARRIVE) return arrive_after_copies(c);
  u64 committed = w.copy_groups.empty() ? 0 : w.copy_groups.back();
  if (c.in.op == OP_CP_ASYNC_COMMIT || (c.in.extra && committed != w.copies_issued))  // a wait for all commits, too
    w.copy_groups.push_back(w.copies_issued);
  if (c.in.op == OP_CP_ASYNC_COMMIT) return Step::Next;
  if (!copies_satisfied(w, u32(c.in.imm))) return c.block(Wait::CpAsync, nullptr, u32(c.in.imm), 0);
  u64 reached = 0;
  while (w.copy_groups.size() > u64(c.in.imm)) {
    reached = w.copy_groups.front();
    w.copy_groups.pop_front();
  }
  while (c.cluster.events && !w.copy_actors.empty() && w.copy_actors.front().number <= reached) {
    const Warp::LanesCopy& copy = w.copy_actors.front();
    c.cluster.events->join_copies(c.actor(), copy.actor, copy.lanes);
    w.copy_actors.pop_front();
  }
  return Step::Next;
}

bool copies_satisfied(const Warp& w, u32 allowed) {
  return w.copy_groups.size() <= allowed || w.copies_done >= w.copy_groups[w.copy_groups.size() - 1 - allowed];
}
