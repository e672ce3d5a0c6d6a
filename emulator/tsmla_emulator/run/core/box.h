// The box of a tensor map that a bulk copy moves: where each of its bytes lies in global and in shared memory.
#pragma once
#include "tensor_map.h"

struct Box {
  static constexpr u32 gathered = 4;
  TensorMap map;
  s64 at[5] = {};
  bool gathers = false;     // tile::gather4 (PTX ISA 5.5.3.4): the box is one row, and there are four of them,
  s64 rows[gathered] = {};  // at these indices of dimension 1, one behind the other in shared memory

  u32 bytes() const { return map.box_bytes() * (gathers ? gathered : 1); }

  // Calls visit(linear byte offset in the box, global address or 0, bytes) for each innermost row piece.
  template <class Visit>
  void walk(Visit visit) const {
    u32 inner = map.count(0), element = map.element_bytes;
    u32 counts[5];
    for (u32 i = 0; i < 5; i++) counts[i] = map.count(i);
    if (gathers) counts[1] = gathered;
    u32 linear = 0;
    for (u32 e = 0; e < counts[4]; e++)
      for (u32 d = 0; d < counts[3]; d++)
        for (u32 c = 0; c < counts[2]; c++)
          for (u32 b = 0; b < counts[1]; b++, linear += inner * element) {
            s64 index[5] = {0, gathers ? rows[b] : at[1] + s64(b) * map.step[1], at[2] + s64(c) * map.step[2],
                            at[3] + s64(d) * map.step[3], at[4] + s64(e) * map.step[4]};
            bool inside = true;
            u64 address = map.address;
            for (u32 i = 1; i < map.rank; i++) {
              inside &= index[i] >= 0 && u64(index[i]) < map.extent[i];
              address += u64(index[i]) * map.stride[i];
            }
            row(linear, inside, address, visit);
          }
  }

 private:
  template <class Visit>
  void row(u32 linear, bool inside, u64 address, Visit visit) const {
    u32 inner = map.count(0), element = map.element_bytes;
    if (map.step[0] == 1) {
      s64 first = std::max<s64>(at[0], 0), last = std::min<s64>(at[0] + inner, s64(map.extent[0]));
      if (!inside || first >= last) {
        visit(linear, u64(0), inner * element);
        return;
      }
      u32 before = u32(first - at[0]) * element, middle = u32(last - first) * element;
      if (before) visit(linear, u64(0), before);
      visit(linear + before, address + u64(first) * element, middle);
      if (before + middle < inner * element) visit(linear + before + middle, u64(0), inner * element - before - middle);
      return;
    }
    for (u32 i = 0; i < inner; i++) {
      s64 index = at[0] + s64(i) * map.step[0];
      bool here = inside && index >= 0 && u64(index) < map.extent[0];
      visit(linear + i * element, here ? address + u64(index) * element : 0, element);
    }
  }
};

// Splits a run of the linear box at 16-byte atoms, which are what a swizzle moves.
template <class Visit>
void atoms(u32 start, u32 linear, u32 bytes, u32 swizzle, Visit visit) {
  if (!swizzle) {
    visit(start + linear, 0u, bytes);
    return;
  }
  for (u32 done = 0; done < bytes;) {
    u32 address = start + linear + done;
    u32 piece = std::min(bytes - done, 16 - (address & 15));
    visit(swizzled(address, swizzle), done, piece);
    done += piece;
  }
}
