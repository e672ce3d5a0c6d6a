// Blackwell's tensor memory: allocation, loads, stores and their waits.
#include "tensor_memory.h"

TensorMemory& tmem_of(Cta& cta) {
  if (!cta.tmem) {
    cta.tmem = std::make_unique<TensorMemory>();
    cta.tmem->cells.assign(TensorMemory::lanes * TensorMemory::columns, ~0u);
    cta.tmem->written.assign(TensorMemory::lanes * TensorMemory::columns, 0);
  }
  return *cta.tmem;
}

void check_columns(Cta& cta, u32 first, u32 count, const char* what) {
  TensorMemory& t = tmem_of(cta);
  if (first + count > TensorMemory::columns)
    fault("tmem", "%s touches columns %u to %u of 512", what, first, first + count - 1);
  for (u32 column = first; column < first + count; column++)
    if (!t.allocated[column]) fault("tmem", "%s touches tensor memory column %u, which is not allocated", what, column);
}

Cta& peer_of(Cluster& cluster, const Cta& cta, const char* what) {
  if ((cta.rank ^ 1) >= cluster.ctas.size())
    fault("tmem", "%s of a pair of CTAs in CTA %u of %zu, which has no other", what, cta.rank, cluster.ctas.size());
  return *cluster.ctas[cta.rank ^ 1];
}

void check_written(Cluster& cluster, Cta& cta, u32 lane, u32 column, u32 count, const char* what) {
  if (!cluster.machine.options.poison) return;
  const u8* written = cta.tmem->written.data() + lane * TensorMemory::columns + column;
  for (u32 i = 0; i < count; i++)
    if (!written[i])
      fault("poison", "%s reads tensor memory that nobody wrote: lane %u, column %u", what, lane, column + i);
}

namespace {

// One warp of each CTA of a pair executes an instruction of the pair (PTX ISA 9.7.16.7.1), and knows afterwards what both
// did before. True when both are there.
bool meets(Context& c, u32 columns) {
  Warp& w = c.warp;
  peer_of(c.cluster, *w.cta, "tcgen05");
  Meeting& meeting = c.cluster.meetings[w.cta->rank / 2];
  if (!w.meeting) {
    if (meeting.arrived && (meeting.op != c.in.op || meeting.columns != columns))
      fault("tmem", "the CTAs of a pair execute different tcgen05 instructions of the pair, or of %u and %u columns",
            meeting.columns, columns);
    meeting.op = c.in.op, meeting.columns = columns;
    w.meeting = meeting.generation + 1;
    if (c.cluster.events) c.cluster.events->release(w.actor, meeting.sync);
    if (++meeting.arrived == 2) {
      meeting.arrived = 0;
      meeting.generation++;
      if (c.cluster.events) c.cluster.events->publish(meeting.sync);
      c.cluster.progress++;
    }
  }
  if (meeting.generation < w.meeting) return false;
  if (c.cluster.events) c.cluster.events->acquire(w.actor, meeting.sync);
  w.meeting = 0;
  return true;
}

// Reserves columns that are vacant; ~0 when there are not so many.
u32 reserve(TensorMemory& t, u32 columns) {
  for (u32 first = 0; first + columns <= TensorMemory::columns; first += columns) {
    bool vacant = true;
    for (u32 i = 0; i < columns; i++) vacant &= !t.allocated[first + i];
    if (!vacant) continue;
    std::fill_n(t.allocated + first, columns, u8(++t.allocations));
    return first;
  }
  return ~0u;
}

Step allocate(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("tcgen05.alloc");
  u32 columns = c.warp.read(c.in.b)[0];
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    fault("budget", "tcgen05.alloc of %u columns: 32 to 512, a power of two", columns);
  Cta& cta = *c.warp.cta;
  TensorMemory& t = tmem_of(cta);
  if (t.relinquished) fault("tmem", "tcgen05.alloc after relinquish_alloc_permit");
  if (!c.warp.meeting) {  // else they are reserved, and the other CTA has not come
    t.reserved = reserve(t, columns);
    if (t.reserved == ~0u) return c.block(Wait::Alloc, nullptr, columns, 0);
    if (c.cluster.events)
      c.cluster.events->tensor_columns(c.warp.actor, c.group.pc, cta.rank, t.reserved, columns);
  }
  if (c.in.extra == 2 && !meets(c, columns)) return c.block(Wait::Pair, nullptr, 0, 0);
  u32 address = u32(c.address(0));
  Cta& owner = c.cluster.cta_at(address, "tcgen05.alloc");
  u32 offset = address & kOffsetMask;
  std::memcpy(shared_at(c.cluster, owner, offset, 4, 4, "tcgen05.alloc"), &t.reserved, 4);
  shared_written(owner, offset, 4);
  if (c.cluster.events)
    c.cluster.events->shared(c.warp.actor, c.group.pc, Proxy::Generic, Kind::Write, owner.rank, offset, 4);
  return Step::Next;
}

Step deallocate(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  u32 first = c.warp.read(c.in.a)[0] & 0xffff, columns = c.warp.read(c.in.b)[0];
  if (c.in.extra == 2 && !meets(c, columns)) return c.block(Wait::Pair, nullptr, 0, 0);
  check_columns(*c.warp.cta, first, columns, "tcgen05.dealloc");
  TensorMemory& t = *c.warp.cta->tmem;
  u8 owner = t.allocated[first];
  for (u32 i = 0; i < TensorMemory::columns; i++)
    if ((t.allocated[i] == owner) != (i >= first && i < first + columns))
      fault("tmem", "tcgen05.dealloc of columns %u to %u, which is not one whole allocation", first,
            first + columns - 1);
  std::fill_n(t.allocated + first, columns, u8(0));
  if (c.cluster.events)
    c.cluster.events->tensor_columns(c.warp.actor, c.group.pc, c.warp.cta->rank, first, columns);
  for (u32 lane = 0; lane < TensorMemory::lanes; lane++)
    std::fill_n(t.written.begin() + lane * TensorMemory::columns + first, columns, u8(0));
  c.cluster.progress++;
  return Step::Next;
}

// Where lane `l`, register `r` of a shape lies relative to the warp's first lane and the address.
Cell cell_of(u32 shape, u32 l, u32 r) {
  switch (shape) {
    case 0:
      return {l, r};
    case 1:
      return {l / 4 + 8 * (l % 2), l / 2 % 2 + 2 * r};
    case 2:
      return {l / 4 + 8 * (r % 2), l % 4 + 4 * (r / 2)};
    default:
      return {l / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r / 4)};
  }
}

