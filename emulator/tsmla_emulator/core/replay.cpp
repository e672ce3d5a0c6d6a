// The replay itself: warps issue from a window of their traces, anchors act on what the SM shares.
#include <cstdlib>
#include <cstring>

#include "replay_servers.h"

namespace replay {
namespace {

struct Entry {
  u64 number, ready;
  u32 pc, first_note, notes;
  bool issued;
  std::vector<u64> pending;  // instructions whose results it needs, not issued yet
};

struct Warp {
  u32 sm = 0, part = 0, index = 0;  // index: in the CTA
  const WarpTrace* trace = nullptr;
  u64 next = 0, note = 0, issued = 0;
  std::deque<Entry> window;
  std::vector<u64> done, writer;
  u64 wake = 0;  // may issue nothing before
  bool finished = false, fenced = false;
  u64 started = 0;
  u32 waits_at = 0;
  std::deque<u64> wgmma_groups, store_groups, copy_groups;
  u64 stores_done = 0, copies_done = 0, tensor_loads = 0, tensor_stores = 0, wgmmas = 0;
  u32 cluster_generation = 0;
};

class Replay {
 public:
  Replay(const Cost* costs, const s32* lists, u32 slots, const Parameters& p, const WarpTrace* traces, u64 count,
         Busy* busy)
      : costs_(costs), lists_(lists), p_(p), busy_(busy) {
    u32 ranks = 0;
    for (u64 i = 0; i < count; i++) ranks = std::max(ranks, traces[i].rank + 1);
    sms_.resize(ranks);
    warps_.resize(count);
    for (u32 i = 0; i < count; i++) {
      Warp& w = warps_[i];
      w.trace = &traces[i], w.sm = traces[i].rank, w.index = traces[i].warp, w.part = traces[i].warp % 4;
      w.done.assign(traces[i].instruction_count, kNever);
      w.writer.assign(slots, kNever);
      w.finished = traces[i].instruction_count == 0;
      sms_[w.sm].warps[w.part].push_back(i);
    }
  }

  // The clock of the last exit; kNever when the warps wait for each other.
  u64 run() {
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

  std::vector<Waited> waits;

 private:
  bool issue_one(Sm& sm, u32 part, u64 now) {
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

  void fill(Warp& w) {
    const WarpTrace& trace = *w.trace;
    while (!w.fenced && w.window.size() < p_.window && w.next < trace.instruction_count) {
      Entry e{w.next, 0, trace.instructions[w.next] & ~(Traced::failed | Traced::idle), 0, 0, false, {}};
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
      for (u32 i = 0; i < cost.writes; i++) w.writer[u32(list[cost.reads + i])] = w.next;
      w.fenced = is_wait(cost.kind);
      w.next++;
      w.window.push_back(std::move(e));
    }
  }

  static bool is_wait(u8 kind) {
    return kind == kWait || kind == kNamedSync || kind == kClusterWait || kind == kStoreWait || kind == kWgmmaWait ||
           kind == kTensorWaitLoad || kind == kTensorWaitStore || kind == kCopyWait || kind == kStall;
  }

  // Issues one instruction that is ready; else says in w.wake when one may be.
  bool issue(Warp& w, u32 number, Sm& sm, u64 now) {
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
      if (!e.pending.empty() || (cost.kind > kFree && !all_before)) {
        all_before = false;
        continue;
      }
      if (cost.kind == kFree) {
        e.issued = true;
        w.done[e.number] = e.ready;
        continue;
      }
      u64 at = std::max(e.ready, sm.pipe_free[w.part][cost.pipe] / 64);
      if (at > now) {
        soonest = std::min(soonest, at);
        all_before = false;
        continue;
      }
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
        u64 start = std::max(now, sm.port_free);
        sm.port_free = start + cost.port;
        busy_[w.sm].port += cost.port;
        result = start + cost.port + cost.latency;
      }
      w.done[e.number] = result;
      w.wake = now + 1;
      u32 pc = e.pc, first = e.first_note, notes = e.notes;
      u64 at_number = e.number;
      while (!w.window.empty() && w.window.front().issued) w.window.pop_front();
      if (cost.kind > kFree) act(w, number, sm, cost, pc, first, notes, result, now);
      if (at_number + 1 == w.trace->instruction_count && w.window.empty()) finish(w, now);
      return true;
    }
    while (!w.window.empty() && w.window.front().issued) w.window.pop_front();
    if (w.window.empty() && w.next == w.trace->instruction_count) finish(w, now);
    w.wake = w.window.empty() && !w.finished ? now + 1 : soonest;
    return false;
  }

  void finish(Warp& w, u64 now) {
    w.finished = true;
    last_ = std::max(last_, now);
  }

  void resume(Warp& w, u64 time) {
    w.wake = time;
    w.fenced = false;
    waits.push_back({u32(&w - warps_.data()), w.waits_at, w.started, time});
  }

  // From here on the warp waits, until somebody resumes it.
  void stop(Warp& w, u32 pc, u64 now) { w.wake = kNever, w.started = now, w.waits_at = pc; }

