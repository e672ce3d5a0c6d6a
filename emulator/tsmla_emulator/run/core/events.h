// What a checker hears: who touched what, and what orders whom. The interpreter works the same with no listener.
#pragma once
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "numbers.h"
#include "standard.h"

enum class Proxy : u8 { Generic, Async };
enum class Kind : u8 { Read, Write, Rewrite };  // Rewrite: a write of the bytes that are there, which changes nothing

// An actor is a warp, one lane of it or one asynchronous operation; 0 is nobody. What a warp does, all of its lanes do,
// each for itself; what a lane does alone, the others know of after the warp's next synchronisation. A sync object is an
// mbarrier, a named barrier or the cluster barrier.

// Which lanes of a warp touch a run of bytes: `first` the first `each` bytes, and so on; `each` 0: `first` all of them.
struct Lanes {
  static constexpr u8 all = 255;
  u8 first = all, each = 0;
};

struct Warp;

// What was found and not yet reported: the first one's kind, one text after the other, and where the first was. No text
// when nothing was.
struct Findings {
  std::string kind, text;
  Warp* warp = nullptr;
  u32 pc = 0;
};

// What the clusters of a launch have found: each kind and pair of instructions counts once.
class Found {
 public:
  bool add(const char* kind, u64 instructions) {
    Guard guard(lock_);
    return seen_.emplace(kind, instructions).second;
  }
  u64 count() {
    Guard guard(lock_);
    return seen_.size();
  }

 private:
  Mutex lock_;
  std::set<std::pair<std::string, u64>> seen_;
};

class Events {
 public:
  virtual ~Events() = default;

  virtual u32 new_actor(u32 warp) = 0;
  virtual u32 new_sync() = 0;
  // The actor that a lane of a warp is while it acts alone.
  virtual u32 lane(u32 warp, u32 lane) = 0;
  // The lanes of a warp wait for each other, and what each did comes before what all do next.
  virtual void warp_sync(u32 warp) = 0;

  // Shared memory, in bytes of one CTA's window. strong: as of global memory; it orders nothing here.
  virtual void shared(u32 actor, u32 pc, Proxy, Kind, u32 cta, u32 offset, u32 bytes, Lanes = {},
                      bool strong = false) = 0;
  // 16 bytes that each of some asynchronous operations reads, parts of one instruction.
  virtual void pieces_read(const std::vector<u32>& actors, u32 pc, u32 cta, u32 offset) = 0;
  // Tensor memory of one CTA: lanes [lane, lane + lanes) x columns [column, column + columns).
  virtual void tensor(u32 actor, u32 pc, Kind, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns) = 0;
  // Tensor memory that a warp loads; gives the load's number. Loads are over in order, all of them at `number` ~0.
  virtual u32 tensor_load(u32 warp, u32 pc, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns) = 0;
  virtual void loads_done(u32 warp, u32 number) = 0;
  // A tcgen05.st, whose values a warp can only have through registers.
  virtual void tensor_store(u32 operation, u32 pc, u32 cta, u32 lane, u32 lanes, u32 column, u32 columns) = 0;
  // Allocation and deallocation of columns: synchronous, and as good as a write of them.
  virtual void tensor_columns(u32 warp, u32 pc, u32 cta, u32 column, u32 columns) = 0;
  // tcgen05.fence::before_thread_sync or ::after_thread_sync.
  virtual void tensor_fence(u32 warp, bool after) = 0;
  // An asynchronous operation arrives at a barrier of the CTA.
  virtual void arrives(u32 operation, u32 pc, u32 cta) = 0;
  // A warp of the CTA ends, the last one: what others and asynchronous operations did to its memory must be over.
  virtual void warp_ends(u32 warp, u32 cta, bool last) = 0;
  // Global memory. address: 0 where nobody may write, so that only griddepcontrol.wait matters.
  // strong: an atomic, or an access that is relaxed, acquires or releases; two of these never race.
  virtual void global(u32 actor, u32 pc, Proxy, Kind, u64 address, u64 bytes, Lanes = {}, bool strong = false) = 0;
  // A strong store or atomic of global memory hands on what the actor knows (relaxed: knew at its last fence), with what
  // the one before it there had if it is `atomic`; a strong load or atomic hears of that (relaxed: from its next fence
  // on). Only in cooperative launches.
  virtual void global_release(u32 actor, u64 address, bool relaxed, bool atomic) = 0;
  virtual void global_acquire(u32 actor, u64 address, bool relaxed) = 0;
  virtual void grid_wait(u32 warp) = 0;

  // `actor` adds what it knows to the object's next publication; relaxed: what it knew at its last fence.
  virtual void release(u32 actor, u32 sync, bool relaxed = false) = 0;
  // The object completes: what was released becomes visible to those who acquire.
  virtual void publish(u32 sync) = 0;
  // relaxed: the warp knows it from its next fence on.
  virtual void acquire(u32 warp, u32 sync, bool relaxed = false) = 0;
  // fence.acq_rel, fence.sc, membar.
  virtual void fence(u32 warp) = 0;

  virtual const Findings& findings() const = 0;
  // A new asynchronous operation that knows what the warp knows; `after` is the previous one of an in-order engine.
  virtual u32 fork(u32 warp, u32 pc, u32 after) = 0;
  // A tcgen05.commit of what a thread issued, up to `product` and `copy`; `before` is its last commit. Each may be 0.
  virtual u32 commit(u32 warp, u32 pc, u32 product, u32 copy, u32 before) = 0;
  // The warp has waited for the operation and knows all that it did.
  virtual void join(u32 warp, u32 operation) = 0;
  // The same of a cp.async of these lanes: each knows of its own, and of the others' after the next synchronisation.
  virtual void join_copies(u32 warp, u32 operation, u32 lanes) = 0;
  // Generic accesses that the warp knows, of shared memory, of global memory or of both, become visible to the async
  // proxy.
  virtual void proxy_fence(u32 warp, bool shared, bool global) = 0;
};
