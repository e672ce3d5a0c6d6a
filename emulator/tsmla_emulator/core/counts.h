// What a launch executed, per warp of a CTA and instruction, summed over its CTAs. Kept when somebody asks for it.
#pragma once
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "numbers.h"

struct Warp;

class Counts {
 public:
  struct Cell {
    u64 executed, lanes, failed;  // failed: mbarrier tries that found the phase open
  };
  // An instruction whose work its text does not tell: bytes of a bulk copy, instruction descriptor of a tcgen05.mma.
  struct Sized {
    u32 warp, pc, size, targets;  // targets: CTAs that a copy writes to
    u64 times;
  };

  Counts(u64 warps, u64 instructions);
  void executed(const Warp&, u32 pc, u32 mask);
  // An instruction that had to wait will run, and count, again.
  void taken_back(const Warp&, u32 pc, u32 mask);
  void failed(const Warp&, u32 pc);
  void sized(const Warp&, u32 pc, u32 size, u32 targets);

  const std::vector<Cell>& cells() const { return cells_; }  // [warp in CTA][instruction]
  std::vector<Sized> sizes() const;

 private:
  Cell& cell(const Warp&, u32 pc);
  u64 instructions_;
  std::vector<Cell> cells_;
  std::mutex lock_;
  std::map<std::tuple<u32, u32, u32, u32>, u64> sizes_;
};
