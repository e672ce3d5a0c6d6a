// Blackwell's tensor memory and matrix instructions (tcgen05).
#include "matrix.h"

namespace {

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

void check_written(Cluster& cluster, Cta& cta, u32 lane, u32 column, u32 count, const char* what) {
  if (!cluster.machine.options.poison) return;
  const u8* written = cta.tmem->written.data() + lane * TensorMemory::columns + column;
  for (u32 i = 0; i < count; i++)
    if (!written[i]) fault("poison", "%s reads tensor memory that nobody wrote: lane %u, column %u", what, lane, column + i);
}

Cta& peer_of(Cluster& cluster, const Cta& cta, const char* what) {
  if (cluster.ctas.size() < 2) fault("launch", "%s with cta_group::2 outside a cluster of at least two CTAs", what);
  return *cluster.ctas[cta.rank ^ 1];
}

// ---- allocation ---------------------------------------------------------------------------------------------------

Step allocate(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("tcgen05.alloc");
  u32 columns = c.warp.read(c.in.b)[0];
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    fault("budget", "tcgen05.alloc of %u columns: 32 to 512, a power of two", columns);
  Cta& cta = *c.warp.cta;
  TensorMemory& t = tmem_of(cta);
  if (t.relinquished) fault("tmem", "tcgen05.alloc after relinquish_alloc_permit");
  for (u32 first = 0; first + columns <= TensorMemory::columns; first += columns) {
    bool vacant = true;
    for (u32 i = 0; i < columns; i++) vacant &= !t.allocated[first + i];
    if (!vacant) continue;
    t.allocations++;
    std::fill_n(t.allocated + first, columns, u8(t.allocations));
    u32 address = u32(c.address(0));
    Cta& owner = c.cluster.cta_at(address, "tcgen05.alloc");
    u32 offset = address & kOffsetMask;
    std::memcpy(shared_at(c.cluster, owner, offset, 4, 4, "tcgen05.alloc"), &first, 4);
    shared_written(owner, offset, 4);
    if (c.cluster.events)
      c.cluster.events->shared(c.warp.agent, c.group.pc, Proxy::Generic, Kind::Write, owner.rank, offset, 4);
    return Step::Next;
  }
  return c.block(Wait::Alloc, nullptr, columns, 0);
}

Step deallocate(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  u32 first = c.warp.read(c.in.a)[0] & 0xffff, columns = c.warp.read(c.in.b)[0];
  check_columns(*c.warp.cta, first, columns, "tcgen05.dealloc");
  TensorMemory& t = *c.warp.cta->tmem;
  u8 owner = t.allocated[first];
  for (u32 i = 0; i < TensorMemory::columns; i++)
    if ((t.allocated[i] == owner) != (i >= first && i < first + columns))
      fault("tmem", "tcgen05.dealloc of columns %u to %u, which is not one whole allocation", first, first + columns - 1);
  std::fill_n(t.allocated + first, columns, u8(0));
  if (c.cluster.events)
    c.cluster.events->tensor(c.warp.agent, c.group.pc, Kind::Write, c.warp.cta->rank, 0, TensorMemory::lanes, first, columns);
  for (u32 lane = 0; lane < TensorMemory::lanes; lane++)
    std::fill_n(t.written.begin() + lane * TensorMemory::columns + first, columns, u8(0));
  c.cluster.progress++;
  return Step::Next;
}

// ---- moves between registers and tensor memory --------------------------------------------------------------------

struct Cell {
  u32 lane, column;
};

// Where lane `l`, register `r` of a shape lies relative to the warp's first lane and the address.
Cell cell_of(u32 shape, u32 l, u32 r) {
  switch (shape) {
    case 0: return {l, r};
    case 1: return {l / 4 + 8 * (l % 2), l / 2 % 2 + 2 * r};
    case 2: return {l / 4 + 8 * (r % 2), l % 4 + 4 * (r / 2)};
    default: return {l / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (l % 4) + 8 * (r / 4)};
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
      if (largest) value = nan ? max_nan(value, other) : max_number(value, other);
      else value = nan ? min_nan(value, other) : min_number(value, other);
    }
    result[lane] = bits<u32>(value);
  }
}

