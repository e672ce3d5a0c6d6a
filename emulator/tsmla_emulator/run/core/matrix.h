// Matrix operands: shared memory descriptors, conversion to f32, and the blocked product.
#pragma once
#include "ops.h"

enum class Element : u32 { F16 = 0, BF16 = 1, TF32 = 2, E4M3 = 3, E5M2 = 4 };
inline u32 element_size(Element e) { return e == Element::TF32 ? 4 : e == Element::E4M3 || e == Element::E5M2 ? 1 : 2; }

// How a tile lies in shared memory. Rows run along M or N, depth along K.
struct SharedTile {
  u32 start = 0, leading = 0, stride = 0;  // bytes
  u32 swizzle = 0;
  bool rows_first = false;  // M/N-major

  static SharedTile hopper(u64 descriptor);
  static SharedTile blackwell(u64 descriptor);
  // Address of the 16-byte piece that holds (row, byte `kb` of K); for rows_first of (row byte `rb`, depth k).
  u32 piece_by_depth(u32 row, u32 kb) const;
  u32 piece_by_rows(u32 rb, u32 k) const;
};

// Converts 16 bytes to 16, 8 or 4 floats.
void convert_piece(const u8* from, Element, float* to);

struct Reader {
  Cluster& cluster;
  std::vector<u32> actors;  // on whose behalf the listener hears of the reads
  u32 pc;
  const char* what;
};

// 16 bytes of shared memory, for whoever reads there by a descriptor.
const u8* piece_at(const Reader&, Cta&, u32 offset);

// out[row * pitch + k] for rows x depth elements.
void gather_rows(const Reader&, Cta&, const SharedTile&, Element, u32 rows, u32 depth, float* out, u32 pitch);
// out[k * pitch + row]: the same, transposed.
void gather_columns(const Reader&, Cta&, const SharedTile&, Element, u32 rows, u32 depth, float* out, u32 pitch);

// c[m][n] += sum over k of a[m][k] * b[k][n], one fused multiply-add after the other along k.
void multiply(float* c, u32 c_pitch, const float* a, u32 a_pitch, const float* b, u32 b_pitch, u32 m, u32 n, u32 k);

// How tensor cores add `depth` products and the sum before them: each term is cut off, toward zero, `fraction` bits
// below the largest exponent of any; the sum of what is left is exact, and is cut off to `kept` bits of fraction.
// Exponents are those that the operands are stored with: 0 for 1.5 * 1.5, and the smallest normal one for subnormals.
// An exponent below `least` counts as that.
struct Sums {
  u32 fraction, kept, depth;
  s32 least;
};

// The same product, rows of A and B [k][n] of these kinds, in pieces of sums.depth along k.
void multiply_as_hardware(float* c, u32 c_pitch, const float* a, u32 a_pitch, Element a_kind, const float* b,
                          u32 b_pitch, Element b_kind, u32 m, u32 n, u32 k, const Sums& sums);
