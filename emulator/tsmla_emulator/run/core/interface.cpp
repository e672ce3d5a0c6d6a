// The plain C face that Python calls: one function runs one launch.
#include <atomic>
#include <cstdlib>

#include "events.h"
#include "global_touches.h"
#include "ops.h"

namespace {

struct Failure {
  char* text;  // kind, newline, message
  u64 size;
  s64 pc;  // instruction, -1 when none
  u32 cta[3], warp, known;
};

// The roles of a CTA's warps, as far as setmaxnreg tells them apart; empty when it does not.
std::string roles(const Cta& cta) {
  std::string line;
  u32 count = 0;
  for (size_t first = 0, next; first < cta.warps.size(); first = next) {
    u32 pc = cta.warps[first]->role_pc;
    for (next = first + 1; next < cta.warps.size() && cta.warps[next]->role_pc == pc;) next++;
    line += count++ ? ", warps " : "\n  roles: warps ";
    line += decimal(first) + (next > first + 1 ? "-" + decimal(next - 1) : "") + " ";
    line += pc == ~0u ? "without setmaxnreg"
                      : "of " + decimal(cta.register_counts[first]) + " registers from @pc:" + decimal(pc) + "@";
  }
  return count > 1 ? line : "";
}

constexpr u64 kTurn = 1 << 20;  // warp instructions

// What a launch fails with: texts of its clusters, one after the other, and where the first one was.
struct Account {
  std::string text, roles;

  // A fault that ends a run, or what one cluster has found. What was found before is likely the cause, and comes first.
  void add(Failure& failure, const Fault& last, const Cluster* cluster) {
    Warp* warp = cluster ? cluster->running : nullptr;
    u32 pc = warp ? cluster->running_pc : 0;
    std::string kind = last.kind, now = last.message;
    if (cluster && cluster->events && !cluster->events->findings().text.empty()) {
      const Findings& found = cluster->events->findings();
      kind = found.kind, now = found.text;
      if (!last.message.empty()) now += "\n  and then, " + last.kind + ": " + last.message;
      warp = found.warp, pc = found.pc;
    } else if (!text.empty()) {
      now = "then, " + kind + ": " + now;
    }
    if (!text.empty()) {
      text += "\n  and " + now;
      return;
    }
    text = kind + "\n" + now;
    if (cluster && !cluster->ctas.empty()) roles = ::roles(warp ? *warp->cta : *cluster->ctas.front());
    failure.pc = -1, failure.known = 0;
    if (!warp) return;
    failure.pc = pc, failure.known = 1;
    failure.warp = warp->index;
    std::copy_n(warp->cta->id, 3, failure.cta);
  }

  void write(Failure& failure) const {
    std::string all = text + roles;
    u64 n = std::min<u64>(all.size(), failure.size - 1);
    std::memcpy(failure.text, all.data(), n);
    failure.text[n] = 0;
  }
};

template <class T>
T* copied(const std::vector<T>& from) {
  T* made = static_cast<T*>(std::malloc(std::max<size_t>(1, from.size()) * sizeof(T)));
  std::copy(from.begin(), from.end(), made);
  return made;
}

}  // namespace

