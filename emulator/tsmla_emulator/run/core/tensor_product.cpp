// What Blackwell's tensor cores execute in turn: products (tcgen05.mma), copies of what they multiply or add
// (tcgen05.cp), and their completion (tcgen05.commit).
#include "tensor_memory.h"

namespace {

// The model of tcgen05.mma of github.com/sf-tensor/tcgen05 (MIT), which its authors held against B200s.
constexpr Sums kBlackwellSums = {25, 23, 64, -600};

struct Shape {
  Element a, b;
  u32 m, n, k;          // of the instruction
  bool a_rows, b_rows;  // M/N-major
  bool negate_a, negate_b;
};

Shape shape_of(u32 idesc, u32 kind) {
  auto field = [&](u32 low, u32 count) { return idesc >> low & ((1u << count) - 1); };
  if (field(0, 4)) fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: sparse or saturating", idesc);
  if (field(4, 2) != 1)
    fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: D format %u, not f32", idesc, field(4, 2));
  if (field(29, 3) || field(23, 1) || field(6, 1))
    fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: unexpected bits", idesc);
  auto element = [&](u32 code) {
    if (kind == 0 && code < 2) return code ? Element::BF16 : Element::F16;
    if (kind == 1 && code == 2) return Element::TF32;
    if (kind == 2 && code < 2) return code ? Element::E5M2 : Element::E4M3;
    fault("not implemented", "tcgen05.mma instruction descriptor 0x%08x: element format %u", idesc, code);
  };
  Shape s{element(field(7, 3)), element(field(10, 3)), field(24, 5) * 16,  field(17, 6) * 8,  0,
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
      case B:
      case E:
        return {r + 64 * (c >= n / 2), c % (n / 2)};
      case F:
        return {r / 16 * 32 + r % 16, c};
      case G:
        return {r + 32 * (c / (n / 4)), c % (n / 4)};
      default:
        return {r, c};
    }
  }
  // So many columns lie side by side in one lane.
  u32 columns() const { return letter == B || letter == E ? n / 2 : letter == G ? n / 4 : n; }
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

// PTX ISA 9.7.16.2.1, table 39: N of a shape that exists. Of 8-bit matrices B that are N-major, whole 16-byte pieces.
void check_shape(const Shape& s, u32 group, bool ws) {
  u32 step = s.b_rows && element_size(s.b) == 1 ? 16 * group : 8 * group;
  bool exists = ws ? s.n == 64 || s.n == 128 || s.n == 256 : s.n >= step && s.n <= 256 && s.n % step == 0;
  if (!exists) fault("descriptor", "tcgen05.mma%s with M %u, N %u and cta_group::%u", ws ? ".ws" : "", s.m, s.n, group);
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
    std::vector<float> a(size_t(rows) * k * parts()), b(size_t(n) * k), c(size_t(rows) * n);
    SharedTile b_tile = SharedTile::blackwell(b_descriptor);
    b_tile.rows_first = shape.b_rows;
    for (u32 i = 0; i < group; i++)
      gather_columns({cluster, {actor}, pc, "tcgen05.mma"}, *ctas[i], b_tile, shape.b, share, k, b.data() + i * share,
                     n);
    for (u32 i = 0; i < group; i++) {
      if (a_in_tmem) {
        read_a(cluster, *ctas[i], a.data());
      } else {
        SharedTile a_tile = SharedTile::blackwell(a_descriptor);
        a_tile.rows_first = shape.a_rows;
        gather_rows({cluster, {actor}, pc, "tcgen05.mma"}, *ctas[i], a_tile, shape.a, rows, k, a.data(), k);
      }
      if (shape.negate_a != shape.negate_b)
        for (float& v : a) v = -v;
      accumulate_into(cluster, *ctas[i], a, b, c);
    }
  }

