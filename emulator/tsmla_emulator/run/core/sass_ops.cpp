// What machine code does with control flow, constant memory and the registers that a warp's lanes share.
#include "ops.h"

namespace {

// Lanes that a convergence barrier waits for, as its members know them.
u32 members_of(const Warp& w, u32 barrier, u32 lanes) {
  u32 members = 0;
  for (u32 rest = lanes; rest; rest &= rest - 1) members |= w.meetings[barrier].members[__builtin_ctz(rest)];
  return members;
}

// BSSY: the lanes that are here will meet.
Step begin_meeting(Context& c) {
  LaneMeeting& meeting = c.warp.meetings[c.in.imm];
  for (u32 rest = c.mask; rest; rest &= rest - 1) meeting.members[__builtin_ctz(rest)] = c.mask;
  meeting.arrived &= ~c.mask;
  return Step::Next;
}

// BSYNC: they wait for each other; those that have ended are not waited for.
Step meet(Context& c) {
  if (c.mask != c.group.mask) {  // some go on
    u32 pc = c.group.pc++;
    c.group.mask &= ~c.mask;
    c.warp.groups.push_back(Group{pc, c.mask});
    return Step::Jump;
  }
  c.warp.meetings[c.in.imm].arrived |= c.mask;
  if (lanes_met(c.warp, u32(c.in.imm), c.mask)) return Step::Next;
  return c.block(Wait::Lanes, nullptr, u32(c.in.imm), 0);
}

// BREAK: lanes leave the meeting, and the others wait for them no more.
Step leave_meeting(Context& c) {
  for (u32& members : c.warp.meetings[c.in.imm].members) members &= ~c.mask;
  return Step::Next;
}

// Indirect jumps: where a lane goes says its register and the table of the positions of all addresses.
Step jump(Context& c) {
  const s32* table = c.cluster.program.lists.data() + c.in.first;
  const u32* targets = c.warp.read(c.in.a);
  u32 lane = c.lane(), together = 0;
  for (u32 rest = c.mask; rest; rest &= rest - 1)
    if (targets[__builtin_ctz(rest)] == targets[lane]) together |= rest & -rest;
  u64 address = u64(targets[lane]) + u64(c.in.imm);
  if (address % 16 || address / 16 >= c.in.flags)
    fault("memory", "a jump to address 0x%llx of a kernel of 0x%x bytes", (unsigned long long)address, c.in.flags * 16);
  u32 pc = u32(table[address / 16]);
  if (together == c.group.mask) {
    c.group.pc = pc;
    return Step::Jump;
  }
  c.group.mask &= ~together;
  if (together == c.mask) c.group.pc++;  // the others do not jump
  c.warp.groups.push_back(Group{pc, together});
  return Step::Jump;
}

// Constant memory at an address that the instruction has, which all lanes read.
Step load_constant(Context& c) {
  const LaunchRecord& launch = c.cluster.machine.launch;
  if (u64(c.in.imm) + c.in.width > launch.param_bytes)
    fault("memory", "constant memory of %u bytes at 0x%llx, of 0x%x bytes", c.in.width, (unsigned long long)c.in.imm,
          launch.param_bytes);
  const u8* from = launch.params + c.in.imm;
  for (u32 i = 0; i < c.in.count; i++) {
    u32 value = 0;
    std::memcpy(&value, from + 4 * i, std::min<u32>(c.in.width, 4));
    u32* d = c.warp.write(c.cluster.program.list(c.in)[i]);
    for (u32 lane = 0; lane < 32; lane++)
      if (c.mask >> lane & 1) d[lane] = value;
  }
  return Step::Next;
}

// R2UR: a register of one lane for all of them. items: a predicate of the lanes that hold another, if it is asked for.
Step read_uniform(Context& c) {
  const u32* a = c.warp.read(c.in.a);
  u32 value = a[c.lane()];
  if (c.in.count) {
    u32* other = c.warp.write(c.cluster.program.list(c.in)[0]);
    for (u32 rest = c.mask; rest; rest &= rest - 1) {
      u32 lane = u32(__builtin_ctz(rest));
      other[lane] = a[lane] != value ? ~0u : 0;
    }
  }
  std::fill_n(c.warp.write(c.in.d), 32, value);
  return Step::Next;
}

// STAS: a word for shared memory of the cluster, which a barrier there counts. a: the place and the barrier.
struct StoreAsync : AsyncOp {
  u32 address = 0, barrier = 0, value = 0;
  void run(Cluster& cluster) override {
    Cta& cta = cluster.cta_at(address, "store");
    u32 offset = address & kOffsetMask;
    std::memcpy(shared_at(cluster, cta, offset, 4, 4, "store"), &value, 4);
    shared_written(cta, offset, 4);
    if (cluster.events) cluster.events->shared(actor, pc, Proxy::Generic, Kind::Write, cta.rank, offset, 4);
    mbarrier_transact(cluster, mbarrier_of_engine(cluster, barrier, "store's complete_tx"), 4, actor);
  }
};

Step store_async(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    auto op = std::make_unique<StoreAsync>();
    op->pc = c.group.pc, op->issuer = &c.warp;
    u64 places = c.value64(c.in.a, lane);
    op->address = u32(places) + u32(c.in.imm), op->barrier = u32(places >> 32), op->value = c.warp.read(c.in.b)[lane];
    if (c.cluster.events) op->actor = c.cluster.events->fork(c.actor(), op->pc, 0);
    submit(c.cluster, nullptr, std::move(op));
  }
  return Step::Next;
}

// An instruction awaits scoreboards (imm): the loads of tensor memory that they stand for are over.
Step await_loads(Context& c) {
  u32 newest = 0;
  for (u32 i = 0; i < 6; i++)
    if (c.in.imm >> i & 1) newest = std::max(newest, c.warp.load_boards[i]);
  if (newest && c.cluster.events) c.cluster.events->loads_done(c.warp.actor, newest);
  return Step::Next;
}

}  // namespace

// What the system leaves in its part of shared memory, as code for sm_100a takes it: zeros, and how the CTAs of a pair
// take turns when they allocate tensor memory. Each has a barrier of one arrival and the parity that it waits for next,
// with which the even one comes first.
void open_reserved(Cta& cta) {
  constexpr u32 kPairBarrier = 0x58, kPairParity = 0x60;
  std::fill_n(cta.shared.begin(), kSharedBase, u8(0));
  cta.shared[kPairParity] = cta.rank % 2 ? 0 : 1;
  std::fill_n(cta.shadow.begin(), kSharedBase, u8(kWritten));
  std::fill_n(cta.shadow.begin() + kPairBarrier, 8, u8(kBarrier));
  Mbarrier& b = cta.mbarriers.emplace_back();
  b.offset = kPairBarrier, b.live = true, b.pending = b.expected = 1;
  cta.mbarrier_at[kPairBarrier / 8] = 0;
}

bool lanes_met(const Warp& w, u32 barrier, u32 lanes) {
  return !(members_of(w, barrier, lanes) & w.live & ~w.meetings[barrier].arrived);
}

Step op_sass(Context& c) {
  switch (c.in.op) {
    case OP_BEGIN_MEETING:
      return begin_meeting(c);
    case OP_MEET:
      return meet(c);
    case OP_LEAVE_MEETING:
      return leave_meeting(c);
    case OP_JUMP:
      return jump(c);
    case OP_LOAD_CONSTANT:
      return load_constant(c);
    case OP_STORE_ASYNC:
      return store_async(c);
    case OP_AWAIT_LOADS:
      return await_loads(c);
    default:
      return read_uniform(c);
  }
}
