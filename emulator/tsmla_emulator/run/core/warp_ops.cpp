// Instructions across the lanes of one warp, special registers, packing, register budgets.
#include "ops.h"

namespace {

// Waits until all live lanes that the member mask names are here.
bool members_here(Context& c, u32 members) { return (c.group.mask & members & c.warp.live) == (members & c.warp.live); }

// Machine code names no members: they are the lanes that are here.
u32 member_mask(Context& c, s32 slot, const char* what) {
  if (slot == kNone) return c.mask;
  u32 members = c.warp.read(slot)[c.lane()];
  if (c.mask & ~members)
    fault("barrier", "%s: executed by lanes 0x%x that its mask 0x%x does not name", what, c.mask, members);
  if (u32 kept = members & c.group.mask & ~c.mask)
    fault("barrier", "%s: a predicate keeps lanes 0x%x away, which its mask 0x%x names", what, kept, members);
  return members;
}

// What a lane gets from one that does not take part, as from a register that nobody has written.
u32 undefined(const Context& c, u32 lane) {
  u64 seed = c.cluster.machine.options.seed;
  if (!seed) return ~0u;
  return RandomSource{~seed * 1000003 + c.cluster.index * 1024 + c.warp.number + (u64(c.group.pc) << 32 | lane)}.next();
}

void spread(Context& c, s32 slot, u32 result) {
  u32* d = c.warp.write(slot);
  u32 lanes = c.in.flags & kToWarp ? ~0u : c.mask;
  for (u32 lane = 0; lane < 32; lane++)
    if (lanes >> lane & 1) d[lane] = result;
}

}  // namespace

Step op_shuffle(Context& c) {
  u32 members = member_mask(c, c.in.e, "shfl.sync");
  if (!members_here(c, members)) return c.block(Wait::Converge, nullptr, 0, 0);
  u32 source[32];
  std::memcpy(source, c.warp.read(c.in.a), sizeof source);
  const u32 *b = c.warp.read(c.in.b), *limits = c.warp.read(c.in.c);
  u32* d = c.warp.write(c.in.d);
  u32* valid = c.in.count ? c.warp.write(c.cluster.program.list(c.in)[0]) : nullptr;
  u32 amounts[32], clamps[32];
  std::memcpy(amounts, b, sizeof amounts);
  std::memcpy(clamps, limits, sizeof clamps);
  for (u32 lane = 0; lane < 32; lane++) {
    if (!(c.mask >> lane & 1)) continue;
    u32 segment = clamps[lane] >> 8 & 31, clamp = clamps[lane] & 31, amount = amounts[lane] & 31;
    u32 highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
    s32 from = 0;
    bool inside = false;
    switch (c.in.imm) {
      case 0:
        from = s32(lowest | (amount & ~segment)), inside = from <= s32(highest);
        break;
      case 1:
        from = s32(lane) - s32(amount), inside = from >= s32(highest);
        break;
      case 2:
        from = s32(lane + amount), inside = from <= s32(highest);
        break;
      default:
        from = s32(lane ^ amount), inside = from <= s32(highest);
        break;
    }
    if (!inside) from = s32(lane);
    d[lane] = c.mask >> from & 1 ? source[from] : undefined(c, lane);
    if (valid) valid[lane] = inside ? ~0u : 0u;
  }
  return Step::Next;
}

Step op_vote(Context& c) {
  u32 members = member_mask(c, c.in.b, "vote.sync");
  if (!members_here(c, members)) return c.block(Wait::Converge, nullptr, 0, 0);
  const u32* p = c.warp.read(c.in.a);
  u32 ballot = 0;
  for (u32 lane = 0; lane < 32; lane++) ballot |= (p[lane] & 1u) << lane;
  ballot &= c.mask;
  u32 result = 0;
  switch (c.in.imm) {
    case 0:
      result = ballot == c.mask ? ~0u : 0;
      break;
    case 1:
      result = ballot ? ~0u : 0;
      break;
    case 2:
      result = ballot == c.mask || !ballot ? ~0u : 0;
      break;
    default:
      result = ballot;
  }
  spread(c, c.in.d, result);
  if (c.in.count) spread(c, c.cluster.program.list(c.in)[0], ballot ? ~0u : 0);
  return Step::Next;
}

