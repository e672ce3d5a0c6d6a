// Vector clocks over warps and asynchronous operations: unordered accesses to the same bytes are races.
#include <cstdio>
#include <utility>

#include "clocks.h"
#include "events.h"
#include "global_touches.h"
#include "machine.h"

namespace {

// What 16 bytes of memory, or a column of 16 lanes of tensor memory, remember: the accesses that a later one may still
// conflict with, the earliest first. A list in `HappensBefore::kept_`, by the number of its first entry; 0: none.
using Granule = u32;

enum class Where { Shared, Global, Tensor, TensorColumns };

bool is_tensor(Where where) { return where == Where::Tensor || where == Where::TensorColumns; }

constexpr u32 kLaneGroups = 8, kGroupLanes = 16;

class HappensBefore : public Events {
 public:
  explicit HappensBefore(const Cluster& cluster) : cluster_(cluster), actors_(1), syncs_(1) {
    components_ = u32(cluster.warps.size()) * 2 + 1;
    grid_component_ = components_ - 1;
    loads_.resize(cluster.warps.size());
    lanes_.resize(cluster.warps.size());
    lenient_ = cluster.machine.options.lenient_tensor || cluster.machine.launch.architecture < 100;
    lockstep_ = cluster.machine.options.lockstep;
    grid_must_wait_ = cluster.machine.launch.pdl;
    for (const auto& cta : cluster.ctas) {
      shared_.emplace_back(cta->shared.size() / 16 + 1);
      reached_.emplace_back();
      ends_.emplace_back();
      tensor_.emplace_back();
    }
  }

  u32 new_actor(u32 warp) override {
    Actor actor;
    actor.component = warp, actor.warp = warp;
    Clock::grown(actor.clock.known, warp) = 1;
    actors_.push_back(std::move(actor));
    return u32(actors_.size() - 1);
  }

  u32 new_sync() override {
    syncs_.emplace_back();
    return u32(syncs_.size() - 1);
  }

  u32 lane(u32 id, u32 lane) override {
    if (lockstep_) return id;
    LanesApart& lanes = lanes_[actors_[id].warp];
    u32& made = lanes.actors[lane];
    if (lanes.apart >> lane & 1) return made;
    lanes.apart |= 1u << lane;
    if (!made) {
      Actor actor;
      actor.component = first_operation() + u32(operation_times_.size()), actor.warp = actors_[id].warp;
      actor.lane = lane;
      operation_times_.push_back(~0u);  // never vacant
      Clock::grown(actor.clock.known, actor.component) = 1;
      actors_.push_back(std::move(actor));
      made = u32(actors_.size() - 1);
    }
    const Actor& warp = actors_[id];
    Actor& actor = actors_[made];
    actor.clock.join(at_last_sync(warp, lane, warp.clock));
    Clock::raise(actor.clock.visible, at_last_sync(warp, lane, warp.clock).visible);
    actor.at_fence.join(at_last_sync(warp, lane, warp.at_fence));
    actor.relaxed.join(at_last_sync(warp, lane, warp.relaxed));
    return made;
  }

  void warp_sync(u32 id) override {
    Actor& warp = actors_[id];
    LanesApart& lanes = lanes_[warp.warp];
    each_lane(warp, [&](Actor& lane) {
      if (lane.lane == Actor::whole) return;
      warp.clock.join(lane.clock);
      warp.relaxed.join(lane.relaxed);
      lane.clock.known[lane.component]++;
    });
    lanes.apart = 0;
    lanes.copies.clear();
    lanes.synced = warp.clock.known[warp.component]++;
  }

  void shared(u32 id, u32 pc, Proxy proxy, Kind kind, u32 cta, u32 offset, u32 bytes, Lanes lanes,
              bool strong) override {
    const Actor& actor = actors_[id];
    Access access = access_of(actor, pc, kind);
    access.generic = proxy == Proxy::Generic;
    access.strong = strong;
    if (actor.operation || cluster_.warps[actor.warp]->cta->rank != cta) reaches(cta, access);
    std::vector<Granule>& granules = shared_[cta];
    for_granules(access, offset, bytes, lanes, [&](u64 at) {
      touch(granules[at / 16], actor, access, Where::Shared,
            [&](const Access& other) { race(other, access, shared_place(at, cta)); });
    });
  }

