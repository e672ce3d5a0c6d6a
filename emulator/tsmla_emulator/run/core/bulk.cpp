// Bulk copies: tiles through tensor maps and plain byte ranges, their commit groups and waits.
#include "box.h"
#include "ops.h"

namespace {

struct TensorLoad : AsyncOp {
  Box box;
  u32 offset = 0, barrier_address = 0;
  std::vector<Cta*> targets;     // one, or those of the multicast mask
  bool barrier_follows = false;  // multicast: the barrier at the same offset of each target
  bool to_pair = false;          // of each target's pair: the CTA whose rank is as even as that of the barrier named

  void run(Cluster& cluster) override {
    u32 bytes = box.bytes();
    for (Cta* cta : targets) {
      shared_at(cluster, *cta, offset, bytes, 16, "tensor copy");
      box.walk([&](u32 linear, u64 from, u32 count) {
        const u8* source = from ? global_at(cluster, from, count, false, "tensor copy") : nullptr;
        if (source && cta == targets.front())
          global_touched(cluster, actor, pc, Proxy::Async, Kind::Read, from, count);
        atoms(offset, linear, count, box.map.swizzle, [&](u32 to, u32 done, u32 piece) {
          u8* place = cta->shared.data() + to;
          if (source)
            std::memcpy(place, source + done, piece);
          else
            fill(place, piece);
        });
      });
      shared_written(*cta, offset, bytes);
      u32 rank = to_pair ? (cta->rank & ~1u) | (barrier_address >> kRankShift & 1) : cta->rank;
      u32 address = barrier_follows ? (rank << kRankShift) | (barrier_address & kOffsetMask) : barrier_address;
      Mbarrier& barrier = mbarrier_of_engine(cluster, address, "tensor copy's complete_tx");
      if (cluster.events) cluster.events->shared(actor, pc, Proxy::Async, Kind::Write, cta->rank, offset, bytes);
      mbarrier_transact(cluster, barrier, bytes, actor);
    }
  }

 private:
  void fill(u8* place, u32 bytes) const {
    std::memset(place, 0, bytes);
    if (!box.map.nan_fill || !box.map.is_float) return;
    for (u32 i = 0; i < bytes; i += box.map.element_bytes) std::memset(place + i, 0xff, box.map.element_bytes);
  }
};

// A store reads shared memory, and later writes global memory: two steps that somebody may wait for.
struct StoreWrite : AsyncOp {
  std::vector<std::pair<u64, std::vector<u8>>> pieces;
  Shared<BulkGroup> group;
  void run(Cluster& cluster) override {
    for (auto& [to, bytes] : pieces) {
      u8* place = global_at(cluster, to, bytes.size(), true, "bulk store");
      Kind kind = std::memcmp(place, bytes.data(), bytes.size()) ? Kind::Write : Kind::Rewrite;
      global_touched(cluster, actor, pc, Proxy::Async, kind, to, bytes.size());
      std::memcpy(place, bytes.data(), bytes.size());
    }
    group->writing--;
  }
};

struct StoreRead : AsyncOp {
  Box box;
  bool tensor = true;
  u64 to = 0;
  u32 bytes = 0;
  Cta* cta = nullptr;
  u32 offset = 0, writer = 0;  // writer: the actor of its second step
  Shared<BulkGroup> group;

