// Hopper's asynchronous warpgroup matrix instructions. An instruction exists when all four warps have issued it; its
// results land in the registers at the wait that covers them, until then the registers hold poison. Operands in
// registers are read when the product runs, and must not be written before that wait.
#include "matrix.h"

struct Accumulator {
  std::vector<u32*> slots;
  std::vector<float> values;  // 16 rows x N columns of one warp
  u64 last = 0;               // number of the last instruction that writes it
};

namespace {
struct Product;
}

struct WarpGroup {
  Cta* cta = nullptr;
  u64 done = 0;   // instructions executed
  u64 first = 0;  // number of open.front()
  std::deque<std::unique_ptr<Product>> open;
  Stream stream;
  u32 last_actor[4] = {};
  std::deque<std::pair<u64, u32>> actors[4];  // (number, actor) nobody waited for yet
  ~WarpGroup();
};

namespace {

// As random words on an H200 have it (prove/hardware/products.py).
Sums hopper_sums(Element kind) {
  if (element_size(kind) == 1) return {13, 13, 32, -133};
  return {25, 23, 16, -133};
}

// Rows of A that a warp has in registers: 16 x k.
void rows_from_registers(const Warp& w, const s32* slots, Element kind, u32 k, float* a) {
  u32 size = element_size(kind), per_register = 4 / size, group = 4 * per_register;
  for (u32 q = 0; q < k * size / 8; q++) {
    const u32* r = w.read(slots[q]);
    for (u32 lane = 0; lane < 32; lane++) {
      u8 raw[16] = {};
      float v[16];
      std::memcpy(raw, r + lane, 4);
      convert_piece(raw, kind, v);
      u32 row = lane / 4 + 8 * (q & 1);
      for (u32 h = 0; h < per_register; h++) a[row * k + lane % 4 * per_register + h + group * (q >> 1)] = v[h];
    }
  }
}

struct Product : AsyncOp {
  WarpGroup* group = nullptr;
  Element a_kind{}, b_kind{};
  u32 n = 0, k = 0, flags = 0;
  u64 a_descriptor = 0, b_descriptor = 0;
  bool a_shared = false;
  u32 joined = 0;
  struct Part {
    Warp* warp = nullptr;
    u32 actor = 0;
    bool accumulate = false;
    Shared<Accumulator> accumulator;
    const s32* a = nullptr;  // slots, where rows are in registers
  } parts[4];

