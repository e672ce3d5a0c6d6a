// What the warps of a replay share: barriers, matrix units, the copy engine, and the events that are to come.
#pragma once
#include <deque>
#include <map>
#include <queue>

#include "machine.h"
#include "replay.h"

namespace replay {

constexpr u64 kNever = ~0ull;

struct Event {
  enum Type : u8 { kArrival, kBytes, kProductDone, kTensorFree } type;
  u64 time, order;
  u32 a, b;
  u64 c;
  bool operator<(const Event& other) const {  // for a heap whose top is the earliest
    return time != other.time ? time > other.time : order > other.order;
  }
};

struct Barrier {
  s64 expected = 0, pending = 0, bytes = 0;
  u32 phase = 0;
  std::vector<std::pair<u32, u32>> waiters;  // warp, phases that must be complete
};

struct Meeting {  // named and cluster barriers
  u32 arrived = 0, generation = 0;
  std::vector<u32> waiters;
};

struct Group {  // a warpgroup's products on Hopper
  u32 sm = 0;
  u64 issued[4] = {}, ready = 0, available = 0, started = 0, done = 0, may_start = 0;
  std::vector<std::pair<u32, u32>> products;  // clocks, whether A is in registers
  std::vector<std::pair<u32, u64>> waiters;   // warp, products that must be done
};

struct Sm {
  u64 tensor_free = 0, engine_free = 0, copies_free = 0, stores_free = 0, port_free = 0;
  u32 last_group = 0;
  u64 issue_free[4] = {}, pipe_free[4][kPipes] = {};  // of pipes, in 64ths of a clock
  u32 last_warp[4] = {};
  std::vector<u32> warps[4];
};

}  // namespace replay