extern "C" {

struct ProgramData {
  const Insn* code;
  const s32* lists;
  const u32* constants;
  u64 code_count, list_count, constant_count, slots;
};

// One warp of a traced cluster; `free_trace` gives the memory back.
struct TraceData {
  u32* instructions;
  Note* notes;
  u64 instruction_count, note_count;
};

// Returns 0, or 1 with `failure` filled. `lanes`, [warp in CTA][instruction], is null unless options->count; `traces` has
// one for each warp of each traced cluster.
int tsmla_emulator_run(const ProgramData* data, const LaunchRecord* launch, const Region* regions, u64 region_count,
                       const Options* options, u64* executed, u64* lanes, TraceData* traces, Failure* failure) {
  Program program;
  program.code.assign(data->code, data->code + data->code_count);
  program.lists.assign(data->lists, data->lists + data->list_count);
  program.constants.assign(data->constants, data->constants + data->constant_count);
  program.slots = u32(data->slots);
  Machine machine{program, *launch, *options, {regions, regions + region_count}, {}, {}, {}, {}};
  std::sort(machine.regions.begin(), machine.regions.end(),
            [](const Region& a, const Region& b) { return a.address < b.address; });
  u64 warps = (u64(launch->block[0]) * launch->block[1] * launch->block[2] + 31) / 32;
  u64 ranks = u64(launch->cluster[0]) * launch->cluster[1] * launch->cluster[2];
  machine.traces.assign(options->traced_count, std::vector<Traced>(warps * ranks));
  if (options->count) machine.counts = std::make_unique<Counts>(warps, program.code.size());
  if (options->happens_before) machine.found = std::make_unique<Found>();
  if (options->happens_before && (!launch->clusters_talk || launch->cooperative))
    machine.touches = std::make_unique<GlobalTouches>();
  u64& clusters = machine.clusters = 1;
  for (int i = 0; i < 3; i++) clusters *= launch->grid[i] / launch->cluster[i];
  if (options->only_traced) clusters = options->traced_count;
  auto numbered = [&](u64 i) { return options->only_traced ? u64(options->traced[i]) : i; };
  std::atomic<u64> total{0};
  std::atomic<bool> failed{false};
  Mutex lock;
  Account account;
  // True when there is no more to do for the cluster; 0 for `most`: until its end.
  auto run = [&](std::unique_ptr<Cluster>& cluster, u64 index, u64 most) {
    bool over = true;
    try {
      if (!cluster) cluster = std::make_unique<Cluster>(machine, index);
      over = cluster->run(most);
    } catch (const Fault& fault) {
      Guard guard(lock);
      if (!failed) account.add(*failure, fault, cluster.get());
      failed = failed || !fault.message.empty() || machine.found->count() >= options->findings;
    }
    if (over && cluster)
      for (Warp* w : cluster->warps) total += w->executed;
    return over;
  };
  // Clusters that talk take turns, since one may wait for what another will write.
  auto in_turns = [&] {
    std::deque<std::pair<u64, std::unique_ptr<Cluster>>> waiting;
    u64 in_vain = 0, seen = 0;  // turns since global memory was seen to change, in each of which all warps only waited
    for (u64 index = 0; !failed && (index < clusters || !waiting.empty());) {
      bool starts = index < clusters;
      std::pair<u64, std::unique_ptr<Cluster>> turn;
      if (starts)
        turn.first = numbered(index++);
      else
        turn = std::move(waiting.front()), waiting.pop_front();
      bool over = run(turn.second, turn.first, kTurn);
      u64 changes = machine.changes;
      in_vain = over || changes != seen || !turn.second->waits_for_others() ? 0 : in_vain + 1;
      seen = changes;
      if (!over && in_vain > 2 * waiting.size() + 2 && index == clusters) {
        try {
          turn.second->report_deadlock();
        } catch (const Fault& fault) {
          account.add(*failure, fault, turn.second.get());
          failed = true;
        }
      }
      if (!over) waiting.push_back(std::move(turn));
    }
  };
  auto work = [&] {
    if (launch->clusters_talk) return in_turns();
    for (u64 index; !failed && (index = machine.next++) < clusters;) {
      std::unique_ptr<Cluster> cluster;
      run(cluster, numbered(index), 0);
    }
  };
  in_threads(std::min<u64>(launch->clusters_talk ? 1 : options->threads, clusters), work);
  *executed = total;
  bool good = account.text.empty();
  if (!good) account.write(*failure);
  if (lanes) std::copy(machine.counts->lanes().begin(), machine.counts->lanes().end(), lanes);
  for (const std::vector<Traced>& of_cluster : machine.traces)
    for (const Traced& traced : of_cluster) {
      *traces++ = {copied(traced.instructions), copied(traced.notes), traced.instructions.size(), traced.notes.size()};
    }
  return good ? 0 : 1;
}

void tsmla_emulator_free_traces(TraceData* traces, u64 count) {
  for (u64 i = 0; i < count; i++) std::free(traces[i].instructions), std::free(traces[i].notes);
}
}
