// What the clusters of a launch do to global memory that may be written: nothing orders them, so that a byte that one
// writes is nobody else's, but that others may write what is there.
#pragma once
#include <mutex>
#include <unordered_map>

#include "events.h"
#include "machine.h"

class GlobalTouches {
 public:
  void touch(const Cluster& cluster, u32 pc, Kind kind, u64 address, u64 bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    for (u64 at = address; at < address + bytes;) {
      u32 begin = u32(at & 15), end = u32(std::min<u64>(16, begin + address + bytes - at));
      touch(cluster, {cluster.index, pc, u16((1u << end) - (1u << begin)), kind != Kind::Read}, kind, at);
      at += end - begin;
    }
  }

 private:
  struct Touch {
    u64 cluster;
    u32 pc;
    u16 bytes;
    bool write;
  };

  void touch(const Cluster& cluster, const Touch& now, Kind kind, u64 at) {
    std::vector<Touch>& granule = granules_[at / 16];
    bool known = false;
    for (Touch& old : granule) {
      if (old.cluster == now.cluster) {
        if (old.write == now.write) old.bytes |= now.bytes, known = true;
      } else if (old.bytes & now.bytes && (kind == Kind::Write || (old.write && kind == Kind::Read))) {
        fault("race", "%s: %s by cluster %llu at @pc:%u@ and %s by cluster %llu at @pc:%u@ of the same launch",
              cluster.machine.place(at).c_str(), old.write ? "write" : "read", (unsigned long long)old.cluster, old.pc,
              now.write ? "write" : "read", (unsigned long long)now.cluster, now.pc);
      }
    }
    if (!known) granule.push_back(now);
  }

  std::mutex lock_;
  std::unordered_map<u64, std::vector<Touch>> granules_;
};