  void run(Cluster& cluster) override {
    const char* what = "wgmma";
    SharedTile b_tile = SharedTile::hopper(b_descriptor);
    b_tile.rows_first = flags >> 11 & 1;
    std::vector<u32> actors;  // of all four warps: nothing says which warp's part reads which rows
    for (Part& p : parts) actors.push_back(p.actor);
    std::vector<float> b(size_t(n) * k), a(size_t(64) * k);
    gather_columns({cluster, actors, pc, what}, *group->cta, b_tile, b_kind, n, k, b.data(), n);
    if (a_shared) {
      SharedTile a_tile = SharedTile::hopper(a_descriptor);
      a_tile.rows_first = flags >> 10 & 1;
      gather_rows({cluster, actors, pc, what}, *group->cta, a_tile, a_kind, 64, k, a.data(), k);
    } else {
      for (u32 w = 0; w < 4; w++) rows_from_registers(*parts[w].warp, parts[w].a, a_kind, k, a.data() + size_t(16) * k * w);
    }
    if ((flags >> 8 ^ flags >> 9) & 1)
      for (float& v : a) v = -v;
    for (u32 w = 0; w < 4; w++) {
      std::vector<float>& c = parts[w].accumulator->values;
      if (!parts[w].accumulate) std::fill(c.begin(), c.end(), 0.0f);
      const float* rows = a.data() + size_t(16) * k * w;
      if (cluster.machine.options.hardware_sums)
        multiply_as_hardware(c.data(), n, rows, k, a_kind, b.data(), n, b_kind, 16, n, k, hopper_sums(a_kind));
      else
        multiply(c.data(), n, rows, k, b.data(), n, 16, n, k);
    }
    group->done++;
  }
};

// Position of register `r`, lane `lane` in a warp's 16 x N tile.
u32 fragment(u32 r, u32 lane, u32 n) {
  u32 row = lane / 4 + 8 * (r >> 1 & 1), column = r / 4 * 8 + 2 * (lane % 4) + (r & 1);
  return row * n + column;
}

// A register that was touched since the last wgmma.fence must not be an operand, but for accumulators of a chain.
void check_fence(Context& c, s32 slot) {
  Warp& w = c.warp;
  if (!w.wgmma_fences) fault("race", "wgmma without a wgmma.fence before the first one");
  if (slot >= 0 && w.touched[u32(slot)] == w.wgmma_fences)
    fault("race", "wgmma has an operand register that was accessed since the last wgmma.fence");
}

Shared<Accumulator> accumulator_of(Context& c, bool accumulate) {
  Warp& w = c.warp;
  const u32 n = c.in.extra, count = n / 2;
  const s32* items = c.cluster.program.list(c.in);
  for (auto& open : w.accumulators) {
    u32 same = 0, shared = 0;
    for (u32 i = 0; i < count; i++) {
      u32* slot = w.write(items[i]);
      same += i < open->slots.size() && open->slots[i] == slot;
      shared += std::find(open->slots.begin(), open->slots.end(), slot) != open->slots.end();
      if (i == 0 && !shared) break;
    }
    if (same == count && open->slots.size() == count) return open;
    if (shared) fault("not implemented", "wgmma accumulator registers that overlap another pending wgmma's in part");
  }
  for (u32 i = 0; i < count && c.cluster.events; i++) check_fence(c, items[i]);
  auto made = Shared<Accumulator>::made();
  made->values.resize(size_t(16) * n);
  for (u32 i = 0; i < count; i++) made->slots.push_back(w.write(items[i]));
  for (u32 i = 0; i < count; i++)
    for (u32 lane = 0; lane < 32; lane++) {
      if (accumulate) made->values[fragment(i, lane, n)] = bits<float>(made->slots[i][lane]);
      made->slots[i][lane] = ~0u;
    }
  w.accumulators.push_back(made);
  return made;
}

void issue(Context& c) {
  Warp& w = c.warp;
  Cta& cta = *w.cta;
  u32 index = w.index / 4, quarter = w.index % 4;
  if (cta.warpgroups.size() <= index) cta.warpgroups.resize(index + 1);
  if (!cta.warpgroups[index]) {
    cta.warpgroups[index] = Shared<WarpGroup>::made();
    cta.warpgroups[index]->cta = &cta;
  }
  WarpGroup& group = *cta.warpgroups[index];
  u64 number = w.wgmma_issued++;
  if (number == group.first + group.open.size()) {
    group.open.push_back(std::make_unique<Product>());
    Product& made = *group.open.back();
    made.pc = c.group.pc, made.issuer = &w, made.group = &group;
    made.a_kind = Element(c.in.flags & 15), made.b_kind = Element(c.in.flags >> 4 & 15);
    made.n = c.in.extra, made.k = u32(c.in.imm), made.flags = c.in.flags;
    made.a_shared = c.in.a != kNone;
    if (made.a_shared) made.a_descriptor = c.value64(c.in.a, 0);
    made.b_descriptor = c.b_descriptor(c.in.b, 0);
  }
  Product& op = *group.open[number - group.first];
  if (op.pc != c.group.pc || (op.a_shared && op.a_descriptor != c.value64(c.in.a, 0)) ||
      op.b_descriptor != c.b_descriptor(c.in.b, 0))
    fault("barrier",
          "the warps of a warpgroup issue different wgmma instructions (instruction %llu of the group, first "
          "issued at @pc:%u@)",
          (unsigned long long)number, op.pc);
  Product::Part& part = op.parts[quarter];
  part.warp = &w;
  part.accumulate = w.read(c.in.c)[0] != 0;
  part.accumulator = accumulator_of(c, part.accumulate);
  part.accumulator->last = number;
  const s32* items = c.cluster.program.list(c.in);
  part.a = items + c.in.extra / 2;
  if (c.cluster.events) {
    for (u32 i = 0; i < c.in.width; i++) check_fence(c, part.a[i]);
    for (u32 i = 0; i < c.in.count; i++)
      if (items[i] >= 0) w.multiplied[u32(items[i])] = number + 1;
    part.actor = c.cluster.events->fork(w.actor, op.pc, group.last_actor[quarter]);
    group.last_actor[quarter] = part.actor;
    group.actors[quarter].emplace_back(number, part.actor);
  }
  op.joined |= 1u << quarter;
  while (!group.open.empty() && group.open.front()->joined == 15) {
    std::unique_ptr<Product> ready = std::move(group.open.front());
    group.open.pop_front();
    group.first++;
    submit(c.cluster, &group.stream, std::move(ready));
  }
}

void land(Warp& w, Accumulator& accumulator, u32 n) {
  for (u32* slot : accumulator.slots)
    if (!w.touched.empty()) w.touched[size_t(slot - w.registers) / 32] = w.wgmma_fences;
  for (u32 i = 0; i < accumulator.slots.size(); i++)
    for (u32 lane = 0; lane < 32; lane++)
      accumulator.slots[i][lane] = bits<u32>(accumulator.values[fragment(i, lane, n)]);
}

Step wait(Context& c) {
  Warp& w = c.warp;
  u32 allowed = u32(c.in.imm);
  if (!wgmma_satisfied(w, allowed)) return c.block(Wait::Wgmma, nullptr, allowed, 0);
  while (w.wgmma_groups.size() > allowed) {
    w.wgmma_retired = w.wgmma_groups.front();
    w.wgmma_groups.pop_front();
  }
  for (size_t i = 0; i < w.accumulators.size();) {
    Accumulator& accumulator = *w.accumulators[i];
    if (accumulator.last < w.wgmma_retired) {
      land(w, accumulator, u32(accumulator.slots.size() * 2));
      w.accumulators.erase(w.accumulators.begin() + s64(i));
    } else {
      i++;
    }
  }
  if (c.cluster.events && w.cta->warpgroups.size() > w.index / 4 && w.cta->warpgroups[w.index / 4]) {
    auto& actors = w.cta->warpgroups[w.index / 4]->actors[w.index % 4];
    while (!actors.empty() && actors.front().first < w.wgmma_retired) {
      c.cluster.events->join(w.actor, actors.front().second);
      actors.pop_front();
    }
  }
  return Step::Next;
}

}  // namespace