  void pieces_read(const std::vector<u32>& ids, u32 pc, u32 cta, u32 offset) override {
    if (readers_.ids != ids || readers_.pc != pc || readers_.cta != cta) begin_reading(ids, pc, cta);
    Granule& granule = shared_[cta][offset / 16];
    if (!readers_.apart || !all_read(granule))
      for (u32 id : ids) shared(id, pc, Proxy::Async, Kind::Read, cta, offset, 16, {}, false);
  }

  void tensor(u32 id, u32 pc, Kind kind, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns) override {
    const Actor& actor = actors_[id];
    touch_tensor(actor, access_of(actor, pc, kind), cta, lane, lanes, column, columns);
  }

  u32 tensor_load(u32 id, u32 pc, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns) override {
    Actor& actor = actors_[id];
    Access access = access_of(actor, pc, Kind::Read);
    access.component = loads_of(actor);
    access.time = ++loads_[actor.warp];
    touch_tensor(actor, access, cta, lane, lanes, column, columns);
    return access.time;
  }

  void tensor_store(u32 id, u32 pc, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns) override {
    Actor actor = actors_[id];  // a copy: the loads are over for this access only
    if (lenient_) Clock::grown(actor.clock.known, loads_of(actor)) = ~0u;
    touch_tensor(actor, access_of(actor, pc, Kind::Write), cta, lane, lanes, column, columns);
  }

  void tensor_columns(u32 id, u32 pc, u32 cta, u32 column, u32 columns) override {
    Access access = access_of(actors_[id], pc, Kind::Write);
    touch_tensor(actors_[id], access, cta, 0, TensorMemory::lanes, column, columns, Where::TensorColumns);
    each_lane(actors_[id], [&](Actor& actor) {
      Clock::raise(actor.clock.visible, access.component, access.time);
      Clock::raise(actor.clock.ordered, access.component, access.time);
    });
  }

  void tensor_fence(u32 id, bool after) override {
    each_lane(actors_[id], [&](Actor& actor) {
      Clock& clock = actor.clock;
      if (after)
        Clock::raise(clock.visible, clock.ordered);
      else
        Clock::raise(clock.ordered, clock.visible);
    });
  }

  void loads_done(u32 id, u32 number) override {
    u32 time = std::min(number, loads_[actors_[id].warp]);
    each_lane(actors_[id], [&](Actor& actor) {
      Clock::raise(actor.clock.known, loads_of(actor), time);
      Clock::raise(actor.clock.visible, loads_of(actor), time);
    });
  }

  void arrives(u32 id, u32 pc, u32 cta) override { reaches(cta, access_of(actors_[id], pc, Kind::Write)); }

  void warp_ends(u32 id, u32 cta, bool last) override {
    each_lane(actors_[id], [&](Actor& actor) { Clock::raise(ends_[cta], actor.clock.known); });
    if (!last) return;
    for (const Access& reach : reached_[cta])
      if (reach.time > Clock::at(ends_[cta], reach.component))
        found("exit", reach.pc, "CTA " + decimal(cta) +
              " ends, and nothing says that this is over: its shared memory is touched by " + side(reach));
  }

  void global(u32 id, u32 pc, Proxy proxy, Kind kind, u64 address, u64 bytes, Lanes lanes, bool strong) override {
    const Actor& actor = actors_[id];
    if (grid_must_wait_ && !Clock::at(actor.clock.known, grid_component_))
      found("race", pc, std::string(kind == Kind::Read ? "read" : "write") + " of global memory at @pc:" +
            decimal(pc) + "@ is not ordered after griddepcontrol.wait, and the launch may overlap the kernel "
            "before it");
    if (!address) return;
    Access access = access_of(actor, pc, kind);
    access.generic = proxy == Proxy::Generic;
    access.strong = strong;
    for_granules(access, address, bytes, lanes, [&](u64 at) {
      touch(global_[at / 16], actor, access, Where::Global,
            [&](const Access& other) { race(other, access, cluster_.machine.place(at)); });
    });
    if (GlobalTouches* touches = cluster_.machine.touches.get())
      touches->touch(cluster_, pc, kind, address, bytes, strong, access.component, access.time,
                     actor.clock.foreign.get());
  }

