// Vector clocks of warps and asynchronous operations, as `happens_before.cpp` keeps them.
//
// Every actor has a component. A warp's own entry counts its releases; an access carries the entry's value at its
// time. Access X happened before actor A when A's clock has reached X's time in X's component. Operations that are not
// ordered among each other have components of their own, which are used again once the new operation's issuer knows
// that the old one is over. Two more clocks hold what is known *and* fenced for the async proxy, of shared and of global
// memory.
//
// tcgen05 operations are asynchronous, and barriers alone do not order them (PTX ISA 9.7.16.6, memory consistency model
// of the 5th generation tensor core operations). Two more clocks follow them:
// `ordered`: tcgen05 operations that come before what a warp arrives at or waits for next. Its own join with
//     tcgen05.fence::before_thread_sync, once they are over, or by tcgen05.commit, which performs that fence (9.7.16.6.3,
//     9.7.16.6.4.2); those of others with the barrier that the warp waited for.
// `visible`: those that come before the tcgen05 operations a warp issues next. Its own join when they are over: at
//     tcgen05.wait (9.7.16.6.2.3), synchronous ones at once (9.7.16.6.1); all `ordered` ones with
//     tcgen05.fence::after_thread_sync (9.7.16.6.3).
// A lane that acts alone is an actor of its own until its warp synchronises (bar.warp.sync, named and cluster barriers;
// shuffles, votes and elect order no memory): it starts from what the warp knows, but of what the other lanes did, or
// copied by cp.async and waited for, it knows only up to the last synchronisation. Several lanes that are not all are
// taken for all.
//
// A load ends at tcgen05.wait::ld and not where its values are used (9.7.16.6.4.5). Products follow each other
// (9.7.16.6.2); the document says so for equal accumulators and shapes, and kernels take it for all of a CTA.
#pragma once
#include <memory>
#include <vector>

#include "events.h"
#include "numbers.h"

// What is known of other clusters: the `known` of each, by its number.
using Foreign = std::vector<std::vector<u32>>;

struct Clock {
  std::vector<u32> known, fenced, fenced_global, ordered, visible;
  Shared<const Foreign> foreign;
  static void raise(std::vector<u32>& to, const std::vector<u32>& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
  }
  static u32 at(const std::vector<u32>& v, u32 component) { return component < v.size() ? v[component] : 0; }
  static u32& grown(std::vector<u32>& v, u32 component) {
    if (v.size() <= component) v.resize(component + 1);
    return v[component];
  }
  static void raise(std::vector<u32>& to, u32 component, u32 time) {
    u32& entry = grown(to, component);
    entry = std::max(entry, time);
  }
  // What a barrier hands on.
  void join(const Clock& other) {
    raise(known, other.known);
    raise(fenced, other.fenced);
    raise(fenced_global, other.fenced_global);
    raise(ordered, other.ordered);
    hear(other.foreign);
  }
  void hear(const Shared<const Foreign>& other) {
    if (!other || other == foreign) return;
    if (!foreign) {
      foreign = other;
      return;
    }
    auto made = Shared<Foreign>::made(*foreign);
    if (made->size() < other->size()) made->resize(other->size());
    for (size_t cluster = 0; cluster < other->size(); cluster++) raise((*made)[cluster], (*other)[cluster]);
    foreign = std::move(made);
  }
};

struct Actor {
  static constexpr u32 whole = 32;  // no lane, but all of a warp
  u32 lane = whole;
  u32 component = 0, time = 0;  // time: of an operation; a warp's is in its clock
  u32 warp = 0, pc = 0;
  bool operation = false;
  Clock clock;
  Clock at_fence, relaxed;  // what a warp knew at its last fence; what it heard since by relaxed waits
};

struct Access {
  u32 component, time, pc, warp;
  u16 bytes;  // of the granule
  bool write, generic, operation, changes, strong;
  Lanes lanes;
  u8 begin;  // the byte of the granule where its lanes begin

  u32 lane_of(u32 byte) const { return lanes.first + (lanes.each ? (byte - begin) / lanes.each : 0); }
  bool alike(const Access& other) const {
    return lanes.first == other.lanes.first && lanes.each == other.lanes.each && begin == other.begin;
  }
  // Whether other lanes of the same warp touch the same bytes by the same instruction, at the same time.
  bool by_other_lanes(const Access& other) const {
    return pc == other.pc && component == other.component && time == other.time && bytes == other.bytes &&
           !alike(other);
  }
  // Whether each of these bytes was touched by one and the same lane of a warp.
  bool same_lanes(const Access& other, u16 bytes_of_both) const {
    if (lanes.first == Lanes::all || other.lanes.first == Lanes::all) return false;
    if (alike(other)) return true;
    for (u32 rest = bytes_of_both; rest; rest &= rest - 1) {
      u32 byte = u32(__builtin_ctz(rest));
      if (lane_of(byte) != other.lane_of(byte)) return false;
    }
    return true;
  }
};

// A cp.async of some lanes, over for each of them, and the time up to which all lanes knew its component.
struct LanesCopy {
  u32 component, time, lanes, known;
};

// The lanes of a warp that have acted alone since its last synchronisation, when that was in the warp's own time, and
// copies waited for since.
struct LanesApart {
  u32 synced = 0, apart = 0;
  u32 actors[32] = {};
  std::vector<LanesCopy> copies;
};

struct Sync {
  Clock gathered, published;
};