  void run(Cluster& cluster) override {
    auto write = std::make_unique<StoreWrite>();
    write->pc = pc, write->issuer = issuer, write->actor = writer, write->group = group;
    if (tensor) {
      u32 total = box.map.box_bytes();
      shared_at(cluster, *cta, offset, total, 16, "tensor store");
      box.walk([&](u32 linear, u64 target, u32 count) {
        if (!target) return;
        std::vector<u8> row(count);
        atoms(offset, linear, count, box.map.swizzle, [&](u32 from, u32 done, u32 piece) {
          shared_read(cluster, *cta, from, piece, "tensor store");
          std::memcpy(row.data() + done, cta->shared.data() + from, piece);
        });
        write->pieces.emplace_back(target, std::move(row));
      });
      if (cluster.events) cluster.events->shared(actor, pc, Proxy::Async, Kind::Read, cta->rank, offset, total);
    } else {
      const u8* from = shared_at(cluster, *cta, offset, bytes, 16, "bulk store");
      shared_read(cluster, *cta, offset, bytes, "bulk store");
      write->pieces.emplace_back(to, std::vector<u8>(from, from + bytes));
      if (cluster.events) cluster.events->shared(actor, pc, Proxy::Async, Kind::Read, cta->rank, offset, bytes);
    }
    group->reading--;
    submit(cluster, nullptr, std::move(write));
  }
};

struct BulkLoad : AsyncOp {
  u64 from = 0;
  Cta *source = nullptr, *cta = nullptr;  // source: shared memory of the cluster, null for global
  u32 source_offset = 0, offset = 0, bytes = 0, barrier_address = 0;
  void run(Cluster& cluster) override {
    u8* to = shared_at(cluster, *cta, offset, bytes, 16, "bulk copy");
    const u8* data;
    if (source) {
      data = shared_at(cluster, *source, source_offset, bytes, 16, "bulk copy");
      shared_read(cluster, *source, source_offset, bytes, "bulk copy");
      if (cluster.events)
        cluster.events->shared(actor, pc, Proxy::Async, Kind::Read, source->rank, source_offset, bytes);
    } else {
      data = global_at(cluster, from, bytes, false, "bulk copy");
      global_touched(cluster, actor, pc, Proxy::Async, Kind::Read, from, bytes);
    }
    std::memmove(to, data, bytes);
    shared_written(*cta, offset, bytes);
    if (cluster.events) cluster.events->shared(actor, pc, Proxy::Async, Kind::Write, cta->rank, offset, bytes);
    mbarrier_transact(cluster, mbarrier_of_engine(cluster, barrier_address, "bulk copy's complete_tx"), bytes, actor);
  }
};

Shared<BulkGroup>& open_group(Warp& w, u32 lane) {
  Shared<BulkGroup>& open = w.bulk[lane].open;
  if (!open) open = Shared<BulkGroup>::made();
  return open;
}

template <class Op>
std::unique_ptr<Op> begin(Context& c) {
  auto op = std::make_unique<Op>();
  op->pc = c.group.pc, op->issuer = &c.warp;
  if (c.cluster.events) op->actor = c.cluster.events->fork(c.actor(), op->pc, 0);
  return op;
}

const u8* tensor_map_at(Context& c, u64 address) {
  if (address % 64)
    fault("descriptor", "tensor map at address 0x%llx, not a multiple of 64", (unsigned long long)address);
  const LaunchRecord& launch = c.cluster.machine.launch;
  u64 base = u64(launch.params);
  if (address >= base && address + 128 <= base + launch.param_bytes) return reinterpret_cast<const u8*>(address);
  return global_at(c.cluster, address, 128, false, "tensor map");
}

Box box_of(Context& c, u32 lane, u32 rank, u64 map_address) {
  Box box;
  box.map = TensorMap::decode(tensor_map_at(c, map_address));
  if (box.map.rank != rank) fault("descriptor", "a %ud copy through a tensor map of rank %u", rank, box.map.rank);
  for (u32 i = 0; i < rank; i++) box.at[i] = s32(c.item(i, lane));
  box.gathers = c.in.flags & kGather4;
  if (!box.gathers) return box;
  if (c.cluster.machine.launch.architecture < 100) fault("not implemented", "tile::gather4 below sm_100");
  if (box.map.count(1) != 1) fault("descriptor", "tile::gather4 with a box of %u rows, not one", box.map.count(1));
  for (u32 i = 0; i < Box::gathered; i++) box.rows[i] = s32(c.item(1 + i, lane));
  return box;
}

void load_tensor(Context& c, u32 lane) {
  const Insn& in = c.in;
  const u32 rank = in.extra, coordinates = in.flags & kGather4 ? 1 + Box::gathered : rank;
  auto op = begin<TensorLoad>(c);
  op->box = box_of(c, lane, rank, c.value64(in.b, lane) + s64(s32(c.item(coordinates, lane))));
  u32 address = u32(c.address(lane));
  if (address & 127) fault("memory", "tensor copy to shared address 0x%x, not a multiple of 128", address);
  op->offset = address & kOffsetMask;
  op->barrier_address = c.warp.read(in.c)[lane] + c.item(coordinates + 1, lane);
  Cta& cta = c.cluster.cta_at(address, "tensor copy");
  bool own = (in.flags & 7) == kShared;
  if (own && &cta != c.warp.cta)
    fault("memory", "tensor copy to shared::cta at 0x%x, which is CTA %u's", address, cta.rank);
  if (!(in.flags & kPairGroup) && !(in.flags & kMulticast) &&
      op->barrier_address >> kRankShift != address >> kRankShift)
    fault("barrier", "tensor copy to CTA %u signals an mbarrier of CTA %u without .cta_group::2", address >> kRankShift,
          op->barrier_address >> kRankShift);
  if (in.flags & kMulticast) {
    u32 mask = c.warp.read(in.e)[lane] & 0xffff;
    for (auto& target : c.cluster.ctas)
      if (mask >> target->rank & 1) op->targets.push_back(target.get());
    if (!mask || mask >> c.cluster.ctas.size())
      fault("memory", "multicast mask 0x%x in a cluster of %zu", mask, c.cluster.ctas.size());
    c.cluster.cta_at(op->barrier_address, "tensor copy's mbarrier");
    op->barrier_follows = true, op->to_pair = in.flags & kPairGroup;
  } else {
    op->targets.push_back(&cta);
  }
  if (c.warp.trace) {
    u64 source = op->box.map.address;
    for (u32 i = 0; i < coordinates; i++) source = source * 1000003 + c.item(i, lane);
    for (Cta* target : op->targets) {
      u32 barrier = op->barrier_follows ? target->rank << kRankShift | (op->barrier_address & kOffsetMask) : op->barrier_address;
      c.warp.trace->note(Note::kLoad, barrier, op->box.bytes(), source);
    }
  }
  submit(c.cluster, nullptr, std::move(op));
}

template <class Op>
void join_group(Context& c, Op& op, u32 lane) {
  op.group = open_group(c.warp, lane);
  op.group->reading++, op.group->writing++;
  op.group->readers.push_back(op.actor);
  if (!c.cluster.events) return;
  u32& last = c.warp.bulk[lane].writer;
  op.writer = last = c.cluster.events->fork(c.actor(), op.pc, last);
  op.group->writers.push_back(op.writer);
}

void store_tensor(Context& c, u32 lane) {
  auto op = begin<StoreRead>(c);
  op->box = box_of(c, lane, c.in.extra, c.value64(c.in.b, lane) + s64(s32(c.warp.read(c.in.e)[lane])));
  u32 address = u32(c.address(lane));
  if (address & 127) fault("memory", "tensor store from shared address 0x%x, not a multiple of 128", address);
  op->cta = &c.cluster.cta_at(address, "tensor store");
  op->offset = address & kOffsetMask;
  if (c.warp.trace) c.warp.trace->note(Note::kStore, 0, op->box.map.box_bytes());
  join_group(c, *op, lane);
  submit(c.cluster, nullptr, std::move(op));
}

// Bulk copies begin at multiples of 16 bytes.
u64 global_place(u64 address, const char* what) {
  if (address % 16)
    fault("memory", "%s global address 0x%llx, not a multiple of 16", what, (unsigned long long)address);
  return address;
}

void copy_bytes(Context& c, u32 lane) {
  const Insn& in = c.in;
  u32 to_space = in.flags & 15, from_space = in.flags >> 4 & 15;
  auto at = [&](s32 slot, u32 item, bool wide) {
    return (wide ? c.value64(slot, lane) : u64(c.warp.read(slot)[lane])) + s64(s32(c.item(item, lane)));
  };
  u32 bytes = c.warp.read(in.c)[lane];
  if (bytes == 0 || bytes % 16) fault("memory", "bulk copy of %u bytes, not a multiple of 16", bytes);
  if (to_space == kGlobal) {
    auto op = begin<StoreRead>(c);
    u32 address = u32(at(in.b, 1, false));
    op->tensor = false, op->to = global_place(at(in.a, 0, true), "bulk store to"), op->bytes = bytes;
    op->cta = &c.cluster.cta_at(address, "bulk store"), op->offset = address & kOffsetMask;
    join_group(c, *op, lane);
    if (c.warp.trace) c.warp.trace->note(Note::kStore, 0, bytes);
    submit(c.cluster, nullptr, std::move(op));
    return;
  }
  auto op = begin<BulkLoad>(c);
  u32 to = u32(at(in.a, 0, false));
  op->cta = &c.cluster.cta_at(to, "bulk copy"), op->offset = to & kOffsetMask, op->bytes = bytes;
  if (from_space == kGlobal) {
    op->from = global_place(at(in.b, 1, true), "bulk copy from");
  } else {
    u32 from = u32(at(in.b, 1, false));
    op->source = &c.cluster.cta_at(from, "bulk copy"), op->source_offset = from & kOffsetMask;
  }
  if (in.e == kNone) fault("not implemented", "bulk copy to shared memory without an mbarrier");
  op->barrier_address = u32(at(in.e, 2, false));
  if (c.warp.trace) c.warp.trace->note(Note::kLoad, op->barrier_address, bytes, op->from);
  submit(c.cluster, nullptr, std::move(op));
}

Step wait_groups(Context& c) {
  Warp& w = c.warp;
  u32 allowed = u32(c.in.imm);
  bool reads_only = c.in.extra & 1;
  if (!bulk_satisfied(w, c.mask, allowed, reads_only)) {
    if (c.mask != c.group.mask)
      fault("not implemented", "cp.async.bulk.wait_group under a predicate that not all lanes of a group meet");
    return c.block(Wait::BulkGroup, nullptr, allowed << 1 | u32(reads_only), 0);
  }
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    auto& groups = w.bulk[__builtin_ctz(rest)].groups;
    for (size_t i = 0; i + allowed < groups.size(); i++) {
      if (c.cluster.events) {
        for (u32 actor : groups[i]->readers) c.cluster.events->join(c.actor(), actor);
        for (u32 actor : groups[i]->writers)
          if (!reads_only) c.cluster.events->join(c.actor(), actor);
      }
      groups[i]->readers.clear();
    }
    while (!reads_only && groups.size() > allowed) groups.pop_front();
  }
  return Step::Next;
}

}  // namespace