  void global_release(u32 id, u64 address, bool relaxed, bool atomic) override {
    if (!cluster_.machine.launch.cooperative || !cluster_.machine.touches) return;
    Actor& actor = actors_[id];
    cluster_.machine.touches->release(address, cluster_.index, relaxed ? actor.at_fence : actor.clock, atomic);
    if (!relaxed && !actor.operation) each_lane(actor, [&](Actor& one) { one.clock.known[one.component]++; });
  }

  void global_acquire(u32 id, u64 address, bool relaxed) override {
    if (!cluster_.machine.launch.cooperative || !cluster_.machine.touches) return;
    Shared<const Foreign> heard = cluster_.machine.touches->acquire(address);
    each_lane(actors_[id], [&](Actor& actor) {
      Clock& clock = relaxed ? actor.relaxed : actor.clock;
      clock.hear(heard);
      if (heard && cluster_.index < heard->size()) Clock::raise(clock.known, (*heard)[cluster_.index]);
    });
  }

  void grid_wait(u32 id) override {
    each_lane(actors_[id], [&](Actor& actor) { Clock::grown(actor.clock.known, grid_component_) = 1; });
  }

  void release(u32 id, u32 sync, bool relaxed) override {
    if (!id) return;
    Clock& gathered = syncs_[sync].gathered;
    each_lane(actors_[id], [&](Actor& actor) {
      gathered.join(relaxed ? actor.at_fence : actor.clock);
      if (relaxed && lenient_) {  // which orders what threads execute, and by that their tcgen05 operations
        Clock::raise(gathered.ordered, actor.clock.known);
        Clock::raise(gathered.ordered, actor.clock.ordered);
        actor.clock.known[actor.component]++;
      }
      if (relaxed) return;
      if (actor.operation)
        Clock::raise(gathered.known, actor.component, actor.time);
      else
        actor.clock.known[actor.component]++;
    });
  }

  void publish(u32 sync) override {
    syncs_[sync].published = std::move(syncs_[sync].gathered);
    syncs_[sync].gathered = Clock{};
  }

  void acquire(u32 id, u32 sync, bool relaxed) override {
    const Clock& published = syncs_[sync].published;
    each_lane(actors_[id], [&](Actor& actor) {
      (relaxed ? actor.relaxed : actor.clock).join(published);
      if (relaxed && lenient_) Clock::raise(actor.clock.ordered, published.ordered);
    });
    const Actor& actor = actors_[id];
    if (relaxed || actor.lane != Actor::whole) return;
    LanesApart& lanes = lanes_[actor.warp];  // all lanes have heard of what each had released
    lanes.synced = std::max(lanes.synced, Clock::at(published.known, actor.component));
    auto heard = [&](const LanesCopy& copy) { return Clock::at(published.known, copy.component) >= copy.time; };
    lanes.copies.erase(std::remove_if(lanes.copies.begin(), lanes.copies.end(), heard), lanes.copies.end());
  }

  void fence(u32 id) override {
    each_lane(actors_[id], [&](Actor& actor) {
      actor.clock.join(actor.relaxed);
      actor.relaxed = Clock{};
      actor.at_fence = actor.clock;
      actor.clock.known[actor.component]++;
    });
  }

  u32 fork(u32 id, u32 pc, u32 after) override {
    Actor made;
    Actor& issuer = actors_[id];
    made.operation = true, made.pc = pc, made.warp = issuer.warp;
    made.clock = issuer.clock;
    issuer.clock.known[issuer.component]++;
    if (after) {
      const Actor& previous = actors_[after];
      made.clock.join(previous.clock);
      Clock::raise(made.clock.visible, previous.clock.visible);
      made.component = previous.component;
      made.time = ++operation_times_[made.component - first_operation()];
      Clock::grown(made.clock.known, made.component) = previous.time;
    } else {
      made.component = vacant_component(made.clock);
      made.time = ++operation_times_[made.component - first_operation()];
    }
    actors_.push_back(std::move(made));
    return u32(actors_.size() - 1);
  }