Step op_elect(Context& c) {
  u32 members = member_mask(c, c.in.a, "elect.sync");
  if (!members_here(c, members)) return c.block(Wait::Converge, nullptr, 0, 0);
  u32 leader = c.cluster.machine.options.elect_highest ? 31u - u32(__builtin_clz(c.mask)) : c.lane();
  if (c.in.d != kNone) spread(c, c.in.d, leader);
  s32 slot = c.cluster.program.list(c.in)[0];
  u32* p = slot == kNone ? nullptr : c.warp.write(slot);
  for (u32 lane = 0; lane < 32; lane++) {
    if (!(c.mask >> lane & 1)) continue;
    if (p) p[lane] = lane == leader ? ~0u : 0u;
  }
  return Step::Next;
}

Step op_reduce(Context& c) {
  u32 members = member_mask(c, c.in.b, "redux.sync");
  if (!members_here(c, members)) return c.block(Wait::Converge, nullptr, 0, 0);
  const u32* a = c.warp.read(c.in.a);
  u32 result = a[c.lane()];
  for (u32 rest = c.mask & (c.mask - 1); rest; rest &= rest - 1) {
    u32 v = a[__builtin_ctz(rest)];
    switch (c.in.imm) {
      case 0:
        result += v;
        break;
      case 1:
        result = c.in.flags & kSigned ? u32(std::min(s32(result), s32(v))) : std::min(result, v);
        break;
      case 2:
        result = c.in.flags & kSigned ? u32(std::max(s32(result), s32(v))) : std::max(result, v);
        break;
      case 3:
        result &= v;
        break;
      case 4:
        result |= v;
        break;
      default:
        result ^= v;
    }
  }
  spread(c, c.in.d, result);
  return Step::Next;
}

// In machine code lanes only meet here: BRA.DIV asks who is here, whoever executes it.
Step op_warp_sync(Context& c) {
  bool machine_code = c.cluster.machine.launch.machine_code;
  u32 members = machine_code ? c.warp.read(c.in.a)[c.lane()] : member_mask(c, c.in.a, "bar.warp.sync");
  members &= c.warp.live;
  if ((c.group.mask & members) != members) return c.block(Wait::Converge, nullptr, 0, 0);
  if (c.cluster.events && members & (members - 1)) c.cluster.events->warp_sync(c.warp.actor);
  return Step::Next;
}

namespace {

u64 special_value(Context& c, u32 which, u32 lane) {
  const LaunchRecord& launch = c.cluster.machine.launch;
  const Cta& cta = *c.warp.cta;
  u32 thread = c.warp.index * 32 + lane;
  auto axis = [](u32 w, u32 first) { return w - first; };
  auto clusters = [&](u32 i) { return launch.grid[i] / launch.cluster[i]; };
  if (which < 3) {
    u32 x = launch.block[0], y = launch.block[1];
    return which == 0 ? thread % x : which == 1 ? thread / x % y : thread / (x * y);
  }
  if (which < 6) return launch.block[axis(which, 3)];
  if (which < 9) return cta.id[axis(which, 6)];
  if (which < 12) return launch.grid[axis(which, 9)];
  switch (which) {
    case 12:
      return lane;
    case 13:
      return c.warp.index;
    case 14:
      return cta.warps.size();
    case 15:
      return cta.rank;
    case 16:
      return c.cluster.ctas.size();
    case 29:
      return 0;
    case 30:
    case 31:
    case 32:
      return c.warp.executed;
    case 33:
      return 1u << lane;
    case 34:
      return (1u << lane) - 1;
    case 35:
      return u32((2ull << lane) - 1);
    case 36:
      return ~u32((2ull << lane) - 1);
    case 37:
      return ~((1u << lane) - 1);
    case 38:
      return launch.dynamic_shared;
    case 39:
      return cta.shared.size();
  }
  if (which < 20) return cta.id[axis(which, 17)] % launch.cluster[axis(which, 17)];
  if (which < 23) return launch.cluster[axis(which, 20)];
  if (which < 26) return cta.id[axis(which, 23)] / launch.cluster[axis(which, 23)];
  return clusters(axis(which, 26));
}

}  // namespace

