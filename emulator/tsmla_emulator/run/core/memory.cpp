// Loads, stores and atomics through the address windows, with bounds, alignment and never-written checks.
#include "ops.h"

namespace {

const char* const kOutside = "outside the shared memory of the launch";

// Tells those who listen which bytes the lanes of an instruction touch: adjacent bytes of adjacent lanes together, and
// the same bytes that several lanes read as bytes that all of them read.
class Touched {
 public:
  Touched(Context& c, Kind kind, bool strong) : c_(c), kind_(kind), strong_(strong) {}
  void shared(Cta& cta, u32 offset, u32 bytes, u32 lane) { add(&cta, offset, bytes, lane, kind_); }
  // A store of what is there already is Kind::Rewrite. Several stores to the same bytes are told one by one.
  void global(u64 address, u32 bytes, u32 lane, Kind kind) {
    add(nullptr, address, bytes, lane, kind);
    if (strong_) flush();  // the order among others' is told next
  }
  void flush() {
    if (start_ == end_) return;
    Events& events = *c_.cluster.events;
    if (cta_)
      events.shared(c_.actor(), c_.group.pc, Proxy::Generic, kind_, cta_->rank, u32(start_), u32(end_ - start_), lanes_,
                    strong_);
    else
      global_touched(c_.cluster, c_.actor(), c_.group.pc, Proxy::Generic, kind_, start_, end_ - start_, lanes_, strong_);
    start_ = end_ = 0;
  }

 private:
  void add(Cta* cta, u64 start, u32 bytes, u32 lane, Kind kind) {
    if (!c_.cluster.events) return;
    bool together = start_ != end_ && cta == cta_ && kind == kind_;
    if (together && start == end_ && lane == last_ + 1 && lanes_.first != Lanes::all) {
      end_ += bytes, last_ = lane;
      return;
    }
    if (together && start == start_ && end_ - start_ == bytes && (cta || kind == Kind::Read)) {
      lanes_.first = Lanes::all;
      return;
    }
    flush();
    cta_ = cta, start_ = start, end_ = start + bytes, last_ = lane, kind_ = kind, lanes_ = {u8(lane), u8(bytes)};
  }

  Context& c_;
  Kind kind_;
  bool strong_;
  Cta* cta_ = nullptr;  // null: global memory
  u64 start_ = 0, end_ = 0;
  u32 last_ = 0;
  Lanes lanes_;
};

Space resolve(u32 space, u64 address) {
  if (space == kGeneric) return address < (1u << 29) ? kSharedCluster : kGlobal;
  return Space(space);
}

const u8* param_at(Context& c, u64 address, u32 bytes) {
  const LaunchRecord& launch = c.cluster.machine.launch;
  u64 base = u64(launch.params);
  if (address < base || address + bytes > base + launch.param_bytes)
    fault("memory", "parameter access of %u bytes at byte %lld of a block of %u bytes", bytes,
          (long long)(address - base), launch.param_bytes);
  return reinterpret_cast<const u8*>(address);
}

void aligned(u64 address, u32 bytes, const char* what) {
  if (address & (bytes - 1))
    fault("memory", "%s of %u bytes at address 0x%llx, which is not a multiple of %u", what, bytes,
          (unsigned long long)address, bytes);
}

template <u32 width>
void unpack_value(const u8* from, u32* slot, u32 lane, u32 register_bytes, bool is_signed) {
  if constexpr (width >= 4) {
    for (u32 half = 0; half < width / 4; half++) std::memcpy(slot + 32 * half + lane, from + 4 * half, 4);
  } else {
    u32 v = 0;
    std::memcpy(&v, from, width);
    if (is_signed) v = u32(s32(v << (32 - 8 * width)) >> (32 - 8 * width));
    slot[lane] = register_bytes == 2 ? v & 0xffff : v;
  }
  if (register_bytes == 8 && width < 8) slot[32 + lane] = is_signed ? u32(s32(slot[lane]) >> 31) : 0;
}

template <u32 width>
void pack_value(u8* to, const u32* slot, u32 lane) {
  if constexpr (width >= 4) {
    for (u32 half = 0; half < width / 4; half++) std::memcpy(to + 4 * half, slot + 32 * half + lane, 4);
  } else {
    std::memcpy(to, slot + lane, width);
  }
}

// Strong accesses of global memory order those of others, for those who listen: what a load or an atomic acquires,
// before what a store or an atomic releases.
void ordered(Context& c, u64 address, bool reads, bool writes, bool atomic = false) {
  if (!c.cluster.events || !(c.in.flags & kStrong)) return;
  if (reads) c.cluster.events->global_acquire(c.actor(), address, !(c.in.flags & kAcquire));
  if (writes) c.cluster.events->global_release(c.actor(), address, !(c.in.flags & kRelease), atomic);
}

// A warp that finds with a strong load what it found there the last time polls.
bool polls(Context& c, const u8* from, u32 bytes) {
  u64 found[2] = {};
  std::memcpy(found, from, std::min(bytes, 16u));
  Warp& w = c.warp;
  bool again = w.polled_pc == c.group.pc && w.polled[0] == found[0] && w.polled[1] == found[1];
  w.polled_pc = c.group.pc, w.polled[0] = found[0], w.polled[1] = found[1];
  return again;
}

template <u32 width>
Step load(Context& c) {
  const Insn& in = c.in;
  const u32 count = in.count, bytes = width * count;
  u32* slots[8];
  for (u32 i = 0; i < count; i++) slots[i] = c.warp.write(c.cluster.program.list(in)[i]);
  Touched touched(c, Kind::Read, in.flags & kStrong);
  bool again = in.flags & kStrong;
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    aligned(address, bytes, "load");
    Space space = resolve(in.flags & 7, address);
    const u8* from;
    if (space == kParam) {
      from = param_at(c, address, bytes);
    } else if (space == kGlobal) {
      u64 base = u64(c.cluster.machine.launch.params);
      bool param = address >= base && address < base + c.cluster.machine.launch.param_bytes;
      from = param ? param_at(c, address, bytes) : global_at(c.cluster, address, bytes, false, "load");
      if (!param) touched.global(address, bytes, lane, Kind::Read), ordered(c, address, true, false);
      again = again && !(c.mask & (c.mask - 1)) && polls(c, from, bytes);
    } else {
      Cta& cta = window(c, space, address);
      u32 offset = u32(address) & kOffsetMask;
      again = false;
      from = shared_at(c.cluster, cta, offset, bytes, 1, "load");
      shared_read(c.cluster, cta, offset, bytes, "load");
      touched.shared(cta, offset, bytes, lane);
    }
    for (u32 i = 0; i < count; i++) unpack_value<width>(from + i * width, slots[i], lane, in.extra, in.flags & kSigned);
  }
  touched.flush();
  if (again && c.mask) {
    c.warp.polling = true;
    return Step::Yield;
  }
  return Step::Next;
}