  u32 commit(u32 id, u32 pc, u32 product, u32 copy, u32 before) override {
    u32 made = fork(id, pc, before);
    for (u32 last : {product, copy}) {
      if (!last) continue;
      Actor& actor = actors_[made];
      const Actor& done = actors_[last];
      actor.clock.join(done.clock);
      Clock::raise(actor.clock.known, done.component, done.time);
      Clock::raise(actor.clock.ordered, done.clock.visible);
      Clock::raise(actor.clock.ordered, done.component, done.time);
    }
    return made;
  }

  const Findings& findings() const override { return found_; }

  void join(u32 id, u32 operation) override {
    if (!operation) return;
    const Actor& done = actors_[operation];
    each_lane(actors_[id], [&](Actor& actor) { know(actor, done); });
  }

  void join_copies(u32 id, u32 operation, u32 lanes) override {
    Actor& warp = actors_[id];
    if (!operation || lockstep_ || warp.lane != Actor::whole) return join(id, operation);
    const Actor& done = actors_[operation];
    LanesApart& apart = lanes_[warp.warp];
    apart.copies.push_back({done.component, done.time, lanes, Clock::at(warp.clock.known, done.component)});
    each_lane(warp, [&](Actor& actor) {
      if (actor.lane == Actor::whole || lanes == 1u << actor.lane) know(actor, done);
    });
  }

  void proxy_fence(u32 id, bool shared, bool global) override {
    each_lane(actors_[id], [&](Actor& actor) {
      if (shared) Clock::raise(actor.clock.fenced, actor.clock.known);
      if (global) Clock::raise(actor.clock.fenced_global, actor.clock.known);
      actor.clock.known[actor.component]++;
    });
  }

 private:
  static void know(Actor& actor, const Actor& done) {
    Clock& clock = actor.clock;
    clock.join(done.clock);
    Clock::raise(clock.visible, done.clock.visible);
    Clock::raise(clock.known, done.component, done.time);
    Clock::raise(clock.visible, done.component, done.time);
  }

  // The actor itself, and if it is a warp, the lanes of it that are apart.
  template <class Visit>
  void each_lane(Actor& actor, Visit visit) {
    visit(actor);
    if (actor.operation || actor.lane != Actor::whole) return;
    const LanesApart& lanes = lanes_[actor.warp];
    for (u32 rest = lanes.apart; rest; rest &= rest - 1) visit(actors_[lanes.actors[__builtin_ctz(rest)]]);
  }

  // A clock of a warp with what its other lanes did up to the last synchronisation only.
  Clock at_last_sync(const Actor& warp, u32 lane, Clock clock) const {
    const LanesApart& lanes = lanes_[warp.warp];
    for (std::vector<u32>* v : {&clock.known, &clock.fenced, &clock.fenced_global, &clock.ordered, &clock.visible}) {
      auto limit = [&](u32 component, u32 time) {
        if (v->size() > component) (*v)[component] = std::min((*v)[component], time);
      };
      limit(warp.component, lanes.synced);
      for (const LanesCopy& copy : lanes.copies)
        if (copy.lanes != 1u << lane) limit(copy.component, copy.known);
    }
    return clock;
  }

  u32 first_operation() const { return grid_component_ + 1; }
  u32 loads_of(const Actor& actor) const { return u32(cluster_.warps.size()) + actor.warp; }

  u32 vacant_component(const Clock& clock) {
    for (u32 i = 0; i < operation_times_.size(); i++)
      if (Clock::at(clock.known, first_operation() + i) >= operation_times_[i]) return first_operation() + i;
    operation_times_.push_back(0);
    return first_operation() + u32(operation_times_.size()) - 1;
  }

  Access access_of(const Actor& actor, u32 pc, Kind kind) const {
    u32 time = actor.operation ? actor.time : actor.clock.known[actor.component];
    bool write = kind != Kind::Read, changes = kind == Kind::Write;
    return {actor.component, time, pc, actor.warp, 0xffff, write, true, actor.operation, changes, false, {}, 0};
  }

