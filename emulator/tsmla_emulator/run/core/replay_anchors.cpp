// What anchors do in a replay, and what happens later because of them.
#include <algorithm>

#include "replay_state.h"

namespace replay {

void Replay::act(Warp& w, u32 number, Sm& sm, const Cost& cost, u32 pc, u32 first, u32 notes, u64 result, u64 now) {
  const Note* note = w.trace->notes + first;
  auto visible = [&](u32 barrier) { return p_.barrier_visible + (barrier >> 24 != w.sm ? p_.barrier_remote : 0); };
  switch (cost.kind) {
    case kInit:
      for (u32 i = 0; i < notes; i++) {
        Barrier& b = barriers_[note[i].a];
        b.expected = b.pending = note[i].b;
      }
      return;
    case kArrive:
      for (u32 i = 0; i < notes; i++) at(Event::kArrival, now + visible(note[i].a), note[i].a, note[i].b, note[i].c);
      return;
    case kWait: {
      s32 scoreboard = s32(cost.sets & 15) - 1;
      if (scoreboard >= 0)
        w.tried[scoreboard]++, w.tried_at[scoreboard] = pc;
      else
        stop(w, pc, now);
      if (!notes) return over(w, scoreboard, now + 1);
      Barrier& b = barriers_[note->a];
      if (b.phase >= note->b) return over(w, scoreboard, now + p_.barrier_ready);
      b.waiters.push_back({number, note->b, scoreboard});
      return;
    }
    case kNamedSync:
    case kNamedArrive:
      if (cost.kind == kNamedSync) stop(w, pc, now);
      if (!notes) return;
      meet(meetings_[w.sm << 8 | note->a], note->b / 32, cost.kind == kNamedSync, number,
           now + p_.named_base + p_.named_warp * (note->b / 32));
      return;
    case kClusterArrive:
      w.cluster_generation = cluster_.generation;
      meet(cluster_, u32(warps_.size()), false, number, now + p_.cluster_barrier);
      return;
    case kClusterWait:
      stop(w, pc, now);
      if (cluster_.generation != w.cluster_generation) return resume(w, std::max(now + 1, cluster_done_));
      cluster_.waiters.push_back(number);
      return;
    case kLoad: {
      u64 done = 0;
      for (u32 i = 0; i < notes; i++) {  // a note for each target, or for each lane that copies
        bool same = i && note[i].c == note[i - 1].c;
        if (!same) {
          u64 begin = std::max(now, sm.engine_free);
          sm.engine_free = begin + p_.copy_issue;
          done = copied(sm, w, note[i].b, begin + p_.copy_latency);
        }
        at(Event::kBytes, done, note[i].a, note[i].b);
      }
      return;
    }
    case kStore:
      for (u32 i = 0; i < notes; i++) {
        sm.stores_free = std::max(sm.stores_free, now + p_.store_latency) + u64(note[i].b / p_.copy_rate);
        w.stores_done = std::max(w.stores_done, sm.stores_free);
      }
      return;
    case kStoreCommit:
      w.store_groups.push_back(w.stores_done);
      return;
    case kStoreWait:
      return wait_groups(w, w.store_groups, cost.value, pc, now);
    case kCopy:
      for (u32 i = 0; i < notes; i++)
        w.copies_done = std::max(w.copies_done, copied(sm, w, note[i].b, std::max(now, sm.port_free) + cost.value));
      return;
    case kCopyCommit:
      w.copy_groups.push_back(w.copies_done);
      return;
    case kCopyWait:
      return wait_groups(w, w.copy_groups, cost.value, pc, now);
    case kCopyArrive:
      for (u32 i = 0; i < notes; i++) at(Event::kArrival, std::max(now, w.copies_done) + visible(note[i].a), note[i].a, 1);
      return;
    case kWgmma: {
      Group& g = group_of(w);
      if (w.wgmmas == g.products.size()) g.products.push_back(&cost);
      g.issued[w.index % 4] = ++w.wgmmas;
      u64 ready = std::min(std::min(g.issued[0], g.issued[1]), std::min(g.issued[2], g.issued[3]));
      for (; g.ready < ready; g.ready++) at(Event::kTensorFree, now + p_.wgmma_start, w.sm, u32(&g - groups_.data()), 1);
      return;
    }
    case kWgmmaCommit:
      w.wgmma_groups.push_back(w.wgmmas);
      return;
    case kWgmmaWait: {
      stop(w, pc, now);
      u64 needed = 0;
      while (w.wgmma_groups.size() > cost.value) needed = w.wgmma_groups.front(), w.wgmma_groups.pop_front();
      Group& g = group_of(w);
      if (g.done >= needed) return resume(w, now + 1);
      g.waiters.push_back({number, needed});
      return;
    }
    case kTensorLoad:
      w.tensor_loads = std::max(w.tensor_loads, result);
      return;
    case kTensorStore:
      w.tensor_stores = std::max(w.tensor_stores, result);
      return;
    case kTensorWaitLoad:
      stop(w, pc, now);
      return resume(w, std::max(now + 1, w.tensor_loads));
    case kTensorWaitStore:
      if (u32 sets = cost.sets & 15) {
        w.scoreboards[sets - 1] = std::max({w.scoreboards[sets - 1], now + 1, w.tensor_stores});
        return;
      }
      stop(w, pc, now);
      return resume(w, std::max(now + 1, w.tensor_stores));
    case kProduct:
      for (u32 i = 0; i < notes; i++) {
        u64 begin = std::max(now + p_.product_start, sm.tensor_free);
        sm.tensor_free = begin + note[i].c;
        for (u32 s = 0; s < note[i].b && w.sm + s < sms_.size(); s++) {
          busy_[w.sm + s].tensor += note[i].c;
          mark(busy_[w.sm + s].tensor_bins, begin, note[i].c);
        }
      }
      return;
    case kCommit:
      for (u32 i = 0; i < notes; i++)
        at(Event::kArrival,
           std::max(now + p_.product_start, sm.tensor_free) + p_.product_tail + (visible(note[i].a) - p_.barrier_visible),
           note[i].a, 1);
      return;
    case kStall:
      stop(w, pc, now);
      return resume(w, now + std::max(1u, cost.value));
    default:
      return;
  }
}

namespace {

const Note* note_of(const WarpTrace& trace, u64 test) {
  u32 place = trace.tests[test];
  const Note* end = trace.notes + trace.note_count;
  const Note* found = std::lower_bound(trace.notes, end, place, [](const Note& note, u32 at) { return note.at < at; });
  return found != end && found->at == place ? found : nullptr;
}

}  // namespace

void Replay::ask(Warp& w, u32 number, u32 pc, u64 now) {
  stop(w, pc, now);
  w.asks = true;
  const Note* notes[2] = {note_of(*w.ways[0], w.test), note_of(*w.ways[1], w.test)};
  u32 first = w.ways[0]->tests[w.test] & kUnknown ? 1 : 0;
  for (u32 way = first; way < 2; way++)
    if (!notes[way] || barriers_[notes[way]->a].phase >= notes[way]->b) return go(w, way, now + p_.barrier_ready);
  for (u32 way = first; way < 2; way++)
    barriers_[notes[way]->a].waiters.push_back({number, notes[way]->b, -1, u32(w.test + 1), way});
}

void Replay::go(Warp& w, u32 way, u64 time) {
  w.asks = false;
  w.trace = w.ways[way];
  w.first = way ? w.ways[0]->instruction_count : 0;
  w.next = (w.trace->tests[w.test++] & ~kUnknown) + 1;
  w.note = 0;
  while (w.note < w.trace->note_count && w.trace->notes[w.note].at < w.next) w.note++;
  resume(w, time);
}

u64 Replay::copied(Sm& sm, const Warp& w, u32 bytes, u64 first) {
  sm.copies_free = std::max(first, sm.copies_free) + u64(bytes / p_.copy_rate + 0.5);
  busy_[w.sm].copied += bytes;
  return sm.copies_free;
}

void Replay::wait_groups(Warp& w, std::deque<u64>& groups, u32 allowed, u32 pc, u64 now) {
  stop(w, pc, now);
  u64 until = now + 1;
  while (groups.size() > allowed) until = std::max(until, groups.front()), groups.pop_front();
  resume(w, until);
}

void Replay::meet(Meeting& m, u32 needed, bool waits, u32 number, u64 time) {
  if (waits) m.waiters.push_back(number);
  if (++m.arrived < needed) return;
  m.arrived = 0;
  m.generation++;
  if (&m == &cluster_) cluster_done_ = time;
  for (u32 waiter : m.waiters) resume(warps_[waiter], time);
  m.waiters.clear();
}

Group& Replay::group_of(const Warp& w) {
  u32 at = w.sm * 8 + w.index / 4;
  if (groups_.size() <= at) groups_.resize(sms_.size() * 8);
  groups_[at].sm = w.sm;
  return groups_[at];
}

bool Replay::admitted(Warp& w, u32 number, Sm& sm, u32 pc, u64 now) {
  const Group& g = group_of(w);
  for (u32 i = 0; i < 4; i++)
    if (i != w.index % 4 && g.issued[i] <= w.wgmmas) return true;
  if (w.admitted || sm.products < p_.wgmma_queue) {
    sm.products += !w.admitted;
    w.admitted = false;
    return true;
  }
  stop(w, pc, now);
  sm.queue.push_back(number);
  return false;
}

void Replay::admit(Sm& sm, u64 now) {
  sm.products--;
  if (sm.queue.empty()) return;
  sm.products++;
  Warp& w = warps_[sm.queue.front()];
  sm.queue.pop_front();
  w.admitted = true;
  w.wake = now + 1;
  waits.push_back({u32(&w - warps_.data()), w.waits_at, w.started, w.wake});
}

void Replay::start_products(u32 s, u64 now) {
  Sm& sm = sms_[s];
  if (sm.tensor_free > now) return;
  u64 later = kNever, first = kNever;
  u32 chosen = 0;
  for (u32 i = s * 8; i < std::min<size_t>(s * 8 + 8, groups_.size()); i++) {
    Group& g = groups_[i];
    if (g.started == g.arrived.size()) continue;
    if (g.may_start > now)
      later = std::min(later, g.may_start);
    else if (g.arrived[g.started] < first)
      first = g.arrived[g.started], chosen = i;
  }
  if (first == kNever) {
    if (later != kNever) at(Event::kTensorFree, later, s, 0, 0);
    return;
  }
  Group& g = groups_[chosen];
  const Cost& product = *g.products[g.started++];
  u64 clocks = product.value;
  sm.tensor_free = now + clocks;
  sm.operands = std::min<u64>(60, 64 * product.operands / clocks);
  g.may_start = now + clocks + (product.registers ? p_.wgmma_registers : 0);
  busy_[s].tensor += clocks;
  mark(busy_[s].tensor_bins, now, clocks);
  at(Event::kProductDone, now + clocks, s, chosen);
}

void Replay::happens(const Event& e) {
  if (e.type == Event::kTensorFree) {
    if (e.c) groups_[e.b].arrived.push_back(e.time);
    return start_products(e.a, e.time);
  }
  if (e.type == Event::kProductDone) {
    Group& g = groups_[e.b];
    g.done++;
    admit(sms_[e.a], e.time);
    for (size_t i = 0; i < g.waiters.size();) {
      if (g.done < g.waiters[i].second) {
        i++;
        continue;
      }
      resume(warps_[g.waiters[i].first], e.time + p_.wgmma_tail);
      g.waiters.erase(g.waiters.begin() + s64(i));
    }
    return start_products(e.a, e.time);
  }
  Barrier& b = barriers_[e.a];
  if (e.type == Event::kArrival)
    b.pending -= e.b, b.bytes += s64(e.c);
  else
    b.bytes -= e.b;
  if (b.pending || b.bytes) return;
  b.phase++;
  b.pending = b.expected;
  for (size_t i = 0; i < b.waiters.size();) {
    const Barrier::Waiter& waiter = b.waiters[i];
    if (b.phase < waiter.phases) {
      i++;
      continue;
    }
    Warp& w = warps_[waiter.warp];
    if (!waiter.question)
      over(w, waiter.scoreboard, e.time + p_.barrier_wake);
    else if (w.asks && waiter.question == w.test + 1)
      go(w, waiter.way, e.time + p_.barrier_wake);
    b.waiters.erase(b.waiters.begin() + s64(i));
  }
}

}  // namespace replay