  void at(Event::Type type, u64 time, u32 a, u32 b = 0, u64 c = 0) { events_.push({type, time, order_++, a, b, c}); }

  void act(Warp& w, u32 number, Sm& sm, const Cost& cost, u32 pc, u32 first, u32 notes, u64 result, u64 now) {
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
        stop(w, pc, now);
        if (!notes) return resume(w, now + 1);
        Barrier& b = barriers_[note->a];
        if (b.phase >= note->b) return resume(w, now + p_.barrier_ready);
        b.waiters.push_back({number, note->b});
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
          if (!same) done = copied(sm, w, note[i].b, now);
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
        for (u32 i = 0; i < notes; i++) w.copies_done = std::max(w.copies_done, copied(sm, w, note[i].b, now));
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
        if (w.wgmmas == g.products.size()) g.products.push_back({cost.value, cost.registers});
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

  // The clock at which bytes that are asked for now are in shared memory.
  u64 copied(Sm& sm, const Warp& w, u32 bytes, u64 now) {
    u64 begin = std::max(now, sm.engine_free);
    sm.engine_free = begin + p_.copy_issue;
    sm.copies_free = std::max(begin + p_.copy_latency, sm.copies_free) + u64(bytes / p_.copy_rate + 0.5);
    busy_[w.sm].copied += bytes;
    return sm.copies_free;
  }

  void wait_groups(Warp& w, std::deque<u64>& groups, u32 allowed, u32 pc, u64 now) {
    stop(w, pc, now);
    u64 until = now + 1;
    while (groups.size() > allowed) until = std::max(until, groups.front()), groups.pop_front();
    resume(w, until);
  }

  void meet(Meeting& m, u32 needed, bool waits, u32 number, u64 time) {
    if (waits) m.waiters.push_back(number);
    if (++m.arrived < needed) return;
    m.arrived = 0;
    m.generation++;
    if (&m == &cluster_) cluster_done_ = time;
    for (u32 waiter : m.waiters) resume(warps_[waiter], time);
    m.waiters.clear();
  }

  Group& group_of(const Warp& w) {
    u32 at = w.sm * 8 + w.index / 4;
    if (groups_.size() <= at) groups_.resize(sms_.size() * 8);
    groups_[at].sm = w.sm;
    return groups_[at];
  }

  // Products of an SM's warpgroups take turns.
  void start_products(u32 s, u64 now) {
    Sm& sm = sms_[s];
    if (sm.tensor_free > now) return;
    u64 later = kNever;
    for (u32 i = 1; i <= 8; i++) {
      u32 at_group = s * 8 + (sm.last_group + i) % 8;
      if (at_group >= groups_.size()) continue;
      Group& g = groups_[at_group];
      if (g.started >= g.available) continue;
      if (g.may_start > now) {
        later = std::min(later, g.may_start);
        continue;
      }
      auto [clocks, registers] = g.products[g.started++];
      sm.last_group = at_group % 8;
      sm.tensor_free = now + clocks;
      g.may_start = now + clocks + (registers ? p_.wgmma_registers : 0);
      busy_[s].tensor += clocks;
      mark(busy_[s].tensor_bins, now, clocks);
      at(Event::kProductDone, now + clocks, s, at_group);
      return;
    }
    if (later != kNever) at(Event::kTensorFree, later, s, 0, 0);
  }

  void happens(const Event& e) {
    if (e.type == Event::kTensorFree) {
      if (e.c) groups_[e.b].available++;
      return start_products(e.a, e.time);
    }
    if (e.type == Event::kProductDone) {
      Group& g = groups_[e.b];
      g.done++;
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
      if (b.phase < b.waiters[i].second) {
        i++;
        continue;
      }
      resume(warps_[b.waiters[i].first], e.time + p_.barrier_wake);
      b.waiters.erase(b.waiters.begin() + s64(i));
    }
  }

  static void mark(u32* bins, u64 start, u64 clocks) {
    for (u64 t = start; t < start + clocks && t / kBin < kBins;) {
      u64 until = std::min(start + clocks, (t / kBin + 1) * kBin);
      bins[t / kBin] += u32(until - t);
      t = until;
    }
  }

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

}  // namespace

extern "C" {

// Returns the clock of the last exit; ~0 when the warps wait for each other. `busy` has one for each rank, zeroed; `waits` is
// allocated here, and given back by tsmla_emulator_free.
u64 tsmla_emulator_replay(const Cost* costs, const s32* lists, u32 slots, const Parameters* parameters, const WarpTrace* traces,
                          u64 count, Busy* busy, Waited** waits, u64* wait_count) {
  Replay replay(costs, lists, slots, *parameters, traces, count, busy);
  u64 end = replay.run();
  *wait_count = replay.waits.size();
  *waits = static_cast<Waited*>(std::malloc((replay.waits.size() + 1) * sizeof(Waited)));
  if (!replay.waits.empty()) std::memcpy(*waits, replay.waits.data(), replay.waits.size() * sizeof(Waited));
  return end;
}

void tsmla_emulator_free(void* memory) { std::free(memory); }
}

}  // namespace replay