Step op_special(Context& c) {
  u32* d = c.warp.write(c.in.d);
  for (u32 lane = 0; lane < 32; lane++) {
    if (!(c.mask >> lane & 1)) continue;
    u64 value = special_value(c, u32(c.in.imm), lane);
    d[lane] = u32(value);
    if (c.in.width == 8) d[lane + 32] = u32(value >> 32);
  }
  return Step::Next;
}

namespace {

void copy_lanes(u32* to, const u32* from, u32 mask) {
  if (mask == ~0u) {
    std::memcpy(to, from, 128);
    return;
  }
  for (u32 lane = 0; lane < 32; lane++)
    if (mask >> lane & 1) to[lane] = from[lane];
}

}  // namespace

Step op_pack(Context& c) {
  const s32* items = c.cluster.program.list(c.in);
  u32* d = c.warp.write(c.in.d);
  alignas(64) u32 made[4 * 32];  // sources may share slots with the result
  if (c.in.width >= 4) {
    u32 per_item = c.in.width / 4;
    for (u32 i = 0; i < c.in.count; i++) std::memcpy(made + 32 * per_item * i, c.warp.read(items[i]), 128 * per_item);
    for (u32 i = 0; i < per_item * c.in.count; i++) copy_lanes(d + 32 * i, made + 32 * i, c.mask);
    return Step::Next;
  }
  u32 per_slot = 4 / c.in.width, shift = 8 * c.in.width, keep = (1u << shift) - 1;
  u32 total = c.in.count * c.in.width / 4;
  for (u32 s = 0; s < std::max(total, 1u); s++) {
    for (u32 lane = 0; lane < 32; lane++) made[32 * s + lane] = 0;
    for (u32 i = 0; i < per_slot && s * per_slot + i < c.in.count; i++) {
      const u32* from = c.warp.read(items[s * per_slot + i]);
      for (u32 lane = 0; lane < 32; lane++) made[32 * s + lane] |= (from[lane] & keep) << (shift * i);
    }
  }
  for (u32 s = 0; s < std::max(total, 1u); s++) copy_lanes(d + 32 * s, made + 32 * s, c.mask);
  return Step::Next;
}

Step op_unpack(Context& c) {
  const s32* items = c.cluster.program.list(c.in);
  const u32* from = c.warp.read(c.in.a);
  alignas(64) u32 kept[4 * 32];
  u32 slots = std::max(1u, c.in.count * c.in.width / 4u);
  std::memcpy(kept, from, 128 * slots);
  if (c.in.width >= 4) {
    u32 per_item = c.in.width / 4;
    for (u32 i = 0; i < c.in.count; i++)
      for (u32 h = 0; items[i] != kNone && h < per_item; h++)
        copy_lanes(c.warp.write(items[i]) + 32 * h, kept + 32 * (per_item * i + h), c.mask);
    return Step::Next;
  }
  u32 per_slot = 4 / c.in.width, shift = 8 * c.in.width, keep = (1u << shift) - 1;
  for (u32 i = 0; i < c.in.count; i++) {
    if (items[i] == kNone) continue;
    u32 part[32];
    for (u32 lane = 0; lane < 32; lane++)
      part[lane] = kept[32 * (i / per_slot) + lane] >> (shift * (i % per_slot)) & keep;
    copy_lanes(c.warp.write(items[i]), part, c.mask);
  }
  return Step::Next;
}

Step op_set_registers(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  u32 wanted = u32(c.in.imm);
  if (wanted < 24 || wanted > 256 || wanted % 8) fault("budget", "setmaxnreg %u: 24 to 256, a multiple of 8", wanted);
  Cta& cta = *c.warp.cta;
  u32& mine = cta.register_counts[c.warp.index];
  bool grows = c.in.flags & 1;
  if (grows ? wanted < mine : wanted > mine)
    fault("budget", "setmaxnreg.%s %u, but the warp has %u registers a thread", grows ? "inc" : "dec", wanted, mine);
  u32 sum = wanted;
  for (u32 i = 0; i < cta.register_counts.size(); i++) sum += i == c.warp.index ? 0 : cta.register_counts[i];
  if (grows && sum * 32 > cta.register_pool) return c.block(Wait::Registers, nullptr, wanted, sum * 32);
  mine = wanted;
  c.warp.role_pc = c.cluster.running_pc;
  c.cluster.progress++;
  return Step::Next;
}