// The values are there at once: compiled kernels use them before tcgen05.wait::ld, because the register scoreboard
// makes them wait. What the wait orders is the reuse of the tensor memory, which only the happens-before check sees.
Step load(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("tcgen05.ld");
  Window w = window_of(c, "tcgen05.ld");
  Cta& cta = *c.warp.cta;
  for (u32 row = 0; row < w.rows; row++)
    check_written(c.cluster, cta, w.lane + row, w.column, w.columns, "tcgen05.ld");
  const s32* items = c.cluster.program.list(c.in);
  if (c.cluster.events) {
    u32 number = c.cluster.events->tensor_load(c.warp.agent, c.group.pc, cta.rank, w.lane, w.rows, w.column, w.columns);
    c.warp.load_numbers.resize(c.cluster.program.slots);
    for (u32 r = 0; r < c.in.count; r++) c.warp.load_numbers[u32(std::max(items[r], 0))] = number;
    if (c.in.d >= 0) c.warp.load_numbers[u32(c.in.d)] = number;
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
      std::fill_n(t.written.begin() + (window.lane + row) * TensorMemory::columns + window.column, window.columns, u8(1));
    if (cluster.events)
      cluster.events->tensor_store(agent, pc, issuer->cta->rank, window.lane, window.rows, window.column,
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
    u32 after = c.warp.tmem_store_agents.empty() ? 0 : c.warp.tmem_store_agents.back();
    op->agent = c.cluster.events->fork(c.warp.agent, op->pc, after);
    c.warp.tmem_store_agents.push_back(op->agent);
  }
  submit(c.cluster, &c.warp.tmem_stores, std::move(op));
  return Step::Next;
}

Step wait_load(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  if (c.cluster.events) c.cluster.events->loads_done(c.warp.agent, ~0u);
  return Step::Next;
}

Step wait_store(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  if (!c.warp.tmem_stores.ops.empty()) return c.block(Wait::Tcgen05, nullptr, 0, 0);
  if (c.cluster.events)
    for (u32 agent : c.warp.tmem_store_agents) c.cluster.events->join(c.warp.agent, agent);
  c.warp.tmem_store_agents.clear();
  return Step::Next;
}

// ---- matrix product -----------------------------------------------------------------------------------------------

struct Shape {
  Element a, b;
  u32 m, n, k;            // of the instruction
  bool a_rows, b_rows;    // M/N-major
  bool negate_a, negate_b;
};

Shape shape_of(u32 idesc, u32 kind) {
  auto field = [&](u32 low, u32 count) { return idesc >> low & ((1u << count) - 1); };
  if (field(0, 4)) fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: sparse or saturating", idesc);
  if (field(4, 2) != 1) fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: D format %u, not f32", idesc, field(4, 2));
  if (field(29, 3) || field(23, 1) || field(6, 1))
    fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: unexpected bits", idesc);
  auto element = [&](u32 code) {
    if (kind == 0 && code < 2) return code ? Element::BF16 : Element::F16;
    if (kind == 1 && code == 2) return Element::TF32;
    if (kind == 2 && code < 2) return code ? Element::E5M2 : Element::E4M3;
    fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: element format %u", idesc, code);
  };
  Shape s{element(field(7, 3)), element(field(10, 3)), field(24, 5) * 16, field(17, 6) * 8, 0,
          bool(field(15, 1)),   bool(field(16, 1)),    bool(field(13, 1)), bool(field(14, 1))};
  s.k = 32 / element_size(s.a);
  return s;
}

// Rows of the accumulator in one CTA: row r, column c -> cell.
struct Layout {
  enum Letter { A, B, D, E, F, G } letter;
  u32 rows, n;
  Cell cell(u32 r, u32 c) const {
    switch (letter) {
      case B: case E: return {r + 64 * (c >= n / 2), c % (n / 2)};
      case F: return {r / 16 * 32 + r % 16, c};
      case G: return {r + 32 * (c / (n / 4)), c % (n / 4)};
      default: return {r, c};
    }
  }
  u32 columns() const { return letter == B || letter == E ? n / 2 : letter == G ? n / 4 : n; }
  // Columns c .. c + run() lie side by side in one lane.
  u32 run() const { return columns(); }
};

Layout layout_of(const Shape& s, u32 group, bool ws) {
  if (ws) {
    if (group != 1) fault("descriptor", "tcgen05.mma.ws with cta_group::2");
    if (s.m == 128) return {Layout::D, 128, s.n};
    if (s.m == 64) return {Layout::E, 64, s.n};
    if (s.m == 32) return {Layout::G, 32, s.n};
  } else if (group == 1) {
    if (s.m == 128) return {Layout::D, 128, s.n};
    if (s.m == 64) return {Layout::F, 64, s.n};
  } else {
    if (s.m == 256) return {Layout::A, 128, s.n};
    if (s.m == 128) return {Layout::B, 64, s.n};
  }
  fault("descriptor", "tcgen05.mma%s with M %u and cta_group::%u", ws ? ".ws" : "", s.m, group);
}

struct Product : AsyncOp {
  Shape shape;
  Layout layout;
  u32 group = 1, d_address = 0, a_address = 0;
  u64 a_descriptor = 0, b_descriptor = 0;
  bool a_in_tmem = false, accumulate = false;

  void run(Cluster& cluster) override {
    Cta& leader = *issuer->cta;
    Cta* ctas[2] = {&leader, group == 2 ? &peer_of(cluster, leader, "tcgen05.mma") : nullptr};
    const u32 n = shape.n, k = shape.k, rows = layout.rows, share = n / group;
    std::vector<float> a(size_t(rows) * k), b(size_t(n) * k), c(size_t(rows) * n);
    SharedTile b_tile = SharedTile::blackwell(b_descriptor);
    b_tile.rows_first = shape.b_rows;
    for (u32 i = 0; i < group; i++)
      gather_columns({cluster, {agent}, pc, "tcgen05.mma"}, *ctas[i], b_tile, shape.b, share, k, b.data() + i * share, n);
    for (u32 i = 0; i < group; i++) {
      if (a_in_tmem) {
        read_a(cluster, *ctas[i], a.data());
      } else {
        SharedTile a_tile = SharedTile::blackwell(a_descriptor);
        a_tile.rows_first = shape.a_rows;
        gather_rows({cluster, {agent}, pc, "tcgen05.mma"}, *ctas[i], a_tile, shape.a, rows, k, a.data(), k);
      }
      if (shape.negate_a != shape.negate_b)
        for (float& v : a) v = -v;
      accumulate_into(cluster, *ctas[i], a, b, c);
    }
  }

 private:
  void accumulate_into(Cluster& cluster, Cta& cta, const std::vector<float>& a, const std::vector<float>& b,
                       std::vector<float>& c) {
    const u32 n = shape.n, column = d_address & 0xffff, run = layout.run();
    check_columns(cta, column, layout.columns(), "tcgen05.mma");
    TensorMemory& t = *cta.tmem;
    for (u32 r = 0; r < layout.rows && accumulate; r++)
      for (u32 first = 0; first < n; first += run) {
        Cell cell = layout.cell(r, first);
        check_written(cluster, cta, cell.lane, column, run, "tcgen05.mma");
        std::memcpy(c.data() + size_t(r) * n + first, t.at(cell.lane, column), run * 4);
      }
    if (!accumulate) std::fill(c.begin(), c.end(), 0.0f);
    multiply(c.data(), n, a.data(), shape.k, b.data(), n, layout.rows, n, shape.k);
    for (u32 r = 0; r < layout.rows; r++)
      for (u32 first = 0; first < n; first += run) {
        Cell cell = layout.cell(r, first);
        std::memcpy(t.at(cell.lane, column), c.data() + size_t(r) * n + first, run * 4);
        std::fill_n(t.written.begin() + cell.lane * TensorMemory::columns + column, run, u8(1));
      }
    if (!cluster.events) return;
    u32 gap = layout.letter == Layout::F ? 16 : 0;  // F fills 16 of every 32 lanes
    for (u32 lane = 0; lane < TensorMemory::lanes; lane += gap ? 32 : TensorMemory::lanes)
      cluster.events->tensor(agent, pc, Kind::Write, cta.rank, lane, gap ? gap : TensorMemory::lanes, column,
                             layout.columns());
  }

  void read_a(Cluster& cluster, Cta& cta, float* a) {
    const u32 k = shape.k, column = a_address & 0xffff;
    if (a_address >> 16) fault("not implemented", "tcgen05.mma with A at tensor memory lane %u", a_address >> 16);
    if (layout.letter == Layout::F || layout.letter == Layout::B || layout.letter == Layout::G)
      fault("not implemented", "tcgen05.mma with A in tensor memory and M %u, cta_group::%u", shape.m, group);
    check_columns(cta, column, 8, "tcgen05.mma's A");
    u32 per_piece = 16 / element_size(shape.a);
    for (u32 r = 0; r < layout.rows; r++) {
      check_written(cluster, cta, r, column, 8, "tcgen05.mma's A");
      const u32* cells = cta.tmem->at(r, column);
      if (layout.letter == Layout::E && std::memcmp(cells, cta.tmem->at(r + 64, column), 32))
        fault("tmem", "tcgen05.mma.ws with M 64: A differs between lane %u and lane %u", r, r + 64);
      for (u32 piece = 0; piece < 2; piece++)
        convert_piece(reinterpret_cast<const u8*>(cells + 4 * piece), shape.a, a + r * k + piece * per_piece);
    }
    if (cluster.events)
      cluster.events->tensor(agent, pc, Kind::Read, cta.rank, 0, layout.letter == Layout::E ? 128 : layout.rows, column, 8);
  }
};

Step multiply_issue(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    Cta& cta = *c.warp.cta;
    auto op = std::make_unique<Product>();
    op->pc = c.group.pc, op->issuer = &c.warp, op->group = c.in.extra;
    op->shape = shape_of(c.item(0, lane), c.in.flags & 15);
    op->layout = layout_of(op->shape, c.in.extra, c.in.flags >> 5 & 1);
    count_size(c, c.item(0, lane), c.in.extra);
    op->accumulate = c.item(1, lane) != 0;
    for (u32 i = 0; i < c.in.width; i++)
      if (c.item(3 + i, lane)) fault("not implemented", "tcgen05.mma with lanes disabled");
    op->d_address = u32(c.address(lane));
    if (op->d_address >> 16) fault("not implemented", "tcgen05.mma with D at tensor memory lane %u", op->d_address >> 16);
    op->a_in_tmem = c.in.flags >> 4 & 1;
    if (op->a_in_tmem) op->a_address = c.warp.read(c.in.b)[lane] + c.item(2, lane);
    else op->a_descriptor = c.value64(c.in.b, lane);
    op->b_descriptor = c.value64(c.in.c, lane);
    if (c.in.extra == 2 && cta.rank % 2)
      fault("barrier", "tcgen05.mma.cta_group::2 issued by the odd CTA of a pair");
    if (c.cluster.events) {
      op->agent = c.cluster.events->fork(c.warp.agent, op->pc, cta.tensor_agent);
      cta.tensor_agent = c.warp.tensor_agent = op->agent;
    }
    submit(c.cluster, &cta.tensor_stream, std::move(op));
  }
  return Step::Next;
}