struct Window {
  u32 lane, column, columns, rows;
};

Window window_of(Context& c, const char* what) {
  u32 address = u32(c.address(0));
  for (u32 lane = 1; lane < 32; lane++)
    if (u32(c.address(lane)) != address) fault("tmem", "%s with different addresses in the lanes of a warp", what);
  u32 shape = c.in.flags & 15, lane = address >> 16, own = 32 * (c.warp.index % 4);
  u32 rows = shape == 0 ? 32 : 16;
  if (lane >= TensorMemory::lanes) fault("tmem", "%s at lane %u of 128", what, lane);
  if (c.cluster.machine.options.lenient_tensor) lane = own | (lane & 31);
  if (lane < own || lane + rows > own + 32)
    fault("tmem", "%s of lanes %u to %u by warp %u, which may touch lanes %u to %u only", what, lane, lane + rows - 1,
          c.warp.index, own, own + 31);
  constexpr u32 per_repeat[] = {1, 2, 4, 8};
  u32 columns = c.in.extra * per_repeat[shape];
  check_columns(*c.warp.cta, address & 0xffff, columns, what);
  return {lane, address & 0xffff, columns, rows};
}

void reduce(Context& c, u32 (*values)[32]) {
  bool largest = c.in.flags >> 4 & 1, nan = c.in.flags >> 5 & 1;
  u32* result = c.warp.write(c.in.d);
  for (u32 lane = 0; lane < 32; lane++) {
    f32 value = bits<f32>(values[0][lane]);
    for (u32 i = 1; i < c.in.count; i++) {
      f32 other = bits<f32>(values[i][lane]);
      if (largest)
        value = nan ? max_nan(value, other) : max_number(value, other);
      else
        value = nan ? min_nan(value, other) : min_number(value, other);
    }
    result[lane] = bits<u32>(value);
  }
}