template <u32 width>
Step store(Context& c) {
  const Insn& in = c.in;
  const u32 count = in.count, bytes = width * count;
  const u32* slots[8];
  for (u32 i = 0; i < count; i++) slots[i] = c.warp.read(c.cluster.program.list(in)[i]);
  Touched touched(c, Kind::Write, in.flags & kStrong);
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    aligned(address, bytes, "store");
    Space space = resolve(in.flags & 7, address);
    u8* to;
    u8 value[width * 8];
    for (u32 i = 0; i < count; i++) pack_value<width>(value + i * width, slots[i], lane);
    if (space == kGlobal) {
      to = global_at(c.cluster, address, bytes, true, "store");
      touched.global(address, bytes, lane, std::memcmp(to, value, bytes) ? Kind::Write : Kind::Rewrite);
      ordered(c, address, false, true);
      if (c.cluster.machine.launch.clusters_talk) c.cluster.machine.changes++;
    } else {
      if (space == kParam) fault("memory", "store to the parameter block");
      Cta& cta = window(c, space, address);
      u32 offset = u32(address) & kOffsetMask;
      to = shared_at(c.cluster, cta, offset, bytes, 1, "store");
      shared_written(cta, offset, bytes);
      touched.shared(cta, offset, bytes, lane);
    }
    std::memcpy(to, value, bytes);
  }
  touched.flush();
  return Step::Next;
}

u64 combine(u32 action, u64 old, u64 b, u64 c, bool is_signed, bool is_float) {
  switch (action) {
    case 0:
      return is_float ? bits<u32>(bits<f32>(u32(old)) + bits<f32>(u32(b))) : old + b;
    case 1:
      return is_signed ? u64(u32(std::min(s32(old), s32(b)))) : std::min(old, b);
    case 2:
      return is_signed ? u64(u32(std::max(s32(old), s32(b)))) : std::max(old, b);
    case 3:
      return old & b;
    case 4:
      return old | b;
    case 5:
      return old ^ b;
    case 6:
      return b;
    case 7:
      return old == b ? c : old;
    case 8:
      return old >= b ? 0 : old + 1;
    default:
      return old == 0 || old > b ? b : old - 1;
  }
}

}  // namespace

Cta& window(Context& c, Space space, u64 address) {
  if (space == kShared && (address >> kRankShift) != c.warp.cta->rank)
    fault("memory", "shared::cta address 0x%llx belongs to CTA %llu of the cluster, not to the executing CTA %u",
          (unsigned long long)address, (unsigned long long)(address >> kRankShift), c.warp.cta->rank);
  return c.cluster.cta_at(u32(address), "access");
}

