#include "matrix.h"

#include "tensor_map.h"

SharedTile SharedTile::hopper(u64 d) {
  SharedTile t;
  t.start = u32(d & 0x3fff) << 4, t.leading = u32(d >> 16 & 0x3fff) << 4, t.stride = u32(d >> 32 & 0x3fff) << 4;
  constexpr u32 widths[] = {0, 128, 64, 32};
  t.swizzle = widths[d >> 62];
  if (d >> 49 & 7)
    fault("not implemented", "matrix descriptor 0x%llx with base offset %u", (unsigned long long)d, u32(d >> 49 & 7));
  return t;
}

SharedTile SharedTile::blackwell(u64 d) {
  SharedTile t;
  t.start = u32(d & 0x3fff) << 4, t.leading = u32(d >> 16 & 0x3fff) << 4, t.stride = u32(d >> 32 & 0x3fff) << 4;
  if ((d >> 46 & 7) != 1)
    fault("descriptor", "matrix descriptor 0x%llx: version bits are %u, not 1", (unsigned long long)d,
          u32(d >> 46 & 7));
  if (d >> 49 & 7)
    fault("not implemented", "matrix descriptor 0x%llx with base offset %u", (unsigned long long)d, u32(d >> 49 & 7));
  if (d >> 52 & 1)
    fault("not implemented", "matrix descriptor 0x%llx with absolute leading dimension", (unsigned long long)d);
  switch (d >> 61) {
    case 0:
      t.swizzle = 0;
      break;
    case 2:
      t.swizzle = 128;
      break;
    case 4:
      t.swizzle = 64;
      break;
    case 6:
      t.swizzle = 32;
      break;
    default:
      fault("not implemented", "matrix descriptor 0x%llx with layout %u", (unsigned long long)d, u32(d >> 61));
  }
  return t;
}

u32 SharedTile::piece_by_depth(u32 row, u32 kb) const {
  u32 width = swizzle ? swizzle : 16;
  u32 linear = start + row / 8 * stride + row % 8 * width + (swizzle ? kb : kb / 16 * leading);
  return swizzled(linear, swizzle);
}

u32 SharedTile::piece_by_rows(u32 rb, u32 k) const {
  if (!swizzle) return start + rb / 16 * stride + k % 8 * 16 + k / 8 * leading;
  return swizzled(start + rb / swizzle * leading + rb % swizzle + k % 8 * swizzle + k / 8 * stride, swizzle);
}

void convert_piece(const u8* from, Element kind, float* to) {
  switch (kind) {
    case Element::BF16:
    case Element::F16: {
      u16 v[8];
      std::memcpy(v, from, 16);
      if (kind == Element::BF16)
        for (int i = 0; i < 8; i++) to[i] = from_bf16(v[i]);
      else
        for (int i = 0; i < 8; i++) to[i] = from_f16(v[i]);
      break;
    }
    case Element::E4M3:
      for (int i = 0; i < 16; i++) to[i] = from_e4m3(from[i]);
      break;
    case Element::E5M2:
      for (int i = 0; i < 16; i++) to[i] = from_e5m2(from[i]);
      break;
    case Element::TF32:
      for (int i = 0; i < 4; i++) {
        u32 v;
        std::memcpy(&v, from + 4 * i, 4);
        to[i] = bits<float>(v & 0xffffe000u);
      }
  }
}

const u8* piece_at(const Reader& reader, Cta& cta, u32 offset) {
  const u8* place = shared_at(reader.cluster, cta, offset, 16, 16, reader.what);
  u64 shadow[2];
  std::memcpy(shadow, cta.shadow.data() + offset, 16);
  if (shadow[0] != 0x0101010101010101ull || shadow[1] != 0x0101010101010101ull)
    shared_read(reader.cluster, cta, offset, 16, reader.what);
  if (reader.cluster.events) reader.cluster.events->pieces_read(reader.actors, reader.pc, cta.rank, offset);
  return place;
}