bool bulk_satisfied(const Warp& w, u32 lanes, u32 allowed, bool reads_only) {
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    auto& groups = w.bulk[__builtin_ctz(rest)].groups;
    for (size_t i = 0; i + allowed < groups.size(); i++)
      if (groups[i]->reading || (!reads_only && groups[i]->writing)) return false;
  }
  return true;
}

void check_bulk_at_exit(Context& c) {
  if (!c.cluster.events) return;
  for (auto& thread : c.warp.bulk) {
    bool open = bool(thread.open);
    for (auto& group : thread.groups) open |= !group->readers.empty();
    if (open)
      fault("race",
            "the warp exits while its bulk stores may still read shared memory: no cp.async.bulk.wait_group covers "
            "them");
  }
}

Step op_bulk(Context& c) {
  switch (c.in.op) {
    case OP_BULK_COMMIT:
      for (u32 rest = c.mask; rest; rest &= rest - 1) {
        u32 lane = u32(__builtin_ctz(rest));
        c.warp.bulk[lane].groups.push_back(std::move(open_group(c.warp, lane)));
        c.warp.bulk[lane].open = {};
      }
      return Step::Next;
    case OP_BULK_WAIT:
      return wait_groups(c);
    default:
      break;
  }
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    if (c.in.op == OP_BULK_LOAD_TENSOR)
      load_tensor(c, lane);
    else if (c.in.op == OP_BULK_STORE_TENSOR)
      store_tensor(c, lane);
    else
      copy_bytes(c, lane);
  }
  return Step::Next;
}