  bool ordered(const Access& before, const Access& now, const Actor& actor, Where where) const {
    const Clock& clock = actor.clock;
    if (!is_tensor(where) && before.warp == now.warp && !before.operation && !now.operation) {
      if (lockstep_ || before.same_lanes(now, before.bytes & now.bytes)) return true;
      if (before.component == now.component)
        return actor.lane != Actor::whole || before.time <= lanes_[actor.warp].synced;
    }
    if (before.component == actor.component) return true;
    if (before.operation && before.generic && before.warp == now.warp && !now.operation)
      for (const LanesCopy& copy : lanes_[actor.warp].copies)
        if (copy.component == before.component && copy.time >= before.time)
          return before.same_lanes(now, before.bytes & now.bytes);
    if (!is_tensor(where) || lenient_)
      return Clock::at(clock.known, before.component) >= before.time ||
             (is_tensor(where) && Clock::at(clock.ordered, before.component) >= before.time);
    return Clock::at(clock.visible, before.component) >= before.time ||
           (where == Where::TensorColumns && Clock::at(clock.ordered, before.component) >= before.time);
  }

  // Why an access does not come before another, for the report.
  const char* disorder(const Access& before, const Access& now, const Actor& actor, Where where) const {
    if (!is_tensor(where) && before.warp == now.warp && !before.operation && !now.operation)
      return "not ordered: they are of different lanes, without a bar.warp.sync between them";
    if (Clock::at(actor.clock.ordered, before.component) >= before.time && where == Where::Tensor)
      return "ordered, but without a tcgen05.fence::after_thread_sync before the latter";
    if (is_tensor(where) && Clock::at(actor.clock.known, before.component) >= before.time)
      return "ordered, but without a tcgen05.fence::before_thread_sync after the former";
    bool load = before.component >= cluster_.warps.size() && before.component < grid_component_;
    const Clock& issuer = actors_[cluster_.warps[before.warp]->actor].clock;
    if (load && Clock::at(issuer.known, before.component) < before.time)
      return "not ordered: the former ends at a tcgen05.wait::ld";
    return "not ordered";
  }

  // Generic writes reach the async proxy only through a fence on the way.
  static bool fenced(const Access& before, const Access& now, const Actor& actor, Where where) {
    if (now.generic || !before.write || !before.generic) return true;
    const Clock& clock = actor.clock;
    return Clock::at(where == Where::Global ? clock.fenced_global : clock.fenced, before.component) >= before.time;
  }

  // Calls visit(place of the first byte) for each 16 bytes of a range, with `access` being that of these bytes.
  template <class Visit>
  static void for_granules(Access& access, u64 first, u64 bytes, Lanes lanes, Visit visit) {
    access.lanes = lanes;
    for (u64 at = first; at < first + bytes;) {
      u32 begin = u32(at & 15), end = u32(std::min<u64>(16, begin + first + bytes - at));
      access.bytes = u16((1u << end) - (1u << begin)), access.begin = u8(begin);
      if (lanes.each) access.lanes.first = u8(lanes.first + (at - first) / lanes.each);
      visit(at);
      at += end - begin;
    }
  }

  // Records the access; calls conflicts(earlier one) for each that it conflicts with.
  //
  // Lists stay short, as in FastTrack (Flanagan and Freund, PLDI 2009): a write drops what came before it to its bytes,
  // because a later access that is ordered behind the write is ordered behind that, too, or a race was found by now. A
  // read drops earlier reads that it is ordered behind, and those of its own actor: of the same lanes, or of any lane
  // where all read now. What several lanes read by one instruction, all of them read. So there stay a write and one read
  // for each actor that nothing orders. Strong accesses of shared memory, which may be unordered among each other, drop
  // no others, but of each actor's strong ones the earlier.
  template <class Conflicts>
  void touch(Granule& granule, const Actor& actor, Access now, Where where, Conflicts conflicts) {
    u32 last = 0;  // entry of the list that stays, before the present one
    for (u32 at = granule; at;) {
      Access& old = kept_[at].access;
      u16 both = old.bytes & now.bytes;
      if (both && (now.changes || (old.write && !now.write)) && !(old.strong && now.strong)) {
        if (!ordered(old, now, actor, where))
          disorder_ = disorder(old, now, actor, where);
        else if (!fenced(old, now, actor, where))
          disorder_ = "ordered, but without a fence.proxy.async between them";
        if (disorder_) conflicts(old);
      }
      auto implied = [&] {
        return (old.component == now.component && (now.lanes.first == Lanes::all || old.alike(now))) ||
               ordered(old, now, actor, where);
      };
      bool strong = where == Where::Shared && now.strong;
      if (now.write) {
        if (!strong || (old.strong && implied())) old.bytes &= u16(~now.bytes);
      } else if (!old.write && both == old.bytes && old.generic == now.generic && (!strong || old.strong)) {
        if (now.by_other_lanes(old)) now.lanes.first = Lanes::all;
        if (implied()) old.bytes = 0;
      }
      u32 next = kept_[at].next;
      if (old.bytes)
        last = at;
      else
        (last ? kept_[last].next : granule) = next, kept_[at].next = vacant_, vacant_ = at;
      at = next;
    }
    append(granule, last, now);
  }

