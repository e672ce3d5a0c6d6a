// Clusters run in several threads: cells are added to atomically, the rare sizes under a lock.
#include "counts.h"

#include "machine.h"

namespace {
void add(u64& to, u64 amount) { __atomic_fetch_add(&to, amount, __ATOMIC_RELAXED); }
}  // namespace

Counts::Counts(u64 warps, u64 instructions) : instructions_(instructions), cells_(warps * instructions) {}

Counts::Cell& Counts::cell(const Warp& w, u32 pc) { return cells_[w.index * instructions_ + pc]; }

void Counts::executed(const Warp& w, u32 pc, u32 mask) {
  add(cell(w, pc).executed, 1);
  add(cell(w, pc).lanes, u64(__builtin_popcount(mask)));
}

void Counts::taken_back(const Warp& w, u32 pc, u32 mask) {
  add(cell(w, pc).executed, ~0ull);
  add(cell(w, pc).lanes, ~u64(__builtin_popcount(mask)) + 1);
}

void Counts::failed(const Warp& w, u32 pc) { add(cell(w, pc).failed, 1); }

void Counts::sized(const Warp& w, u32 pc, u32 size, u32 targets) {
  std::lock_guard<std::mutex> guard(lock_);
  sizes_[{w.index, pc, size, targets}]++;
}

std::vector<Counts::Sized> Counts::sizes() const {
  std::vector<Sized> list;
  for (auto& [key, times] : sizes_)
    list.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), std::get<3>(key), times});
  return list;
}