WarpGroup::~WarpGroup() = default;

bool wgmma_satisfied(const Warp& w, u32 allowed) {
  if (w.wgmma_groups.size() <= allowed) return true;
  return w.cta->warpgroups[w.index / 4]->done >= w.wgmma_groups[w.wgmma_groups.size() - 1 - allowed];
}

namespace {

void touch(Warp& w, s32 slot, u32 mask) {
  if (slot < 0) return;
  if (mask && w.multiplied[u32(slot)] > w.wgmma_retired)
    fault("race", "a register that a wgmma uses is written before a wgmma.wait_group has waited for it");
  w.touched[u32(slot)] = w.wgmma_fences;
}

}  // namespace

void touch_registers(Cluster& cluster, Warp& w, const Insn& in, u32 mask) {
  touch(w, in.d, mask);
  if (in.op != OP_LOAD && in.op != OP_UNPACK && in.op != OP_LDMATRIX && in.op != OP_LOAD_CONSTANT) return;
  for (u32 i = 0; i < in.count; i++) touch(w, cluster.program.list(in)[i], mask);
}

Step op_wgmma(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("wgmma");
  switch (c.in.op) {
    case OP_WGMMA:
      issue(c);
      return Step::Next;
    case OP_WGMMA_FENCE:
      c.warp.wgmma_fences++;
      return Step::Next;
    case OP_WGMMA_COMMIT:
      c.warp.wgmma_groups.push_back(c.warp.wgmma_issued);
      return Step::Next;
    default:
      return wait(c);
  }
}
