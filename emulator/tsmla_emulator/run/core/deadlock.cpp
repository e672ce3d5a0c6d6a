// When nothing can run: who waits for what, and who arrived there before but not this time.
#include <cstdarg>
#include <cstdio>
#include <string>

#include "ops.h"

namespace {

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

std::string name(const Warp& w) { return text("CTA %u warp %u", w.cta->rank, w.index); }

std::string about_mbarrier(const Cta& cta, u32 offset) {
  const Mbarrier& b = cta.mbarriers[size_t(cta.mbarrier_at[offset / 8])];
  std::string line =
      text("mbarrier 0x%x of CTA %u to leave phase %u (%lld of %lld arrivals and %lld bytes missing)", offset, cta.rank,
           b.phase, (long long)b.pending, (long long)b.expected, (long long)b.transactions);
  std::string late;
  for (const auto& arrival : b.arrivals)
    if (arrival.phase != b.phase && arrival.warp)
      late += text("\n      arrived in phase %u, not in this one: %s at @pc:%u@", arrival.phase,
                   name(*arrival.warp).c_str(), arrival.pc);
  if (b.arrivals.empty()) late = "\n      nobody ever arrived at it";
  return line + late;
}

std::string about_named(const Cta& cta, const Group& g) {
  const NamedBarrier& b = cta.named[g.argument];
  std::string absent;
  for (auto& w : cta.warps) {
    bool here = false;
    for (const Group& other : w->groups) here |= other.wait == Wait::Named && other.argument == g.argument;
    if (!here && !w->finished()) absent += text(" %u", w->index);
  }
  return text("named barrier %u (%u of %u threads arrived; running warps that are not at it:%s)", g.argument, b.arrived,
              b.expected ? b.expected : cta.live_warps() * 32, absent.c_str());
}

std::string reason(const Cluster& cluster, const Warp& w, const Group& g) {
  switch (g.wait) {
    case Wait::Mbarrier:
      return about_mbarrier(*g.where, g.argument);
    case Wait::Named:
      return about_named(*g.where, g);
    case Wait::Converge:
      return text("the other lanes of its warp (here: 0x%x, live: 0x%x)", g.mask, w.live);
    case Wait::ClusterBarrier:
      return text("the cluster barrier (%u warps arrived)", cluster.barrier_arrived);
    case Wait::BulkGroup:
      return "bulk copies to finish";
    case Wait::Wgmma:
      return "wgmma instructions that not all warps of the warpgroup have issued";
    case Wait::Tcgen05:
      return "tensor memory stores to finish";
    case Wait::CpAsync:
      return "cp.async copies to finish";
    case Wait::Registers: {
      u32 sum = g.argument;
      for (u32 i = 0; i < w.cta->register_counts.size(); i++) sum += i == w.index ? 0 : w.cta->register_counts[i];
      return text("registers: setmaxnreg.inc %u would make %u of %u", g.argument, sum * 32, w.cta->register_pool);
    }
    case Wait::Pair:
      return text("the other CTA of the pair at tcgen05.%s.cta_group::2",
                  cluster.meetings[w.cta->rank / 2].op == OP_TMEM_ALLOC ? "alloc" : "dealloc");
    case Wait::Lanes:
      return text("lanes of its warp at convergence barrier B%u (here: 0x%x, live: 0x%x)", g.argument, g.mask, w.live);
    case Wait::Alloc:
      return text("%u free tensor memory columns", g.argument);
    case Wait::Nothing:
      break;
  }
  return "nothing: it polls barriers that never complete";
}

}  // namespace

void Cluster::report_deadlock() {
  std::string report = "no warp can go on";
  for (Warp* w : warps) {
    if (w->finished()) continue;
    for (const Group& g : w->groups)
      report += "\n  " + name(*w) + text(" at @pc:%u@ waits for ", g.pc) + reason(*this, *w, g);
  }
  running = nullptr;
  throw Fault{"deadlock", report};
}
