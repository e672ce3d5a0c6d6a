// clusterlaunchcontrol: a running cluster takes over the work of one that has not started.
#include "ops.h"

namespace {

constexpr u32 kResponseBytes = 16;

// PTX keeps the response opaque. Machine code that decodes it finds the first CTA's x in the first word, y and z in the
// halves of the second, and in the lowest bit of the third whether a cluster was cancelled.
struct Cancel : AsyncOp {
  std::vector<Cta*> targets;
  u32 offset = 0, barrier_offset = 0;

  void run(Cluster& cluster) override {
    u32 response[kResponseBytes / 4] = {};
    u64 taken;
    if (cluster.machine.take_cluster(cluster, taken)) {
      const LaunchRecord& launch = cluster.machine.launch;
      u32 across = launch.grid[0] / launch.cluster[0];
      response[0] = u32(taken % across) * launch.cluster[0];
      response[1] = u32(taken / across) * launch.cluster[1];
      response[2] = 1;
    }
    for (Cta* cta : targets) {
      std::memcpy(shared_at(cluster, *cta, offset, kResponseBytes, 16, "try_cancel"), response, kResponseBytes);
      shared_written(*cta, offset, kResponseBytes);
      Mbarrier& barrier = mbarrier_of_engine(cluster, cta->rank << kRankShift | barrier_offset, "try_cancel");
      if (cluster.events) cluster.events->shared(actor, pc, Proxy::Async, Kind::Write, cta->rank, offset, kResponseBytes);
      mbarrier_transact(cluster, barrier, kResponseBytes, actor);
    }
  }
};

}  // namespace

// The next cluster that has not started; none where its place does not fit the response, and sometimes none at random,
// as other clusters start meanwhile on a GPU.
bool Machine::take_cluster(Cluster& cluster, u64& taken) const {
  if (launch.clusters_talk || launch.grid[2] != 1 || options.only_traced) return false;
  if (options.mode == kRandom && cluster.random.below(2)) return false;
  taken = next++;
  return taken < clusters;
}

// clusterlaunchcontrol.query_cancel: whether there is a cluster to take over, or one coordinate of its first CTA.
Step op_query_cancel(Context& c) {
  const u32* response = c.warp.read(c.in.a);
  u32* to = c.warp.write(c.in.d);
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u32 x = response[lane], yz = response[lane + 32], taken = response[lane + 64] & 1 ? ~0u : 0;
    u32 said[] = {x, yz & 0xffff, yz >> 16, taken};
    to[lane] = said[c.in.extra];
  }
  return Step::Next;
}

Step op_cancel(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest)), address = u32(c.address(lane));
    u32 barrier = c.warp.read(c.in.b)[lane] + u32(c.item(0, lane));
    auto op = std::make_unique<Cancel>();
    op->pc = c.group.pc, op->issuer = &c.warp;
    op->offset = address & kOffsetMask;
    op->barrier_offset = barrier & kOffsetMask;
    if (c.in.flags & kMulticast) {
      c.cluster.cta_at(address, "try_cancel"), c.cluster.cta_at(barrier, "try_cancel's mbarrier");
      for (auto& cta : c.cluster.ctas) op->targets.push_back(cta.get());
    } else {
      op->targets.push_back(&window(c, kShared, address));
      window(c, kShared, barrier);
    }
    for (Cta* cta : op->targets)
      if (c.warp.trace) c.warp.trace->note(Note::kLoad, cta->rank << kRankShift | op->barrier_offset, kResponseBytes);
    if (c.cluster.events) op->actor = c.cluster.events->fork(c.actor(), op->pc, 0);
    submit(c.cluster, nullptr, std::move(op));
  }
  return Step::Next;
}
