// A cluster: how it starts, which warp runs next, when asynchronous work completes.
#include <cstdarg>
#include <cstdio>

#include "global_touches.h"
#include "ops.h"

std::unique_ptr<Events> make_happens_before(const Cluster&);

constexpr u64 kSpinning = 1 << 18;  // warp instructions without progress after which asynchronous work goes on
constexpr u64 kRound = 64;          // instructions that a loop of failed tries has between two of them, at most

void fault(const char* kind, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Fault{kind, text};
}

const Region* Machine::region_of(u64 address) const {
  auto after =
      std::upper_bound(regions.begin(), regions.end(), address, [](u64 a, const Region& r) { return a < r.address; });
  if (after == regions.begin()) return nullptr;
  const Region& region = *(after - 1);
  return address < region.address + region.size ? &region : nullptr;
}

std::string Machine::place(u64 address) const {
  const Region* region = region_of(address);
  if (!region) return "global memory";
  return "global memory, byte " + decimal(address - region->address) + " of region @region:" +
         decimal(region->index) + "@";
}

Traced* Machine::trace_of(u64 cluster, u32 warp) const {
  for (u32 i = 0; i < options.traced_count; i++)
    if (options.traced[i] == cluster) return const_cast<Traced*>(&traces[i][warp]);
  return nullptr;
}

u32 Cta::live_warps() const {
  u32 count = 0;
  for (auto& w : warps) count += !w->finished();
  return count;
}

Cta& Cluster::cta_at(u32 address, const char* what) {
  u32 rank = address >> kRankShift;
  if (rank >= ctas.size())
    fault("memory", "%s at shared address 0x%x: CTA %u of a cluster of %zu", what, address, rank, ctas.size());
  return *ctas[rank];
}

Cluster::Cluster(const Machine& m, u64 index)
    : machine(m), program(m.program), random{m.options.seed * 1000003 + index}, index(index) {
  const LaunchRecord& launch = m.launch;
  constants.resize(program.constants.size() * 32);
  for (size_t i = 0; i < program.constants.size(); i++)
    std::fill_n(constants.begin() + s64(i * 32), 32, program.constants[i]);
  u32 across[3], origin[3];
  for (u32 i = 0; i < 3; i++) across[i] = launch.grid[i] / launch.cluster[i];
  origin[0] = u32(index % across[0]) * launch.cluster[0];
  origin[1] = u32(index / across[0] % across[1]) * launch.cluster[1];
  origin[2] = u32(index / (u64(across[0]) * across[1])) * launch.cluster[2];
  u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
  u32 window = launch.static_shared + launch.dynamic_shared;
  for (u32 rank = 0; rank < launch.cluster[0] * launch.cluster[1] * launch.cluster[2]; rank++) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = this, cta->rank = rank;
    cta->id[0] = origin[0] + rank % launch.cluster[0];
    cta->id[1] = origin[1] + rank / launch.cluster[0] % launch.cluster[1];
    cta->id[2] = origin[2] + rank / (launch.cluster[0] * launch.cluster[1]);
    cta->shared.assign(window, m.options.poison ? 0xff : 0);
    cta->shadow.assign(window, kUnwritten);
    cta->mbarrier_at.assign(window / 8 + 1, -1);
    u32 count = (threads + 31) / 32;
    u32 registers = std::min(65536 / (count * 32) / 8 * 8, 256u);
    cta->register_counts.assign(count, registers);
    cta->register_pool = 32 * count * registers;
    for (u32 i = 0; i < count; i++) {
      auto warp = std::make_unique<Warp>();
      warp->cta = cta.get(), warp->index = i, warp->number = u32(warps.size());
      warp->live = threads >= 32 * (i + 1) ? ~0u : (1u << (threads - 32 * i)) - 1;
      warp->trace = m.trace_of(index, warp->number);
      start_warp(*warp);
      warps.push_back(warp.get());
      cta->warps.push_back(std::move(warp));
    }
    ctas.push_back(std::move(cta));
  }
  if (launch.machine_code)
    for (auto& cta : ctas) open_reserved(*cta);
  barrier_arrival.assign(warps.size(), 0);
  meetings.resize((ctas.size() + 1) / 2);
  if (m.options.happens_before) {
    events = make_happens_before(*this);
    for (Warp* w : warps) {
      w->actor = events->new_actor(w->number);
      w->touched.assign(program.slots, ~0u);
      w->multiplied.assign(program.slots, 0);
    }
    barrier_sync = events->new_sync();
    for (auto& cta : ctas)
      for (Mbarrier& b : cta->mbarriers) b.sync = events->new_sync();
    for (Meeting& meeting : meetings) meeting.sync = events->new_sync();
  }
}

Cluster::~Cluster() = default;

