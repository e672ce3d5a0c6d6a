// What the warps of chosen clusters executed, in order, and of it what the text does not tell: barriers, bytes, shapes.
#pragma once
#include <vector>

#include "numbers.h"

struct Note {
  enum Kind : u32 {
    kInit,       // a: mbarrier, b: count
    kArrive,     // a: mbarrier, b: count, c: bytes that it announces
    kWait,       // a: mbarrier, b: phases that had to be complete
    kLoad,       // a: mbarrier, b: bytes, c: what tells one source from another
    kStore,      // b: bytes
    kNamed,      // a: barrier, b: threads
    kProduct,    // a: instruction descriptor, of a tcgen05.cp bytes, b: CTAs
    kCommit,     // a: mbarrier
    kCopy,       // b: bytes of a cp.async
    kCopyArrive  // a: mbarrier
  };
  u32 at, kind;  // at: index in the list of instructions of the warp
  u32 a, b;      // addresses of mbarriers are rank << 24 | offset
  u64 c;
};

struct Traced {
  static constexpr u32 failed = 1u << 31, idle = 1u << 30;  // a try that found the phase open; no lane's guard held
  std::vector<u32> instructions;
  std::vector<Note> notes;

  void executed(u32 pc, bool any) { instructions.push_back(any ? pc : pc | idle); }
  void note(Note::Kind kind, u32 a, u32 b = 0, u64 c = 0) {
    notes.push_back({u32(instructions.size() - 1), kind, a, b, c});
  }
};