 private:
  void accumulate_into(Cluster& cluster, Cta& cta, const std::vector<float>& a, const std::vector<float>& b,
                       std::vector<float>& c) {
    const u32 n = shape.n, column = d_address & 0xffff, run = layout.columns();
    check_columns(cta, column, layout.columns(), "tcgen05.mma");
    TensorMemory& t = *cta.tmem;
    for (u32 r = 0; r < layout.rows && accumulate; r++)
      for (u32 first = 0; first < n; first += run) {
        Cell cell = layout.cell(r, first);
        check_written(cluster, cta, cell.lane, column, run, "tcgen05.mma");
        std::memcpy(c.data() + size_t(r) * n + first, t.at(cell.lane, column), run * 4);
      }
    if (!accumulate) std::fill(c.begin(), c.end(), 0.0f);
    const u32 share = n / parts();
    for (u32 i = 0; i < parts(); i++) {
      const float* left = a.data() + i * layout.rows * shape.k;
      const float* right = b.data() + i * share;
      if (cluster.machine.options.hardware_sums)
        multiply_as_hardware(c.data() + i * share, n, left, shape.k, shape.a, right, n, shape.b, layout.rows, share,
                             shape.k, kBlackwellSums);
      else
        multiply(c.data() + i * share, n, left, shape.k, right, n, layout.rows, share, shape.k);
    }
    for (u32 r = 0; r < layout.rows; r++)
      for (u32 first = 0; first < n; first += run) {
        Cell cell = layout.cell(r, first);
        std::memcpy(t.at(cell.lane, column), c.data() + size_t(r) * n + first, run * 4);
        std::fill_n(t.written.begin() + cell.lane * TensorMemory::columns + column, run, u8(1));
      }
    if (!cluster.events) return;
    u32 gap = layout.letter == Layout::F ? 16 : 0;  // F fills 16 of every 32 lanes
    for (u32 lane = 0; lane < TensorMemory::lanes; lane += gap ? 32 : TensorMemory::lanes)
      cluster.events->tensor(actor, pc, Kind::Write, cta.rank, lane, gap ? gap : TensorMemory::lanes, column,
                             layout.columns());
  }

  // A in tensor memory lies in the lanes of each half of D's columns.
  u32 parts() const { return a_in_tmem && (layout.letter == Layout::E || layout.letter == Layout::B) ? 2 : 1; }

  // Whether A is the same for both halves is asked of kernels that rely on nothing that PTX does not promise; NVIDIA's
  // sparse attention multiplies two matrices at once.
  void read_a(Cluster& cluster, Cta& cta, float* a) {
    const u32 k = shape.k, column = a_address & 0xffff;
    if (a_address >> 16) fault("not implemented", "tcgen05.mma with A at tensor memory lane %u", a_address >> 16);
    if (layout.letter == Layout::F || layout.letter == Layout::G)
      fault("not implemented", "tcgen05.mma with A in tensor memory and M %u, cta_group::%u", shape.m, group);
    check_columns(cta, column, 8, "tcgen05.mma's A");
    u32 per_piece = 16 / element_size(shape.a);
    for (u32 r = 0; r < layout.rows * parts(); r++) {
      check_written(cluster, cta, r, column, 8, "tcgen05.mma's A");
      const u32* cells = cta.tmem->at(r, column);
      if (r >= layout.rows && !cluster.machine.options.lenient_tensor &&
          std::memcmp(cells, cta.tmem->at(r - layout.rows, column), 32))
        fault("tmem", "tcgen05.mma with M %u: A differs between lane %u and lane %u", shape.m, r - layout.rows, r);
      for (u32 piece = 0; piece < 2; piece++)
        convert_piece(reinterpret_cast<const u8*>(cells + 4 * piece), shape.a, a + r * k + piece * per_piece);
    }
    if (cluster.events) cluster.events->tensor(actor, pc, Kind::Read, cta.rank, 0, layout.rows * parts(), column, 8);
  }
};

// Rows and 32-bit columns of a tcgen05.cp, and in which lanes of tensor memory each row arrives.
struct CopyShape {
  u32 rows, columns, copies;
  u32 (*lane)(u32 row, u32 copy);
};