void Cluster::start_warp(Warp& w) {
  w.file.assign(size_t(program.slots) * 32, ~0u);
  if (machine.options.seed) {  // what was in registers that nobody has written
    RandomSource junk{~machine.options.seed * 1000003 + index * 1024 + w.number};
    for (size_t i = 0; i < w.file.size(); i += 2) {
      u64 words = junk.wide();
      std::memcpy(&w.file[i], &words, sizeof words);
    }
  }
  w.registers = w.file.data();
  w.constants = constants.data();
  u64 params = u64(machine.launch.params);
  std::fill_n(w.registers + 2 * 32, 32, w.cta->rank << kRankShift);
  std::fill_n(w.registers + 3 * 32, 32, 0u);
  std::fill_n(w.registers + 4 * 32, 32, u32(params));
  std::fill_n(w.registers + 5 * 32, 32, u32(params >> 32));
  w.groups.push_back(Group{0, w.live});
}

bool Cluster::satisfied(Warp& w, const Group& g) {
  switch (g.wait) {
    case Wait::Nothing:
      return true;
    case Wait::Converge:
      return (g.mask & w.live) == w.live;
    case Wait::Mbarrier:
      return g.where->mbarriers[size_t(g.where->mbarrier_at[g.argument / 8])].phase != g.generation;
    case Wait::Named:
      return g.where->named[g.argument].generation != g.generation;
    case Wait::ClusterBarrier:
      return barrier_generation != g.generation;
    case Wait::BulkGroup:
      return bulk_satisfied(w, g.mask, g.argument >> 1, g.argument & 1);
    case Wait::Wgmma:
      return wgmma_satisfied(w, g.argument);
    case Wait::Tcgen05:
      return w.tmem_stores.ops.empty();
    case Wait::CpAsync:
      return copies_satisfied(w, g.argument);
    case Wait::Pair:
      return meetings[w.cta->rank / 2].generation >= w.meeting;
    case Wait::Lanes:
      return lanes_met(w, g.argument, g.mask);
    case Wait::Registers:
    case Wait::Alloc:
      return u32(progress) != g.generation;
  }
  return true;
}

// Merges groups that stand at the same instruction; true when the warp has lanes that can go on.
bool Cluster::wake(Warp& w) {
  for (Group& g : w.groups) {
    if (g.wait == Wait::Nothing || !satisfied(w, g)) continue;
    if (g.wait == Wait::Named) {  // the arrival was made; other waits run their instruction again
      if (events) pass_named(*this, w, g.where->named[g.argument]);
      g.pc++;
    }
    if (g.wait == Wait::Lanes) g.pc++;
    g.wait = Wait::Nothing;
  }
  if (w.groups.size() > 1) merge(w);
  u32 best = ~0u;
  for (u32 i = 0; i < w.groups.size(); i++)
    if (w.groups[i].wait == Wait::Nothing && (best == ~0u || w.groups[i].pc < w.groups[best].pc)) best = i;
  w.current = best;
  return best != ~0u;
}

void Cluster::merge(Warp& w) {
  for (u32 i = 0; i < w.groups.size(); i++)
    for (u32 j = i + 1; j < w.groups.size();) {
      Group &a = w.groups[i], &b = w.groups[j];
      bool joinable = (a.wait == Wait::Nothing || a.wait == Wait::Converge) &&
                      (b.wait == Wait::Nothing || b.wait == Wait::Converge);
      if (a.pc != b.pc || !joinable) {
        j++;
        continue;
      }
      a.mask |= b.mask;
      a.wait = Wait::Nothing;
      w.groups.erase(w.groups.begin() + j);
    }
}

bool Cluster::starved(const Warp& w) const {
  const Options& o = machine.options;
  for (u32 i = 0; i < o.starved_count; i++)
    if (o.starved[i] == w.index) return true;
  return false;
}

// Called after a slice: whether the warp does nothing but try. It went round a loop if the same try failed twice before
// anything changed; its slice may have ended at any instruction of that loop.
bool Cluster::only_tries(Warp& w) {
  Warp::Failure& last = w.failure;
  if (w.polling) {
    last.again = last.progress == progress && (last.again || last.pc == running_pc);
    if (last.progress != progress) last.pc = running_pc;
    last.progress = progress, last.executed = w.executed;
  }
  return w.polling || (last.again && last.progress == progress && w.executed - last.executed < kRound);
}

