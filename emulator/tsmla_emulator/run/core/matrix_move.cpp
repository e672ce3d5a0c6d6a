// What a warp does with matrices of 16-bit elements in its registers: ldmatrix and stmatrix, 8 x 8 between these and
// shared memory; mma, a product of 16 x 16 and 16 x 8.
#include "matrix.h"

// Of mma.sync on Hopper, as random words on an H200 have it (prove/hardware/products.py).
constexpr Sums kWarpSums = {25, 23, 16, -133};

Step op_matrix_move(Context& c, bool load) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  const Insn& in = c.in;
  const char* what = load ? "ldmatrix" : "stmatrix";
  c.whole(what);
  u8* rows[32];
  for (u32 i = 0; i < 8u * in.count; i++) {
    u64 address = c.address(i);
    Cta& cta = window(c, kShared, address);
    u32 offset = u32(address) & kOffsetMask;
    rows[i] = shared_at(c.cluster, cta, offset, 16, 16, what);
    if (load)
      shared_read(c.cluster, cta, offset, 16, what);
    else
      shared_written(cta, offset, 16);
    if (c.cluster.events)
      c.cluster.events->shared(c.warp.actor, c.group.pc, Proxy::Generic, load ? Kind::Read : Kind::Write, cta.rank,
                               offset, 16);
  }
  for (u32 q = 0; q < in.count; q++) {
    s32 slot = c.cluster.program.list(in)[q];
    for (u32 lane = 0; lane < 32; lane++) {
      for (u32 half = 0; half < 2; half++) {
        u32 row = lane / 4, column = 2 * (lane % 4) + half;
        if (in.extra) std::swap(row, column);
        u8* place = rows[8 * q + row] + 2 * column;
        if (load)
          std::memcpy(reinterpret_cast<u8*>(c.warp.write(slot) + lane) + 2 * half, place, 2);
        else
          std::memcpy(place, reinterpret_cast<const u8*>(c.warp.read(slot) + lane) + 2 * half, 2);
      }
    }
  }
  return Step::Next;
}

Step op_warp_product(Context& c) {
  if (!c.converged()) return c.block(Wait::Converge, nullptr, 0, 0);
  c.whole("mma");
  const s32* slots = c.cluster.program.list(c.in);  // 4 of the result, 4 of A, 2 of B, 4 of what is added
  auto half = [&](u32 item, u32 lane, u32 which) {
    u16 bits = u16(c.warp.read(slots[item])[lane] >> 16 * which);
    return c.in.imm ? from_bf16(bits) : from_f16(bits);
  };
  f32 a[16][16], b[16][8], sums[16][8];
  for (u32 lane = 0; lane < 32; lane++) {
    u32 row = lane / 4, column = 2 * (lane % 4);
    for (u32 i = 0; i < 4; i++) {
      for (u32 which = 0; which < 2; which++)
        a[row + 8 * (i & 1)][column + 8 * (i >> 1) + which] = half(4 + i, lane, which);
      sums[row + 8 * (i >> 1)][column + (i & 1)] = bits<f32>(c.warp.read(slots[10 + i])[lane]);
    }
    for (u32 i = 0; i < 2; i++)
      for (u32 which = 0; which < 2; which++) b[column + 8 * i + which][row] = half(8 + i, lane, which);
  }
  if (c.cluster.machine.options.hardware_sums) {
    Element kind = c.in.imm ? Element::BF16 : Element::F16;
    multiply_as_hardware(sums[0], 8, a[0], 16, kind, b[0], 8, kind, 16, 8, 16, kWarpSums);
  } else {
    multiply(sums[0], 8, a[0], 16, b[0], 8, 16, 8, 16);
  }
  for (u32 lane = 0; lane < 32; lane++)
    for (u32 i = 0; i < 4; i++)
      c.warp.write(slots[i])[lane] = bits<u32>(sums[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)]);
  return Step::Next;
}