namespace {

// Calls visit(row, k, elements along K or rows, floats) for every 16-byte piece of the tile.
template <class ByDepth, class ByRows>
void pieces(const Reader& reader, Cta& cta, const SharedTile& tile, Element kind, u32 rows, u32 depth, ByDepth by_depth,
            ByRows by_rows) {
  const u32 size = element_size(kind), per_piece = 16 / size;
  float values[16];
  if (!tile.rows_first) {
    for (u32 row = 0; row < rows; row++)
      for (u32 k = 0; k < depth; k += per_piece) {
        convert_piece(piece_at(reader, cta, tile.piece_by_depth(row, k * size)), kind, values);
        by_depth(row, k, per_piece, values);
      }
  } else {
    for (u32 k = 0; k < depth; k++)
      for (u32 row = 0; row < rows; row += per_piece) {
        convert_piece(piece_at(reader, cta, tile.piece_by_rows(row * size, k)), kind, values);
        by_rows(row, k, per_piece, values);
      }
  }
}

}  // namespace

void gather_rows(const Reader& reader, Cta& cta, const SharedTile& tile, Element kind, u32 rows, u32 depth, float* out,
                 u32 pitch) {
  pieces(
      reader, cta, tile, kind, rows, depth,
      [=](u32 row, u32 k, u32 n, const float* v) { std::memcpy(out + row * pitch + k, v, n * sizeof(float)); },
      [=](u32 row, u32 k, u32 n, const float* v) {
        for (u32 i = 0; i < n; i++) out[(row + i) * pitch + k] = v[i];
      });
}

void gather_columns(const Reader& reader, Cta& cta, const SharedTile& tile, Element kind, u32 rows, u32 depth,
                    float* out, u32 pitch) {
  pieces(
      reader, cta, tile, kind, rows, depth,
      [=](u32 row, u32 k, u32 n, const float* v) {
        for (u32 i = 0; i < n; i++) out[(k + i) * pitch + row] = v[i];
      },
      [=](u32 row, u32 k, u32 n, const float* v) { std::memcpy(out + k * pitch + row, v, n * sizeof(float)); });
}

namespace {

typedef float Lane8 __attribute__((vector_size(32), aligned(4)));

// rows x (8 * vectors) results stay in registers over the whole depth.
template <u32 rows, u32 vectors>
void block(float* c, u32 c_pitch, const float* a, u32 a_pitch, const float* b, u32 b_pitch, u32 k) {
  Lane8 sum[rows][vectors];
#pragma unroll
  for (u32 i = 0; i < rows; i++)
#pragma unroll
    for (u32 j = 0; j < vectors; j++) std::memcpy(&sum[i][j], c + i * c_pitch + 8 * j, 32);
  for (u32 p = 0; p < k; p++) {
    Lane8 right[vectors];
#pragma unroll
    for (u32 j = 0; j < vectors; j++) std::memcpy(&right[j], b + p * b_pitch + 8 * j, 32);
#pragma unroll
    for (u32 i = 0; i < rows; i++) {
      float v = a[i * a_pitch + p];
      Lane8 left = {v, v, v, v, v, v, v, v};
#pragma unroll
      for (u32 j = 0; j < vectors; j++) sum[i][j] = __builtin_elementwise_fma(left, right[j], sum[i][j]);
    }
  }
#pragma unroll
  for (u32 i = 0; i < rows; i++)
#pragma unroll
    for (u32 j = 0; j < vectors; j++) std::memcpy(c + i * c_pitch + 8 * j, &sum[i][j], 32);
}

}  // namespace

void multiply(float* c, u32 c_pitch, const float* a, u32 a_pitch, const float* b, u32 b_pitch, u32 m, u32 n, u32 k) {
  u32 j = 0;
  for (; j + 32 <= n; j += 32)
    for (u32 i = 0; i < m; i += 4)
      block<4, 4>(c + i * c_pitch + j, c_pitch, a + i * a_pitch, a_pitch, b + j, b_pitch, k);
  for (; j < n; j += 8)
    for (u32 i = 0; i < m; i += 4)
      block<4, 1>(c + i * c_pitch + j, c_pitch, a + i * a_pitch, a_pitch, b + j, b_pitch, k);
}

