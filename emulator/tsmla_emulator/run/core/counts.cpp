// Clusters run in several threads: lanes are added to atomically.
#include "counts.h"

#include "machine.h"

namespace {
void add(u64& to, u64 amount) { __atomic_fetch_add(&to, amount, __ATOMIC_RELAXED); }
}  // namespace

Counts::Counts(u64 warps, u64 instructions) : instructions_(instructions), lanes_(warps * instructions) {}

u64& Counts::lanes(const Warp& w, u32 pc) { return lanes_[w.index * instructions_ + pc]; }

void Counts::executed(const Warp& w, u32 pc, u32 mask) { add(lanes(w, pc), u64(__builtin_popcount(mask))); }

void Counts::taken_back(const Warp& w, u32 pc, u32 mask) { add(lanes(w, pc), ~u64(__builtin_popcount(mask)) + 1); }