// The values are there at once: whoever uses them gets them, with or without tcgen05.wait::ld (PTX ISA 9.7.16.6.4.5,
// true register dependencies), and compilers move uses before the wait. What the wait orders is the reuse of the tensor
// memory, which only the happens-before check sees.
Step load(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("tcgen05.ld");
  Window w = window_of(c, "tcgen05.ld");
  Cta& cta = *c.warp.cta;
  for (u32 row = 0; row < w.rows; row++) check_written(c.cluster, cta, w.lane + row, w.column, w.columns, "tcgen05.ld");
  const s32* items = c.cluster.program.list(c.in);
  if (c.cluster.events) {
    u32 number = c.cluster.events->tensor_load(c.warp.actor, c.group.pc, cta.rank, w.lane, w.rows, w.column, w.columns);
    c.warp.load_numbers.resize(c.cluster.program.slots);
    for (u32 r = 0; r < c.in.count; r++) c.warp.load_numbers[u32(std::max(items[r], 0))] = number;
    if (c.in.d >= 0) c.warp.load_numbers[u32(c.in.d)] = number;
    if (c.in.width) c.warp.load_boards[c.in.width - 1] = number;
  }
  u32 shape = c.in.flags & 15;
  u32 values[128][32];
  for (u32 r = 0; r < c.in.count; r++)
    for (u32 lane = 0; lane < 32; lane++) {
      Cell cell = cell_of(shape, lane, r);
      values[r][lane] = *cta.tmem->at(w.lane + cell.lane, w.column + cell.column);
    }
  for (u32 r = 0; r < c.in.count; r++) std::memcpy(c.warp.write(items[r]), values[r], 128);
  if (c.in.flags >> 6 & 1) reduce(c, values);
  return Step::Next;
}

// UTCATOMSWS: finds so many 32 columns that are vacant, in both CTAs of a pair, and says which; or says that there are
// none.
Step find(Context& c) {
  u32 columns = 32 * c.warp.read(c.in.a)[0], first = 0;
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    fault("budget", "tensor memory of %u columns: 32 to 512, a power of two", columns);
  for (u32 i = 0; i < c.in.extra; i++) {
    Cta& cta = i ? peer_of(c.cluster, *c.warp.cta, "UTCATOMSWS") : *c.warp.cta;
    u32 found = reserve(tmem_of(cta), columns);
    if (i && found != first) fault("tmem", "the CTAs of a pair have different columns vacant");
    first = found;
    if (found == ~0u) break;
    if (c.cluster.events) c.cluster.events->tensor_columns(c.warp.actor, c.group.pc, cta.rank, first, columns);
  }
  std::fill_n(c.warp.write(c.cluster.program.list(c.in)[0]), 32, first == ~0u ? 0 : ~0u);
  if (first != ~0u) std::fill_n(c.warp.write(c.in.d), 32, first / 32);
  return first == ~0u ? Step::Yield : Step::Next;
}

// UTCATOMSWS.AND: columns whose bit of the low 16 is zero are vacant.
Step release(Context& c) {
  Cta& cta = *c.warp.cta;
  TensorMemory& t = tmem_of(cta);
  u32 kept = c.warp.read(c.in.a)[0];
  for (u32 i = 0; i < 16; i++) {
    if (kept >> i & 1 || !t.allocated[32 * i]) continue;
    std::fill_n(t.allocated + 32 * i, 32, u8(0));
    if (c.cluster.events) c.cluster.events->tensor_columns(c.warp.actor, c.group.pc, cta.rank, 32 * i, 32);
    for (u32 lane = 0; lane < TensorMemory::lanes; lane++)
      std::fill_n(t.written.begin() + lane * TensorMemory::columns + 32 * i, 32, u8(0));
  }
  c.cluster.progress++;
  return Step::Next;
}

struct TensorStore : AsyncOp {
  Window window;
  u32 shape = 0;
  std::vector<std::array<u32, 32>> values;
  void run(Cluster& cluster) override {
    TensorMemory& t = *issuer->cta->tmem;
    for (u32 r = 0; r < values.size(); r++)
      for (u32 lane = 0; lane < 32; lane++) {
        Cell cell = cell_of(shape, lane, r);
        *t.at(window.lane + cell.lane, window.column + cell.column) = values[r][lane];
      }
    for (u32 row = 0; row < window.rows; row++)
      std::fill_n(t.written.begin() + (window.lane + row) * TensorMemory::columns + window.column, window.columns,
                  u8(1));
    if (cluster.events)
      cluster.events->tensor_store(actor, pc, issuer->cta->rank, window.lane, window.rows, window.column,
                                   window.columns);
  }
};