  // Makes an access the last of a list, behind the one that is last now, and that one's number the list's last.
  void append(Granule& granule, u32& last, const Access& now) {
    u32 made = vacant_ ? vacant_ : u32(kept_.size());
    if (vacant_)
      vacant_ = kept_[made].next;
    else
      kept_.emplace_back();
    kept_[made] = {now, 0};
    (last ? kept_[last].next : granule) = made;
    last = made;
  }

  void begin_reading(const std::vector<u32>& ids, u32 pc, u32 cta) {
    readers_ = {ids, pc, cta};
    for (u32 id : ids) {
      Access access = access_of(actors_[id], pc, Kind::Read);
      access.generic = false;
      reaches(cta, access);
      for (const Access& other : readers_.accesses) readers_.apart &= other.component != access.component;
      readers_.accesses.push_back(access);
    }
  }

  // Records that all readers read all of a granule, as `touch` of one after the other does; false, with nothing
  // recorded, where one of them conflicts.
  bool all_read(Granule& granule) {
    const std::vector<Access>& readers = readers_.accesses;
    // What the instruction's like read before, entries of the readers' components one behind the other, moves to the end.
    u32 before = 0, first = 0, end = 0, found = 0, last = 0;
    bool others_stay = true;
    for (u32 at = granule; at; last = at, at = kept_[at].next) {
      const Access& old = kept_[at].access;
      if (found < readers.size() && !old.write && !old.generic && old.component == readers[found].component) {
        if (!found) before = last, first = at;
        if (!found || last == end) found++, end = at;
      } else if (old.write ? !behind(old) : !old.generic && follow(old)) {
        if (old.write) return false;
        others_stay = false;
      }
    }
    if (!found && others_stay) {
      for (const Access& now : readers) append(granule, last, now);
      return true;
    }
    if (found < readers.size() || !others_stay) {
      for (u32 i = 0; i < readers.size(); i++)
        touch(granule, actors_[readers_.ids[i]], readers[i], Where::Shared, [](const Access&) {});
      return true;
    }
    for (u32 at = first, i = 0; i < readers.size(); at = kept_[at].next) kept_[at].access = readers[i++];
    if (end != last) {
      (before ? kept_[before].next : granule) = kept_[end].next;
      kept_[last].next = first, kept_[end].next = 0;
    }
    return true;
  }

  // Whether all readers come after a write. Most of what they read was written at once.
  bool behind(const Access& write) {
    Access& known = readers_.written;
    if (known.write && known.component == write.component && known.time == write.time && known.warp == write.warp &&
        known.generic == write.generic && known.operation == write.operation)
      return true;
    for (u32 i = 0; i < readers_.ids.size(); i++) {
      const Actor& actor = actors_[readers_.ids[i]];
      const Access& now = readers_.accesses[i];
      if (!ordered(write, now, actor, Where::Shared) || !fenced(write, now, actor, Where::Shared)) return false;
    }
    known = write;
    return true;
  }

  // Whether a reader comes after a read of others.
  bool follow(const Access& read) {
    auto& known = readers_.read[read.component % Readers::reads_known];
    if (known.component != read.component || known.time != read.time) {
      known = {read.component, read.time, false};
      for (u32 i = 0; i < readers_.ids.size(); i++)
        known.follows |= ordered(read, readers_.accesses[i], actors_[readers_.ids[i]], Where::Shared);
    }
    return known.follows;
  }