struct Commit : AsyncOp {
  std::vector<u32> barriers;
  void run(Cluster& cluster) override {
    for (u32 address : barriers) {
      Mbarrier& barrier = mbarrier_of(cluster, address, "tcgen05.commit");
      mbarrier_arrive(cluster, barrier, 1, issuer, pc, agent);
    }
  }
};

Step commit(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    auto op = std::make_unique<Commit>();
    op->pc = c.group.pc, op->issuer = &c.warp;
    u32 address = u32(c.address(lane));
    if (c.in.flags & kMulticast) {
      u32 mask = c.warp.read(c.in.b)[lane] & 0xffff;
      if (!mask || mask >> c.cluster.ctas.size())
        fault("barrier", "tcgen05.commit to CTA mask 0x%x in a cluster of %zu", mask, c.cluster.ctas.size());
      for (u32 rank = 0; rank < c.cluster.ctas.size(); rank++)
        if (mask >> rank & 1) op->barriers.push_back(rank << kRankShift | (address & kOffsetMask));
    } else {
      op->barriers.push_back(address);
    }
    Cta& cta = *c.warp.cta;
    op->agent = c.warp.tensor_agent;  // tracks what this warp issued
    submit(c.cluster, &cta.tensor_stream, std::move(op));
  }
  return Step::Next;
}

}  // namespace