constexpr CopyShape kCopyShapes[] = {
    {128, 8, 1, [](u32 row, u32) { return row; }},                                       // 128x256b
    {128, 4, 1, [](u32 row, u32) { return row; }},                                       // 128x128b
    {4, 8, 1, [](u32 row, u32) { return 32 * row; }},                                    // 4x256b
    {64, 4, 2, [](u32 row, u32 copy) { return row + 64 * copy; }},                       // 64x128b.warpx2::02_13
    {64, 4, 2, [](u32 row, u32 copy) { return row / 32 * 64 + row % 32 + 32 * copy; }},  // 64x128b.warpx2::01_23
    {32, 4, 4, [](u32 row, u32 copy) { return row + 32 * copy; }},                       // 32x128b.warpx4
};

// Each CTA of a pair copies from its own shared memory to its own tensor memory.
struct TensorCopy : AsyncOp {
  CopyShape shape;
  u32 group = 1, lane = 0, column = 0;
  SharedTile tile;

  void run(Cluster& cluster) override {
    Cta& own = *issuer->cta;
    copy(cluster, own);
    if (group == 2) copy(cluster, peer_of(cluster, own, "tcgen05.cp"));
  }

 private:
  void copy(Cluster& cluster, Cta& cta) {
    check_columns(cta, column, shape.columns, "tcgen05.cp");
    TensorMemory& t = *cta.tmem;
    const Reader reader{cluster, {actor}, pc, "tcgen05.cp"};
    for (u32 row = 0; row < shape.rows; row++)
      for (u32 first = 0; first < shape.columns; first += 4) {
        const u8* piece = piece_at(reader, cta, tile.piece_by_depth(row, 4 * first));
        for (u32 i = 0; i < shape.copies; i++) {
          u32 to = lane + shape.lane(row, i);
          std::memcpy(t.at(to, column + first), piece, 16);
          std::fill_n(t.written.begin() + to * TensorMemory::columns + column + first, 4, u8(1));
        }
      }
    if (!cluster.events) return;
    bool all = shape.rows * shape.copies == TensorMemory::lanes;
    for (u32 row = 0; row < (all ? 1 : shape.rows); row++)
      cluster.events->tensor(actor, pc, Kind::Write, cta.rank, all ? 0 : lane + shape.lane(row, 0),
                             all ? TensorMemory::lanes : 1, column, shape.columns);
  }
};

struct Commit : AsyncOp {
  std::vector<u32> barriers;
  void run(Cluster& cluster) override {
    for (u32 address : barriers) {
      Mbarrier& barrier = mbarrier_of_engine(cluster, address, "tcgen05.commit");
      if (cluster.events) cluster.events->arrives(actor, pc, address >> kRankShift);
      mbarrier_arrive(cluster, barrier, 1, issuer, pc, actor);
    }
  }
};

}  // namespace

Step op_tensor_multiply(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    Cta& cta = *c.warp.cta;
    auto op = std::make_unique<Product>();
    op->pc = c.group.pc, op->issuer = &c.warp, op->group = c.in.extra;
    op->shape = shape_of(c.item(0, lane), c.in.flags & 15);
    op->layout = layout_of(op->shape, c.in.extra, c.in.flags >> 5 & 1);
    check_shape(op->shape, c.in.extra, c.in.flags >> 5 & 1);
    if (c.warp.trace) c.warp.trace->note(Note::kProduct, c.item(0, lane), c.in.extra);
    op->accumulate = c.item(1, lane) != 0;
    for (u32 i = 0; i < c.in.width; i++)
      if (c.item(3 + i, lane)) fault("not implemented", "tcgen05.mma with lanes disabled");
    op->d_address = u32(c.address(lane));
    if (op->d_address >> 16)
      fault("not implemented", "tcgen05.mma with D at tensor memory lane %u", op->d_address >> 16);
    op->a_in_tmem = c.in.flags >> 4 & 1;
    if (op->a_in_tmem)
      op->a_address = c.warp.read(c.in.b)[lane] + c.item(2, lane);
    else
      op->a_descriptor = c.value64(c.in.b, lane);
    op->b_descriptor = c.b_descriptor(c.in.c, lane);
    if (c.in.extra == 2 && cta.rank % 2) fault("barrier", "tcgen05.mma.cta_group::2 issued by the odd CTA of a pair");
    if (c.cluster.events) {
      op->actor = c.cluster.events->fork(c.actor(), op->pc, cta.tensor_actor);
      c.cluster.events->join(op->actor, cta.tensor_copy_actor);
      cta.tensor_actor = c.warp.tensor_actors[lane] = op->actor;
    }
    submit(c.cluster, &cta.tensor_stream, std::move(op));
  }
  return Step::Next;
}

