// ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements between shared memory and registers of a warp.
#include "ops.h"

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