// An instruction that uses loaded values has waited for their load; a move only passes them on.
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
    case OP_MOVE64: pass(in.d + 1, in.a + 1); [[fallthrough]];
    case OP_MOVE32:
    case OP_MOVE16: pass(in.d, in.a); return;
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
    default: break;
  }
  u32 newest = 0;
  for (s32 slot : {in.a, in.b, in.c, in.e}) newest = std::max(newest, number(slot));
  for (u32 i = 0; i < in.count; i++) newest = std::max(newest, number(items[i]));
  if (newest) cluster.events->loads_done(w.agent, newest);
}

Step op_tensor(Context& c) {
  if (c.cluster.machine.launch.architecture < 100) fault("not implemented", "tcgen05 below sm_100");
  switch (c.in.op) {
    case OP_TMEM_ALLOC: return allocate(c);
    case OP_TMEM_DEALLOC: return deallocate(c);
    case OP_TMEM_RELINQUISH: tmem_of(*c.warp.cta).relinquished = true; return Step::Next;
    case OP_TMEM_LOAD: return load(c);
    case OP_TMEM_STORE: return store(c);
    case OP_TMEM_WAIT_LOAD: return wait_load(c);
    case OP_TMEM_WAIT_STORE: return wait_store(c);
    case OP_TMEM_MMA: return multiply_issue(c);
    default: return commit(c);
  }
}