bool Cluster::run(u64 most) {
  const Options& o = machine.options;
  u64 until = most ? executed_ + most : ~0ull;
  waits_for_others_ = false;
  if (order_.empty()) order_ = warps;
  auto slice = [&](Warp& w) {
    u32 quantum = o.quantum ? o.quantum : 1 + random.below(256);
    w.polling = false;
    executed_ += run_slice(w, quantum);
    w.polling = only_tries(w);
    if (o.mode == kRandom)
      while (!async.empty() && random.below(4) == 0) async.run_one(*this, random);
    if (o.limit && executed_ > o.limit)
      fault("limit", "the cluster has run %llu warp instructions without an end", (unsigned long long)executed_);
  };
  while (executed_ < until) {
    bool alive = false, useful = false, held_back = false;
    if (o.mode == kRandom)
      for (size_t i = order_.size(); i > 1; i--) std::swap(order_[i - 1], order_[random.below(u32(i))]);
    for (Warp* w : order_) {
      if (w->finished()) continue;
      alive = true;
      if (!wake(*w)) continue;
      if (o.starved_count && starved(*w)) {
        held_back = true;
        continue;
      }
      u64 before = progress;
      slice(*w);
      useful |= !w->polling || progress != before;
    }
    if (!alive) {
      while (!async.empty()) async.run_one(*this, random);  // an error if it reaches shared memory
      finish();
      return true;
    }
    idle_rounds_ = useful || progress != seen_progress_ ? 0 : idle_rounds_ + 1;
    if (progress != seen_progress_) progressed_at_ = executed_;
    seen_progress_ = progress;
    bool stuck = !useful && idle_rounds_ > 1;
    bool quiet = !useful && !any_runnable_polling();
    bool spins = executed_ - progressed_at_ > kSpinning;  // on global memory, which no wait tells of
    if (!stuck && !quiet && !spins) continue;
    if (held_back) {
      bool moved = false;
      for (Warp* w : order_) {
        if (w->finished() || !starved(*w) || !wake(*w)) continue;
        slice(*w);
        moved |= !w->polling;
      }
      if (moved) continue;
    }
    if (!async.empty()) {
      async.run_one(*this, random);
    } else if (stuck && most && any_polls_global()) {
      idle_rounds_ = 0;
      waits_for_others_ = true;
      return false;
    } else if (quiet ? !held_back : idle_rounds_ > 1000) {
      report_deadlock();
    }
  }
  return false;
}

bool Cluster::any_polls_global() {
  for (Warp* w : warps)
    if (!w->finished() && w->polling && w->polled_pc != ~0u) return true;
  return false;
}

bool Cluster::any_runnable_polling() {
  for (Warp* w : warps)
    if (!w->finished() && w->polling) return true;
  return false;
}

void Cluster::finish() {
  if (events && !events->findings().text.empty()) throw Fault{events->findings().kind, ""};
  running = nullptr;
  for (auto& cta : ctas) {
    if (!cta->tmem) continue;
    for (u32 i = 0; i < TensorMemory::columns; i++)
      if (cta->tmem->allocated[i]) fault("tmem", "the kernel ended with tensor memory column %u still allocated", i);
  }
}

u32 Cluster::run_slice(Warp& w, u32 quantum) {
  running = &w;
  u32 count = 0;
  const Insn* code = program.code.data();
  Counts* counts = machine.counts.get();
  while (count < quantum) {
    Group* g = &w.groups[w.current];
    const Insn& in = code[g->pc];
    running_pc = g->pc;
    u32 mask = g->mask;
    if (in.guard >= 0) {
      const u32* p = w.registers + in.guard * 32;
      u32 set = 0;
      for (u32 i = 0; i < 32; i++) set |= (p[i] & 1u) << i;
      mask &= in.bits & 1 ? ~set : set;
    }
    if (in.bits & 24 && mask)
      mask = in.bits & 8 ? ~0u : machine.options.elect_highest ? 1u << (31 - __builtin_clz(mask)) : mask & -mask;
    count++;
    if (counts) counts->executed(w, g->pc, mask);
    if (w.trace) w.trace->executed(g->pc, mask);
    if (events && in.bits & 2 && machine.options.lenient_tensor) follow_loads(*this, w, in);
    if (events && in.bits & 4) touch_registers(*this, w, in, mask);
    if (!mask) {
      g->pc++;
    } else {
      if (in.op < OP_NOP) {
        execute_lanes(in, w, mask);
      } else if (in.op >= OP_SASS_LANES) {
        execute_sass_lanes(in, w, mask);
      } else if (in.op != OP_NOP) {
        Context context{*this, w, *g, in, mask};
        Step step = execute_complex(context);
        g = nullptr;
        Wait wait = w.groups[w.current].wait;
        bool again = step == Step::Block && wait != Wait::Named && wait != Wait::Lanes;
        bool failed = step == Step::Yield && in.op == OP_MBARRIER_TRY;
        if (counts && again) counts->taken_back(w, running_pc, mask);
        if (w.trace && again) w.trace->instructions.pop_back();
        if (w.trace && failed) w.trace->instructions.back() |= Traced::failed;
        if (step == Step::Next || step == Step::Yield) w.groups[w.current].pc++;
        if (step == Step::Block) count--;
        bool stops = step == Step::Yield || ((step == Step::Block || step == Step::Exit) && (w.finished() || !wake(w)));
        if (stops) break;
      }
      if (g) g->pc++;
    }
    if (w.groups.size() > 1) wake(w);
  }
  w.executed += count;
  return count;
}
