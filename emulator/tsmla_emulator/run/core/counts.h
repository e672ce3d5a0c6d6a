// How many lanes executed each instruction, per warp of a CTA, summed over CTAs. Kept when somebody asks for it.
#pragma once
#include <vector>

#include "numbers.h"
#include "standard.h"

struct Warp;

class Counts {
 public:
  Counts(u64 warps, u64 instructions);
  void executed(const Warp&, u32 pc, u32 mask);
  // An instruction that had to wait will run, and count, again.
  void taken_back(const Warp&, u32 pc, u32 mask);

  const std::vector<u64>& lanes() const { return lanes_; }  // [warp in CTA][instruction]

 private:
  u64& lanes(const Warp&, u32 pc);
  u64 instructions_;
  std::vector<u64> lanes_;
};
