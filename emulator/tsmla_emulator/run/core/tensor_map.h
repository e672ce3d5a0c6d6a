// The 128-byte tensor map: what its bits say, and the walk over one box.
#pragma once
#include "numbers.h"

struct TensorMap {
  u64 address = 0;
  u32 rank = 0, element_bytes = 0, swizzle = 0;  // swizzle width in bytes: 0, 32, 64, 128
  bool nan_fill = false, is_float = false;
  u64 stride[5] = {};  // bytes; stride[0] is the element
  u64 extent[5] = {};
  u32 step[5] = {};  // element strides
  u32 box[5] = {};

  // Throws a fault for anything that the emulator does not know.
  static TensorMap decode(const u8* bytes);
  // Elements of the box in dimension i, as laid out in shared memory.
  u32 count(u32 i) const { return (box[i] + step[i] - 1) / step[i]; }
  u32 box_bytes() const;
};

inline u32 swizzled(u32 address, u32 width) {
  switch (width) {
    case 128:
      return address ^ (address >> 3 & 0x70);
    case 64:
      return address ^ (address >> 3 & 0x30);
    case 32:
      return address ^ (address >> 3 & 0x10);
    default:
      return address;
  }
}