Step store(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("tcgen05.st");
  auto op = std::make_unique<TensorStore>();
  op->pc = c.group.pc, op->issuer = &c.warp;
  op->window = window_of(c, "tcgen05.st");
  op->shape = c.in.flags & 15;
  const s32* items = c.cluster.program.list(c.in);
  op->values.resize(c.in.count);
  for (u32 r = 0; r < c.in.count; r++) std::memcpy(op->values[r].data(), c.warp.read(items[r]), 128);
  if (c.cluster.events) {
    u32 after = c.warp.tmem_store_actors.empty() ? 0 : c.warp.tmem_store_actors.back();
    op->actor = c.cluster.events->fork(c.warp.actor, op->pc, after);
    c.warp.tmem_store_actors.push_back(op->actor);
  }
  submit(c.cluster, &c.warp.tmem_stores, std::move(op));
  return Step::Next;
}

Step wait_load(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  if (c.cluster.events) c.cluster.events->loads_done(c.warp.actor, ~0u);
  return Step::Next;
}

Step wait_store(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  if (!c.warp.tmem_stores.ops.empty()) return c.block(Wait::Tcgen05, nullptr, 0, 0);
  if (c.cluster.events)
    for (u32 actor : c.warp.tmem_store_actors) c.cluster.events->join(c.warp.actor, actor);
  c.warp.tmem_store_actors.clear();
  return Step::Next;
}

}  // namespace

// For kernels that rely on more than PTX promises: an instruction that uses loaded values has waited for their load; a
// move only passes them on.
void follow_loads(Cluster& cluster, Warp& w, const Insn& in) {
  if (w.load_numbers.empty()) return;
  std::vector<u32>& numbers = w.load_numbers;
  const s32* items = cluster.program.list(in);
  auto number = [&](s32 slot) { return slot >= 0 ? numbers[u32(slot)] : 0; };
  auto pass = [&](s32 to, s32 from) {
    if (to >= 0) numbers[u32(to)] = number(from);
  };
  u32 per_item = std::max(1u, in.width / 4u);
  switch (in.op) {
    case OP_MOVE64:
      pass(in.d + 1, in.a + 1);
      [[fallthrough]];
    case OP_MOVE32:
    case OP_MOVE16:
      pass(in.d, in.a);
      return;
    case OP_PACK:
      if (in.width < 4) break;
      for (u32 i = 0; i < in.count * per_item && in.d >= 0; i++)
        pass(in.d + s32(i), items[i / per_item] < 0 ? kNone : items[i / per_item] + s32(i % per_item));
      return;
    case OP_UNPACK:
      if (in.width < 4) break;
      for (u32 i = 0; i < in.count * per_item; i++)
        if (items[i / per_item] >= 0) pass(items[i / per_item] + s32(i % per_item), in.a + s32(i));
      return;
    default:
      break;
  }
  u32 newest = 0;
  for (s32 slot : {in.a, in.b, in.c, in.e}) newest = std::max(newest, number(slot));
  for (u32 i = 0; i < in.count; i++) newest = std::max(newest, number(items[i]));
  if (newest) cluster.events->loads_done(w.actor, newest);
}

Step op_tensor(Context& c) {
  if (c.cluster.machine.launch.architecture < 100) fault("not implemented", "tcgen05 below sm_100");
  switch (c.in.op) {
    case OP_TMEM_ALLOC:
      return allocate(c);
    case OP_TMEM_DEALLOC:
      return deallocate(c);
    case OP_TMEM_RELINQUISH:
      tmem_of(*c.warp.cta).relinquished = true;
      return Step::Next;
    case OP_TMEM_FIND:
      return find(c);
    case OP_TMEM_FREE:
      return release(c);
    case OP_TMEM_LOAD:
      return load(c);
    case OP_TMEM_STORE:
      return store(c);
    case OP_TMEM_WAIT_LOAD:
      return wait_load(c);
    case OP_TMEM_WAIT_STORE:
      return wait_store(c);
    case OP_TMEM_MMA:
      return op_tensor_multiply(c);
    case OP_TMEM_COPY:
      return op_tensor_copy(c);
    default:
      return op_tensor_commit(c);
  }
}
