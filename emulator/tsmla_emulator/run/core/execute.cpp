// Dispatch of the instructions that are not lane-wise, and control flow.
#include "ops.h"

Step Context::block(Wait wait, Cta* where, u32 argument, u32 generation) const {
  if (wait == Wait::Registers || wait == Wait::Alloc) generation = u32(cluster.progress);
  group.wait = wait, group.where = where, group.argument = argument, group.generation = generation;
  return Step::Block;
}

bool Context::converged() const { return (group.mask & warp.live) == warp.live; }

void Context::whole(const char* what) const {
  if (mask != group.mask)
    fault("barrier", "%s is executed under a predicate that only lanes 0x%x of 0x%x meet", what, mask, group.mask);
}

namespace {

Step branch(Context& c) {
  u32 target = u32(c.in.imm);
  if (c.mask == c.group.mask) {
    c.group.pc = target;
    return Step::Jump;
  }
  c.group.mask &= ~c.mask;
  c.group.pc++;
  c.warp.groups.push_back(Group{target, c.mask});
  return Step::Jump;
}

Step leave(Context& c) {
  Warp& w = c.warp;
  w.live &= ~c.mask;
  c.group.mask &= ~c.mask;
  if (c.group.mask) {
    c.group.pc++;
    return Step::Jump;
  }
  w.groups.erase(w.groups.begin() + s64(&c.group - w.groups.data()));
  if (w.finished()) {
    check_bulk_at_exit(c);
    if (c.cluster.barrier_arrival[w.number]) {
      c.cluster.barrier_arrival[w.number] = 0;
      c.cluster.barrier_arrived--;
    }
    c.cluster.progress++;
    w.cta->ended = w.cta->live_warps() == 0;
    if (c.cluster.events) c.cluster.events->warp_ends(w.actor, w.cta->rank, w.cta->ended);
    recheck_after_exit(c.cluster, *w.cta);
  }
  return Step::Exit;
}

// The address of a CTA that there is not is an error where it is used: lanes that use none may have one.
Step map_rank(Context& c) {
  constexpr u32 kNoCta = 0xff;
  const u32 *a = c.warp.read(c.in.a), *rank = c.warp.read(c.in.b);
  u32* d = c.warp.write(c.in.d);
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest)), r = rank[lane];
    d[lane] = (a[lane] & kOffsetMask) | std::min(r, kNoCta) << kRankShift;
    if (c.in.width == 8) d[lane + 32] = 0;
  }
  return Step::Next;
}

Step for_all(Context& c, u32 value) {
  u32* d = c.warp.write(c.in.d);
  for (u32 rest = c.mask; rest; rest &= rest - 1) d[__builtin_ctz(rest)] = value;
  return Step::Next;
}

Step rank_of(Context& c) {
  const u32* a = c.warp.read(c.in.a);
  u32* d = c.warp.write(c.in.d);
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    d[lane] = a[lane] >> kRankShift;
  }
  return Step::Next;
}

}  // namespace

Step execute_complex(Context& c) {
  switch (c.in.op) {
    case OP_BRA:
      return branch(c);
    case OP_EXIT:
      return leave(c);
    case OP_TRAP:
      fault("trap", "the kernel executed trap");
    case OP_SPECIAL:
      return op_special(c);
    case OP_PACK:
      return op_pack(c);
    case OP_UNPACK:
      return op_unpack(c);
    case OP_LOAD:
      return op_load(c);
    case OP_STORE:
      return op_store(c);
    case OP_ATOMIC:
      return op_atomic(c);
    case OP_MBARRIER_INIT:
    case OP_MBARRIER_INVALIDATE:
    case OP_MBARRIER_ARRIVE:
    case OP_MBARRIER_EXPECT:
    case OP_MBARRIER_COMPLETE:
      return op_mbarrier(c);
    case OP_MBARRIER_TRY: {
      Step step = op_mbarrier(c);
      c.warp.polling = step == Step::Yield;
      return step;
    }
    case OP_BARRIER_SYNC:
      return op_named(c, true);
    case OP_BARRIER_ARRIVE:
      return op_named(c, false);
    case OP_WARP_SYNC:
      return op_warp_sync(c);
    case OP_CLUSTER_ARRIVE:
      return op_cluster_arrive(c);
    case OP_CLUSTER_WAIT:
      return op_cluster_wait(c);
    case OP_PROXY_FENCE:
      if (c.cluster.events) c.cluster.events->proxy_fence(c.actor(), !(c.in.imm & 1), !(c.in.imm & 2));
      if (!(c.in.imm & 1)) mbarrier_fence(c.warp);
      return Step::Next;
    case OP_MBARRIER_FENCE:
      if (c.cluster.events) c.cluster.events->fence(c.actor());  // stricter: of the initialisations only
      mbarrier_fence(c.warp);
      return Step::Next;
    case OP_MEMORY_FENCE:
      if (c.cluster.events) c.cluster.events->fence(c.actor());
      return Step::Next;
    case OP_GRID_WAIT:
      if (c.cluster.events) c.cluster.events->grid_wait(c.actor());
      return Step::Next;
    case OP_TENSOR_FENCE:
      if (c.cluster.events) c.cluster.events->tensor_fence(c.actor(), c.in.imm);
      return Step::Next;
    case OP_GRID_LAUNCH:
      return Step::Next;
    case OP_SET_REGISTERS:
      return op_set_registers(c);
    case OP_ELECT:
      return op_elect(c);
    case OP_SHUFFLE:
      return op_shuffle(c);
    case OP_VOTE:
      return op_vote(c);
    case OP_ACTIVE_MASK:
      return for_all(c, c.group.mask);
    case OP_REDUCE:
      return op_reduce(c);
    case OP_MAP_RANK:
      return map_rank(c);
    case OP_RANK_OF:
      return rank_of(c);
    case OP_LDMATRIX:
      return op_matrix_move(c, true);
    case OP_STMATRIX:
      return op_matrix_move(c, false);
    case OP_MMA:
      return op_warp_product(c);
    case OP_CP_ASYNC:
    case OP_CP_ASYNC_COMMIT:
    case OP_CP_ASYNC_WAIT:
    case OP_CP_ASYNC_ARRIVE:
      return op_cp_async(c);
    case OP_BULK_COPY:
    case OP_BULK_LOAD_TENSOR:
    case OP_BULK_STORE_TENSOR:
    case OP_BULK_COMMIT:
    case OP_BULK_WAIT:
      return op_bulk(c);
    case OP_CANCEL_CLUSTER:
      return op_cancel(c);
    case OP_QUERY_CANCEL:
      return op_query_cancel(c);
    case OP_BEGIN_MEETING:
    case OP_MEET:
    case OP_LEAVE_MEETING:
    case OP_JUMP:
    case OP_LOAD_CONSTANT:
    case OP_READ_UNIFORM:
    case OP_STORE_ASYNC:
    case OP_AWAIT_LOADS:
      return op_sass(c);
    case OP_WGMMA:
    case OP_WGMMA_FENCE:
    case OP_WGMMA_COMMIT:
    case OP_WGMMA_WAIT:
      return op_wgmma(c);
    default:
      return op_tensor(c);
  }
}
