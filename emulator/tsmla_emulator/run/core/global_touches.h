// What the clusters of a launch do to global memory that may be written. Nothing orders them but, in a cooperative
// launch, strong accesses of global memory; without these a byte that one writes is nobody else's, but that others may
// write what is there.
#pragma once

#include "clocks.h"
#include "events.h"
#include "machine.h"

class GlobalTouches {
 public:
  // component, time: of the access in its cluster's clocks. foreign: what its actor knows of other clusters.
  void touch(const Cluster& cluster, u32 pc, Kind kind, u64 address, u64 bytes, bool strong, u32 component, u32 time,
             const Foreign* foreign) {
    Guard guard(lock_);
    for (u64 at = address; at < address + bytes;) {
      u32 begin = u32(at & 15), end = u32(std::min<u64>(16, begin + address + bytes - at));
      u16 mask = u16((1u << end) - (1u << begin));
      touch(cluster, {cluster.index, pc, component, time, mask, kind != Kind::Read, strong}, kind, at, foreign);
      at += end - begin;
    }
  }

  void release(u64 address, u64 cluster, const Clock& clock, bool atomic) {
    Guard guard(lock_);
    Clock handed;
    auto own = Shared<Foreign>::made();
    own->resize(cluster + 1);
    (*own)[cluster] = clock.known;
    handed.hear(std::move(own));
    handed.hear(clock.foreign);
    if (atomic) handed.hear(handed_on_[address]);
    handed_on_[address] = handed.foreign;
  }

  Shared<const Foreign> acquire(u64 address) {
    Guard guard(lock_);
    const Shared<const Foreign>* found = handed_on_.find(address);
    return found ? *found : Shared<const Foreign>();
  }

 private:
  struct Touch {
    u64 cluster;
    u32 pc, component, time;
    u16 bytes;
    bool write, strong;
  };

  static bool known(const Touch& old, const Foreign* foreign) {
    return foreign && old.cluster < foreign->size() && Clock::at((*foreign)[old.cluster], old.component) >= old.time;
  }

  void touch(const Cluster& cluster, const Touch& now, Kind kind, u64 at, const Foreign* foreign) {
    std::vector<Touch>& granule = granules_[at / 16];
    bool kept = false;
    for (Touch& old : granule) {
      if (old.cluster == now.cluster) {
        bool alike = old.write == now.write && old.strong == now.strong && old.component == now.component;
        if (alike && (old.time == now.time || old.bytes == now.bytes)) {
          old.bytes |= now.bytes, old.time = std::max(old.time, now.time), kept = true;
        }
      } else if (old.bytes & now.bytes && (kind == Kind::Write || (old.write && kind == Kind::Read)) &&
                 !(old.strong && now.strong) && !known(old, foreign)) {
        fault("race", "%s: %s by cluster %llu at @pc:%u@ and %s by cluster %llu at @pc:%u@ of the same launch",
              cluster.machine.place(at).c_str(), old.write ? "write" : "read", (unsigned long long)old.cluster, old.pc,
              now.write ? "write" : "read", (unsigned long long)now.cluster, now.pc);
      }
    }
    if (!kept) granule.push_back(now);
  }

  Mutex lock_;
  AddressMap<std::vector<Touch>> granules_;
  AddressMap<Shared<const Foreign>> handed_on_;  // by the addresses of strong accesses
};