  // The CTA whose memory the access touches must not end before it.
  void reaches(u32 cta, const Access& access) {
    std::vector<Access>& reached = reached_[cta];
    if (reached.size() <= access.component) reached.resize(access.component + 1, Access{});
    reached[access.component] = access;
    reached[access.component].component = access.component;
  }

  void touch_tensor(const Actor& actor, const Access& access, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns,
                    Where where = Where::Tensor) {
    std::vector<Granule>& granules = tensor_[cta];
    if (granules.empty()) granules.resize(kLaneGroups * TensorMemory::columns);
    for (u32 group = lane / kGroupLanes; group * kGroupLanes < lane + lanes; group++)
      for (u32 c = column; c < column + columns; c++)
        touch(granules[group * TensorMemory::columns + c], actor, access, where,
              [&](const Access& other) { race(other, access, tensor_place(cta, group * kGroupLanes, c)); });
  }

  std::string side(const Access& a) const {
    const Warp& warp = *cluster_.warps[a.warp];
    return std::string(a.write ? "write" : "read") +
           (a.operation ? " by the asynchronous operation that CTA " : " by CTA ") + decimal(warp.cta->rank) +
           " warp " + decimal(warp.index) + (a.operation ? " issued" : "") + " at @pc:" + decimal(a.pc) +
           "@";
  }

  void race(const Access& before, const Access& now, const std::string& place) {
    const char* how = std::exchange(disorder_, nullptr);
    found("race", u64(before.pc) << 32 | now.pc, place + ": " + side(before) + " and " + side(now) + " are " + how);
  }

  // Reported together, each pair of instructions once: in the end, or when there are enough.
  void found(const char* kind, u64 instructions, const std::string& text) {
    if (!cluster_.machine.found->add(kind, instructions)) return;
    if (found_.text.empty())
      found_ = {kind, text, cluster_.running, cluster_.running_pc};
    else
      found_.text += "\n  and " + text;
    if (cluster_.machine.found->count() >= cluster_.machine.options.findings) throw Fault{kind, ""};
  }

  static std::string shared_place(u64 offset, u32 cta) {
    char text[64];
    std::snprintf(text, sizeof text, "shared memory offset 0x%x of CTA %u", u32(offset), cta);
    return text;
  }

  static std::string tensor_place(u32 cta, u32 lane, u32 column) {
    char text[64];
    std::snprintf(text, sizeof text, "tensor memory lane %u, column %u of CTA %u", lane, column, cta);
    return text;
  }

  const Cluster& cluster_;
  std::deque<Actor> actors_;
  std::deque<Sync> syncs_;
  std::vector<LanesApart> lanes_;     // per warp
  std::vector<u32> loads_;            // per warp: tcgen05.ld issued
  std::vector<u32> operation_times_;  // per operation component: time of its last operation
  u32 components_ = 0, grid_component_ = 0;
  bool grid_must_wait_ = false, lenient_ = false, lockstep_ = false;
  const char* disorder_ = nullptr;
  Findings found_;
  struct Kept {
    Access access;
    u32 next;  // of the same granule, or of the vacant entries
  };
  struct Readers {  // parts of one instruction, which read the same
    std::vector<u32> ids;
    u32 pc = 0, cta = 0;
    std::vector<Access> accesses;
    bool apart = true;  // no two have the same component
    Access written{};   // the last write that all of them were found to come after
    static constexpr u32 reads_known = 16;
    struct {
      u32 component = ~0u, time = 0;
      bool follows = false;
    } read[reads_known];
  } readers_;
  std::vector<Kept> kept_{1};  // of all granules
  u32 vacant_ = 0;
  std::vector<std::vector<Granule>> shared_, tensor_;
  AddressMap<Granule> global_;
  std::vector<std::vector<Access>> reached_;  // per CTA and component: the last access of a stranger
  std::vector<std::vector<u32>> ends_;        // per CTA: what its warps knew when they ended
};

}  // namespace

std::unique_ptr<Events> make_happens_before(const Cluster& cluster) { return std::make_unique<HappensBefore>(cluster); }