// PTX ISA 9.7.16.6.2: a product follows the copies before it, a copy no product. Tensor cores take both in turn.
Step op_tensor_copy(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    Cta& cta = *c.warp.cta;
    auto op = std::make_unique<TensorCopy>();
    op->pc = c.group.pc, op->issuer = &c.warp, op->group = c.in.extra;
    op->shape = kCopyShapes[c.in.flags & 15];
    op->tile = SharedTile::blackwell(c.value64(c.in.b, lane));
    u32 address = u32(c.address(lane));
    op->lane = address >> 16, op->column = address & 0xffff;
    if (op->column % 4) fault("tmem", "tcgen05.cp to column %u, not a multiple of 4", op->column);
    if (op->lane >= (op->shape.rows == 4 ? 32 : 1))
      fault("not implemented", "tcgen05.cp of %u rows to tensor memory lane %u", op->shape.rows, op->lane);
    if (c.warp.trace) c.warp.trace->note(Note::kProduct, op->shape.rows * op->shape.columns * 4, c.in.extra);
    if (c.cluster.events) {
      bool lenient = c.cluster.machine.options.lenient_tensor;
      op->actor = c.cluster.events->fork(c.actor(), op->pc, lenient ? cta.tensor_actor : cta.tensor_copy_actor);
      c.cluster.events->join(op->actor, cta.tensor_copy_actor);
      cta.tensor_copy_actor = c.warp.tensor_copy_actors[lane] = op->actor;
      if (lenient) cta.tensor_actor = op->actor;
    }
    submit(c.cluster, &cta.tensor_stream, std::move(op));
  }
  return Step::Next;
}

Step op_tensor_commit(Context& c) {
  for (u32 rest = c.mask; rest; rest &= rest - 1) {
    u32 lane = u32(__builtin_ctz(rest));
    auto op = std::make_unique<Commit>();
    op->pc = c.group.pc, op->issuer = &c.warp;
    u32 address = u32(c.address(lane));
    if (c.in.flags & kMulticast) {
      u32 mask = c.warp.read(c.in.b)[lane] & 0xffff;
      if (!mask || mask >> c.cluster.ctas.size())
        fault("barrier", "tcgen05.commit to CTA mask 0x%x in a cluster of %zu", mask, c.cluster.ctas.size());
      c.cluster.cta_at(address, "tcgen05.commit");
      for (u32 rank = 0; rank < c.cluster.ctas.size(); rank++)
        if (mask >> rank & 1) op->barriers.push_back(rank << kRankShift | (address & kOffsetMask));
    } else {
      op->barriers.push_back(address);
    }
    for (u32 barrier : op->barriers)
      if (c.warp.trace) c.warp.trace->note(Note::kCommit, barrier);
    Cta& cta = *c.warp.cta;
    if (c.cluster.events) {
      u32& last = c.warp.commit_actors[lane];
      op->actor = last = c.cluster.events->commit(c.actor(), op->pc, c.warp.tensor_actors[lane],
                                                  c.warp.tensor_copy_actors[lane], last);
    }
    submit(c.cluster, &cta.tensor_stream, std::move(op));
  }
  return Step::Next;
}
