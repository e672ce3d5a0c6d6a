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

// R2UR: a register of one lane for all of them. items: a predicate of the lanes that hold the same, if it is asked for.
Step read_uniform(Context& c) {
  const u32* a = c.warp.read(c.in.a);
  u32 value = a[c.lane()];
  if (c.in.count) {
    u32* same = c.warp.write(c.cluster.program.list(c.in)[0]);
    for (u32 rest = c.mask; rest; rest &= rest - 1) {
      u32 lane = u32(__builtin_ctz(rest));
      same[lane] = a[lane] == value ? ~0u : 0;
    }
  }
  std::fill_n(c.warp.write(c.in.d), 32, value);
  return Step::Next;
}

}  // namespace

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
    default:
      return read_uniform(c);
  }
}
