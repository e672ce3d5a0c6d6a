#include "tensor_map.h"

#include "machine.h"

TensorMap TensorMap::decode(const u8* bytes) {
  u64 w[16];
  std::memcpy(w, bytes, 128);
  auto field = [&](u32 word, u32 low, u32 count) { return u32(w[word] >> low & ((1ull << count) - 1)); };
  TensorMap map;
  map.address = w[0];
  map.rank = field(1, 4, 3) + 1;
  if (map.rank > 5) fault("descriptor", "tensor map of rank %u (1 to 5)", map.rank);
  u32 kind = field(1, 7, 4);
  constexpr u32 sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2};
  if (kind > 10) fault("descriptor", "tensor map with element type %u (0 to 10)", kind);
  map.element_bytes = sizes[kind];
  map.is_float = kind >= 6;
  if (field(1, 11, 2)) fault("not implemented", "tensor map with interleave %u", field(1, 11, 2));
  constexpr u32 widths[] = {0, 32, 64, 128};
  map.swizzle = widths[field(1, 13, 2)];
  map.nan_fill = field(1, 15, 1);
  u64 strides[4] = {w[1] >> 32, w[2] & 0xffffffff, w[2] >> 32, w[3] & 0xffffffff};
  map.stride[0] = map.element_bytes;
  for (u32 i = 0; i < 4; i++) map.stride[i + 1] = (strides[i] | u64(field(3, 32 + 4 * i, 4)) << 32) * 16;
  u64 extents[5] = {w[4] & 0xffffffff, w[4] >> 32, w[5] & 0xffffffff, w[5] >> 32, w[6] & 0xffffffff};
  u32 boxes[5] = {field(6, 56, 8), field(7, 0, 8), field(7, 8, 8), field(7, 16, 8), field(7, 24, 8)};
  for (u32 i = 0; i < 5; i++) {
    map.extent[i] = i < map.rank ? extents[i] + 1 : 1;
    map.box[i] = i < map.rank ? boxes[i] + 1 : 1;
    map.step[i] = i < map.rank ? field(6, 32 + 3 * i, 3) + 1 : 1;
  }
  if (map.address % 16)
    fault("descriptor", "tensor map with global address 0x%llx, not a multiple of 16", (unsigned long long)map.address);
  u32 inner = map.count(0) * map.element_bytes;
  if (inner % 16) fault("descriptor", "tensor map with an innermost box of %u bytes, not a multiple of 16", inner);
  if (map.swizzle && inner > map.swizzle)
    fault("descriptor", "tensor map with an innermost box of %u bytes, more than its swizzle of %u", inner,
          map.swizzle);
  return map;
}

u32 TensorMap::box_bytes() const {
  u32 bytes = element_bytes;
  for (u32 i = 0; i < rank; i++) bytes *= count(i);
  return bytes;
}
