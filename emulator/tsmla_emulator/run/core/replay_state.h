// The state of a replay: warps, what they share (barriers, matrix units, the copy engine), and the events that are to come.
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
  s64 expected = 1, pending = 1, bytes = 0;  // as the system's own is, which no instruction initialises
  u32 phase = 0;
  struct Waiter {
    u32 warp, phases;  // that must be complete
    s32 scoreboard;    // that is freed then; -1: the warp stands still until then
    u32 question = 0, way = 0;  // where it stands at a test: the test's number + 1, and the way that it then takes
  };
  std::vector<Waiter> waiters;
};

struct Meeting {  // named and cluster barriers
  u32 arrived = 0, generation = 0;
  std::vector<u32> waiters;
};

struct Group {  // a warpgroup's products on Hopper
  u32 sm = 0;
  u64 issued[4] = {}, ready = 0, started = 0, done = 0, may_start = 0;
  std::vector<const Cost*> products;
  std::vector<u64> arrived;                   // when each product was there to start
  std::vector<std::pair<u32, u64>> waiters;   // warp, products that must be done
};

constexpr u64 kLoadsShare = 48;  // measured: beside wgmma, ldmatrix takes four times as long, wherever A is

struct Sm {
  u64 tensor_free = 0, engine_free = 0, copies_free = 0, stores_free = 0, port_free = 0;
  u64 operands = 0;  // share of shared memory's clocks that the product under way reads in, in 64ths
  u32 products = 0;       // issued by all their warps and not done
  std::deque<u32> queue;  // warps that are the last to issue a product, and may when one is done

  // Clocks that warps' accesses to shared memory take, of `clocks` while no product reads there.
  u64 moved(u64 clocks, bool load, u64 now) const {
    return tensor_free > now ? clocks * 64 / (64 - (load ? std::max<u64>(operands, kLoadsShare) : operands)) : clocks;
  }

  std::vector<u64> lines;  // of code: the clock at which each is there, kNever where none has asked for it
  u64 there(u32 line, u64 now, const Parameters& p) {
    if (lines.size() <= line) lines.resize(line + 1, kNever);
    if (lines[line] == kNever) lines[line] = now + (line < p.lines_ahead ? p.line_ahead : p.line_behind);
    return lines[line];
  }

  u64 issue_free[4] = {}, pipe_free[4][kPipes] = {};  // of pipes, in 64ths of a clock
  u32 last_warp[4] = {};
  std::vector<u32> warps[4];
};

struct Entry {
  u64 number, ready;
  u32 pc, first_note, notes;
  bool issued, test;
  std::vector<u64> pending;  // instructions whose results it needs, not issued yet
};

struct Warp {
  u32 sm = 0, part = 0, index = 0;  // index: in the CTA
  const WarpTrace* trace = nullptr;
  const WarpTrace* ways[2] = {};  // what it runs where tests find their phases complete, and where they do not
  u64 next = 0, note = 0, first = 0;  // first: number of the trace's first instruction
  u64 test = 0;                       // that it comes to next
  bool asks = false;
  std::deque<Entry> window;
  std::vector<u64> done, writer;
  u64 wake = 0;  // may issue nothing before
  u64 scoreboards[6] = {};
  u32 tried[6] = {}, tried_at[6] = {};  // waits that a scoreboard has to free, and where the last of them is
  bool finished = false, fenced = false, admitted = false, blocked = false;  // blocked: by a wait's scoreboard
  u64 started = 0;
  u32 waits_at = 0;
  std::deque<u64> wgmma_groups, store_groups, copy_groups;
  u64 stores_done = 0, copies_done = 0, tensor_loads = 0, tensor_stores = 0, wgmmas = 0;
  u32 cluster_generation = 0;
};

inline void mark(u32* bins, u64 start, u64 clocks) {
  for (u64 t = start; t < start + clocks && t / kBin < kBins;) {
    u64 until = std::min(start + clocks, (t / kBin + 1) * kBin);
    bins[t / kBin] += u32(until - t);
    t = until;
  }
}

class Replay {
 public:
  Replay(const Cost* costs, const s32* lists, u32 slots, const Parameters& p, const WarpTrace* traces, const WarpTrace* others,
         u64 count, Busy* busy);
  // The clock of the last exit; kNever when the warps wait for each other.
  u64 run();
  std::vector<Waited> waits;

 private:
  // replay.cpp: who issues what, when
  bool issue_one(Sm&, u32 part, u64 now);
  void fill(Warp&);
  // Issues one instruction that is ready; else says in w.wake when one may be.
  bool issue(Warp&, u32 number, Sm&, u64 now);
  void finish(Warp& w, u64 now) {
    w.finished = true;
    last_ = std::max(last_, now);
  }


  // replay_anchors.cpp: what anchors do
  void act(Warp&, u32 number, Sm&, const Cost&, u32 pc, u32 first, u32 notes, u64 result, u64 now);
  // The clock at which bytes are in shared memory of which the first could be there at `first`.
  u64 copied(Sm&, const Warp&, u32 bytes, u64 first);
  void wait_groups(Warp&, std::deque<u64>& groups, u32 allowed, u32 pc, u64 now);
  void meet(Meeting&, u32 needed, bool waits, u32 number, u64 time);
  Group& group_of(const Warp&);
  // May this warp issue a product now? The last of its warpgroup to do so may not while too many are under way: it waits
  // until one is done and `admit` lets the first that waits go on.
  bool admitted(Warp&, u32 number, Sm&, u32 pc, u64 now);
  void admit(Sm&, u64 now);
  // Of the products that could start, the one that came first does.
  void start_products(u32 sm, u64 now);
  void happens(const Event&);
  void resume(Warp& w, u64 time) {
    w.wake = time;
    w.fenced = false;
    waits.push_back({u32(&w - warps_.data()), w.waits_at, w.started, time});
  }

  // A wait is over at this time that only a scoreboard holds.
  void free_scoreboard(Warp& w, u32 scoreboard, u64 time) {
    w.tried[scoreboard]--;
    w.scoreboards[scoreboard] = std::max(w.scoreboards[scoreboard], time);
    if (w.blocked) waits.push_back({u32(&w - warps_.data()), w.waits_at, w.started, time}), w.wake = time;
    w.blocked = false;
  }

  void over(Warp& w, s32 scoreboard, u64 time) {
    if (scoreboard >= 0)
      free_scoreboard(w, u32(scoreboard), time);
    else
      resume(w, time);
  }

  // At a test: which way a warp goes is known when one of the barriers is complete that the ways' notes name; at once, if
  // the second has none.
  void ask(Warp&, u32 number, u32 pc, u64 now);
  void go(Warp&, u32 way, u64 time);

  // From here on the warp waits, until somebody resumes it.
  void stop(Warp& w, u32 pc, u64 now) { w.wake = kNever, w.started = now, w.waits_at = pc; }

  void at(Event::Type type, u64 time, u32 a, u32 b = 0, u64 c = 0) { events_.push({type, time, order_++, a, b, c}); }

  const Cost* costs_;
  const s32* lists_;
  Parameters p_;
  Busy* busy_;
  std::vector<Sm> sms_;
  std::vector<Warp> warps_;
  std::vector<Group> groups_;
  std::map<u32, Barrier> barriers_;
  std::map<u32, Meeting> meetings_;
  Meeting cluster_;
  u64 cluster_done_ = 0, last_ = 0, order_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace replay