u8* shared_at(Cluster&, Cta& cta, u32 offset, u32 bytes, u32 align, const char* what) {
  if (cta.ended)
    fault("exit", "%s of %u bytes at shared offset 0x%x of CTA %u, which has ended without waiting for it", what, bytes,
          offset, cta.rank);
  u32 first = cta.cluster->machine.launch.machine_code ? 0 : kSharedBase;
  if (offset < first || u64(offset) + bytes > cta.shared.size())
    fault("memory", "%s of %u bytes at shared offset 0x%x (byte %lld of %llu after the reserved KiB): %s", what, bytes,
          offset, (long long)offset - kSharedBase, (unsigned long long)(cta.shared.size() - kSharedBase), kOutside);
  if (offset & (align - 1))
    fault("memory", "%s at shared offset 0x%x, which is not a multiple of %u", what, offset, align);
  return cta.shared.data() + offset;
}

void shared_written(Cta& cta, u32 offset, u32 bytes) {
  u8* shadow = cta.shadow.data() + offset;
  for (u32 i = 0; i < bytes; i++) {
    if (shadow[i] == kBarrier)
      fault("barrier", "write of %u bytes at shared offset 0x%x over the live mbarrier at 0x%x", bytes, offset,
            (offset + i) & ~7u);
    shadow[i] = kWritten;
  }
}

void shared_read(Cluster& cluster, Cta& cta, u32 offset, u32 bytes, const char* what) {
  if (!cluster.machine.options.poison) return;
  const u8* shadow = cta.shadow.data() + offset;
  for (u32 i = 0; i < bytes; i++) {
    if (shadow[i] == kUnwritten)
      fault("poison",
            "%s reads shared memory that nobody wrote: offset 0x%x (byte %u of the window after the "
            "reserved KiB) of CTA %u in the cluster",
            what, offset + i, offset + i - kSharedBase, cta.rank);
  }
}

u8* global_at(Cluster& cluster, u64 address, u64 bytes, bool write, const char* what) {
  const Region* region = cluster.machine.region_of(address);
  if (!region || address + bytes > region->address + region->size) {
    const Region* near = region ? region : cluster.machine.region_of(address - 1);
    fault("memory", "%s of %llu bytes at global address 0x%llx, outside every region%s%s", what,
          (unsigned long long)bytes, (unsigned long long)address, near ? "; it runs past the end of region " : "",
          near ? ("@region:" + decimal(near->index) + "@").c_str() : "");
  }
  if (write && !region->writable)
    fault("memory", "%s of %llu bytes into read-only region @region:%u@, byte %llu", what, (unsigned long long)bytes,
          region->index, (unsigned long long)(address - region->address));
  return reinterpret_cast<u8*>(address);
}

void global_touched(Cluster& cluster, u32 actor, u32 pc, Proxy proxy, Kind kind, u64 address, u64 bytes, Lanes lanes,
                    bool strong) {
  if (!cluster.events) return;
  const Region* region = cluster.machine.region_of(address);
  bool changes = region && region->writable;
  cluster.events->global(actor, pc, proxy, kind, changes ? address : 0, bytes, lanes, strong);
}

Step op_load(Context& c) {
  switch (c.in.width) {
    case 1:
      return load<1>(c);
    case 2:
      return load<2>(c);
    case 4:
      return load<4>(c);
    case 8:
      return load<8>(c);
    default:
      return load<16>(c);
  }
}

Step op_store(Context& c) {
  switch (c.in.width) {
    case 1:
      return store<1>(c);
    case 2:
      return store<2>(c);
    case 4:
      return store<4>(c);
    case 8:
      return store<8>(c);
    default:
      return store<16>(c);
  }
}

Step op_atomic(Context& c) {
  const Insn& in = c.in;
  const u32 width = in.width;
  u32* result = in.d == kNone ? nullptr : c.warp.write(in.d);
  Touched touched(c, Kind::Write, true);
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    u64 address = c.address(lane);
    aligned(address, width, "atomic");
    Space space = resolve(in.flags & 7, address);
    u8* place;
    if (space == kGlobal) {
      place = global_at(c.cluster, address, width, true, "atomic");
      touched.global(address, width, lane, Kind::Write);
      ordered(c, address, result, true, true);
      if (c.cluster.machine.launch.clusters_talk) c.cluster.machine.changes++;
    } else {
      Cta& cta = window(c, space, address);
      u32 offset = u32(address) & kOffsetMask;
      place = shared_at(c.cluster, cta, offset, width, 1, "atomic");
      shared_read(c.cluster, cta, offset, width, "atomic");
      shared_written(cta, offset, width);
      touched.shared(cta, offset, width, lane);
    }
    u64 old = 0;
    std::memcpy(&old, place, width);
    auto operand = [&](s32 slot) {
      return slot == kNone ? 0 : width == 8 ? c.value64(slot, lane) : c.warp.read(slot)[lane];
    };
    u64 made = combine(in.extra, old, operand(in.b), operand(in.c), in.flags & kSigned, in.flags & kFloat);
    std::memcpy(place, &made, width);
    if (result) {
      result[lane] = u32(old);
      if (width == 8) result[32 + lane] = u32(old >> 32);
    }
  }
  touched.flush();
  c.cluster.progress++;
  return Step::Next;
}