namespace {

constexpr u32 kLanes = 8;
constexpr s32 kNoExponent = -4000;
typedef double Numbers __attribute__((vector_size(8 * kLanes)));
typedef s32 Exponents __attribute__((vector_size(4 * kLanes)));
typedef s64 Wide __attribute__((vector_size(8 * kLanes)));

s32 least_exponent(Element kind) {
  switch (kind) {
    case Element::F16:
    case Element::E5M2:
      return -14;
    case Element::E4M3:
      return -6;
    default:
      return -126;
  }
}

// The exponent that a number is stored with; of zero one that is never the largest.
s32 stored_exponent(float v, s32 least) {
  if (v == 0) return kNoExponent;
  s32 exponent = s32(bits<u32>(v) >> 23 & 0xff) - 127;
  return std::max(exponent, least);
}

// Cut off toward zero to `kept` bits of fraction, fewer where the result is subnormal. No result is -0.
float cut_off(double v, u32 kept) {
  if (v == 0) return 0.0f;
  s32 exponent = std::max(s32(bits<u64>(v) >> 52 & 0x7ff) - 1023, -126);
  double unit = bits<double>(u64(1023 + exponent - s32(kept)) << 52);
  return float(std::trunc(v / unit) * unit) + 0.0f;  // infinite from 2^128 on
}

// A sum with a NaN or an infinity among its terms.
float special_sum(float c, const float* a, const float* b, u32 b_pitch, u32 k) {
  double sum = c;
  for (u32 p = 0; p < k; p++) sum += double(a[p]) * double(b[p * b_pitch]);
  return sum == sum ? float(sum) : bits<float>(0x7fffffffu);
}

template <class Vector, class Get>
Vector each_lane(Get get) {
  Vector v;
  for (u32 i = 0; i < kLanes; i++) v[i] = get(i);
  return v;
}

bool finite(float v) { return (bits<u32>(v) & 0x7f800000u) != 0x7f800000u; }

}  // namespace

void multiply_as_hardware(float* c, u32 c_pitch, const float* a, u32 a_pitch, Element a_kind, const float* b,
                          u32 b_pitch, Element b_kind, u32 m, u32 n, u32 k, const Sums& sums) {
  const u32 blocks = n / kLanes;
  std::vector<Numbers> right(size_t(blocks) * k);
  std::vector<Exponents> right_exponents(size_t(blocks) * k);
  std::vector<u8> right_finite(n, 1);
  const s32 a_least = least_exponent(a_kind), b_least = least_exponent(b_kind);
  for (u32 j = 0; j < blocks; j++)
    for (u32 p = 0; p < k; p++) {
      const float* from = b + p * b_pitch + j * kLanes;
      right[j * k + p] = each_lane<Numbers>([=](u32 i) { return double(from[i]); });
      right_exponents[j * k + p] = each_lane<Exponents>([=](u32 i) { return stored_exponent(from[i], b_least); });
      for (u32 i = 0; i < kLanes; i++) right_finite[j * kLanes + i] &= finite(from[i]);
    }
  std::vector<s32> left_exponents(k);
  for (u32 row = 0; row < m; row++) {
    const float* left = a + row * a_pitch;
    bool left_finite = true;
    for (u32 p = 0; p < k; p++) {
      left_exponents[p] = stored_exponent(left[p], a_least);
      left_finite &= finite(left[p]);
    }
    for (u32 j = 0; j < blocks; j++) {
      float* place = c + row * c_pitch + j * kLanes;
      const Numbers* factors = &right[j * k];
      const Exponents* exponents = &right_exponents[j * k];
      float before[kLanes], result[kLanes];
      std::memcpy(before, place, sizeof before);
      std::memcpy(result, place, sizeof result);
      for (u32 first = 0; first < k; first += sums.depth) {
        const u32 end = std::min(k, first + sums.depth);
        Exponents most = each_lane<Exponents>([&](u32 i) { return stored_exponent(result[i], -126); });
        for (u32 p = first; p < end; p++)
          most = __builtin_elementwise_max(most, exponents[p] + left_exponents[p]);
        most = __builtin_elementwise_max(most, Exponents{} + sums.least);
        Wide place_of_unit = __builtin_convertvector(most, Wide) - s64(sums.fraction);
        Numbers scale = Numbers((1023 - place_of_unit) << 52), unit = Numbers((1023 + place_of_unit) << 52);
        Numbers sum = each_lane<Numbers>([&](u32 i) { return double(result[i]); });
        sum = __builtin_elementwise_trunc(sum * scale);
        for (u32 p = first; p < end; p++)
          sum += __builtin_elementwise_trunc(double(left[p]) * factors[p] * scale);
        sum *= unit;
        for (u32 i = 0; i < kLanes; i++) result[i] = cut_off(sum[i], sums.kept);
      }
      for (u32 i = 0; i < kLanes; i++)
        if (!left_finite || !right_finite[j * kLanes + i] || !finite(before[i]))
          result[i] = special_sum(before[i], left, b + j * kLanes + i, b_pitch, k);
      std::memcpy(place, result, sizeof result);
    }
  }
}
