// The replay itself: warps issue from a window of their traces.
#include <cstdlib>
#include <cstring>

#include "replay_state.h"

namespace replay {

Replay::Replay(const Cost* costs, const s32* lists, u32 slots, const Parameters& p, const WarpTrace* traces,
       const WarpTrace* others, u64 count, Busy* busy)
    : costs_(costs), lists_(lists), p_(p), busy_(busy) {
  u32 ranks = 0;
  for (u64 i = 0; i < count; i++) ranks = std::max(ranks, traces[i].rank + 1);
  sms_.resize(ranks);
  warps_.resize(count);
  for (u32 i = 0; i < count; i++) {
    Warp& w = warps_[i];
    w.trace = &traces[i], w.sm = traces[i].rank, w.index = traces[i].warp, w.part = traces[i].warp % 4;
    w.ways[0] = &traces[i], w.ways[1] = &others[i];
    w.done.assign(traces[i].instruction_count + others[i].instruction_count, kNever);
    w.writer.assign(slots, kNever);
    w.finished = traces[i].instruction_count == 0;
    sms_[w.sm].warps[w.part].push_back(i);
  }
}

u64 Replay::run() {
  u64 now = 0;
  for (;;) {
    while (!events_.empty() && events_.top().time <= now) {
      Event event = events_.top();
      events_.pop();
      happens(event);
    }
    bool any = false, alive = false;
    for (u32 s = 0; s < sms_.size(); s++)
      for (u32 part = 0; part < 4; part++) any |= issue_one(sms_[s], part, now);
    u64 next = any ? now + 1 : kNever;
    for (Warp& w : warps_) {
      alive |= !w.finished;
      if (!any && !w.finished) next = std::min(next, std::max(w.wake, now + 1));
    }
    if (!alive) return last_;
    if (!any && !events_.empty()) next = std::min(next, std::max(events_.top().time, now));
    if (next == kNever) return kNever;
    now = next;
  }
}

bool Replay::issue_one(Sm& sm, u32 part, u64 now) {
  if (sm.issue_free[part] > now) return false;
  std::vector<u32>& list = sm.warps[part];
  u32 count = u32(list.size());
  for (u32 i = 0; i < count; i++) {
    u32 at = (sm.last_warp[part] + i) % count;
    Warp& w = warps_[list[at]];
    if (w.finished || w.wake > now || !issue(w, list[at], sm, now)) continue;
    sm.last_warp[part] = at;
    return true;
  }
  return false;
}

namespace {

constexpr u64 kOperandsRead = 12;  // assumed

bool is_wait(u8 kind) {
  return kind == kWait || kind == kNamedSync || kind == kClusterWait || kind == kStoreWait || kind == kWgmmaWait ||
         kind == kTensorWaitLoad || kind == kTensorWaitStore || kind == kCopyWait || kind == kStall;
}

}  // namespace

void Replay::fill(Warp& w) {
  const WarpTrace& trace = *w.trace;
  while (!w.fenced && w.window.size() < p_.window && w.next < trace.instruction_count) {
    Entry e{w.first + w.next, 0, trace.instructions[w.next] & ~(Traced::failed | Traced::idle), 0, 0, false, false, {}};
    e.test = w.test < trace.test_count && (trace.tests[w.test] & ~kUnknown) == w.next;
    e.first_note = u32(w.note);
    while (w.note < trace.note_count && trace.notes[w.note].at == w.next) w.note++;
    e.notes = u32(w.note) - e.first_note;
    const Cost& cost = costs_[e.pc];
    const s32* list = lists_ + cost.first;
    for (u32 i = 0; i < cost.reads; i++) {
      u64 writer = w.writer[u32(list[i])];
      if (writer == kNever) continue;
      if (w.done[writer] != kNever)
        e.ready = std::max(e.ready, w.done[writer]);
      else if (e.pending.empty() || e.pending.back() != writer)
        e.pending.push_back(writer);
    }
    for (u32 i = 0; i < cost.writes; i++) w.writer[u32(list[cost.reads + i])] = e.number;
    w.fenced = e.test || (is_wait(cost.kind) && !(cost.sets & 15));
    w.next++;
    w.window.push_back(std::move(e));
  }
}

bool Replay::issue(Warp& w, u32 number, Sm& sm, u64 now) {
  fill(w);
  u64 soonest = kNever;
  bool all_before = true;
  for (Entry& e : w.window) {
    if (e.issued) continue;
    const Cost& cost = costs_[e.pc];
    while (!e.pending.empty() && w.done[e.pending.back()] != kNever) {
      e.ready = std::max(e.ready, w.done[e.pending.back()]);
      e.pending.pop_back();
    }
    if (!e.pending.empty() || ((cost.kind > kFree || cost.ordered) && !all_before)) {
      if (cost.ordered) break;
      all_before = false;
      continue;
    }
    if (cost.kind == kFree) {
      e.issued = true;
      w.done[e.number] = e.ready;
      continue;
    }
    u64 at = std::max(e.ready, sm.pipe_free[w.part][cost.pipe] / 64);
    if (cost.line) at = std::max(at, sm.there(cost.line - 1, now, p_));
    for (u32 i = 0; i < 6; i++) {
      if (!(cost.awaits >> i & 1)) continue;
      at = std::max(at, w.tried[i] ? kNever : w.scoreboards[i]);
      if (w.tried[i] && !w.blocked) w.blocked = true, w.started = now, w.waits_at = w.tried_at[i];
    }
    if (at > now) {
      soonest = std::min(soonest, at);
      if (cost.ordered) break;
      all_before = false;
      continue;
    }
    if (cost.kind == kWgmma && !admitted(w, number, sm, e.pc, now)) return false;
    e.issued = true;
    sm.issue_free[w.part] = now + cost.slots;
    busy_[w.sm].issue[w.part] += cost.slots;
    if (cost.pipe) {
      u64 taken = cost.occupancy * (sm.tensor_free > now ? p_.beside[cost.pipe] : 64);
      u64& free = sm.pipe_free[w.part][cost.pipe];
      free = std::max(free, now * 64) + taken;
      busy_[w.sm].pipes[w.part][cost.pipe] += taken;
      if (cost.pipe == kMufu && !w.part) mark(busy_[w.sm].mufu_bins, now, taken / 64);
    }
    u64 result = now + std::max(cost.latency, cost.occupancy);
    if (cost.port) {
      sm.port_free = std::max(now, sm.port_free) + sm.moved(cost.port, cost.loads, now);
      busy_[w.sm].port += cost.port;
      result = sm.port_free + cost.latency;
    }
    w.done[e.number] = result;
    if (cost.sets & 15) w.scoreboards[(cost.sets & 15) - 1] = std::max(w.scoreboards[(cost.sets & 15) - 1], result);
    if (cost.sets >> 4) {  // operands have been read when what was before in shared memory's queue is done
      u64& read = w.scoreboards[(cost.sets >> 4) - 1];
      read = std::max(read, cost.port ? std::max(now, sm.port_free) : now + std::max<u64>(kOperandsRead, cost.occupancy));
    }
    w.wake = now + std::max<u64>(1, cost.stall);
    u32 pc = e.pc, first = e.first_note, notes = e.notes;
    u64 at_number = e.number - w.first;
    bool test = e.test;
    while (!w.window.empty() && w.window.front().issued) w.window.pop_front();
    if (test)
      ask(w, number, pc, now);
    else if (cost.kind > kFree)
      act(w, number, sm, cost, pc, first, notes, result, now);
    if (!test && at_number + 1 == w.trace->instruction_count && w.window.empty()) finish(w, now);
    return true;
  }
  while (!w.window.empty() && w.window.front().issued) w.window.pop_front();
  if (w.window.empty() && w.next == w.trace->instruction_count) finish(w, now);
  w.wake = w.window.empty() && !w.finished ? now + 1 : soonest;
  return false;
}

extern "C" {

// Returns the clock of the last exit; ~0 when the warps wait for each other. `others`: of each warp with tests what it runs
// where they find their phases open, with as many tests; of the rest nothing. `busy` has one for each rank, zeroed; `waits` is
// allocated here, and given back by tsmla_emulator_free.
u64 tsmla_emulator_replay(const Cost* costs, const s32* lists, u32 slots, const Parameters* parameters, const WarpTrace* traces,
                          const WarpTrace* others, u64 count, Busy* busy, Waited** waits, u64* wait_count) {
  Replay replay(costs, lists, slots, *parameters, traces, others, count, busy);
  u64 end = replay.run();
  *wait_count = replay.waits.size();
  *waits = static_cast<Waited*>(std::malloc((replay.waits.size() + 1) * sizeof(Waited)));
  if (!replay.waits.empty()) std::memcpy(*waits, replay.waits.data(), replay.waits.size() * sizeof(Waited));
  return end;
}

void tsmla_emulator_free(void* memory) { std::free(memory); }
}

}  // namespace replay
