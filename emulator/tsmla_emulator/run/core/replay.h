// A replay of traces against a machine's rates: discrete events, one cluster, every CTA on an SM of its own. Times are in
// clocks of the SM. emulator/docs/timing-model.md says what is modelled and how.
#pragma once
#include <vector>

#include "trace.h"

namespace replay {

// What an instruction does beyond its pipe. Anything but plain and free is an anchor: it is issued in order.
enum Kind : u8 {
  kPlain, kFree, kInit, kArrive, kWait, kNamedSync, kNamedArrive, kClusterArrive, kClusterWait, kLoad, kStore, kStoreCommit,
  kStoreWait, kWgmma, kWgmmaCommit, kWgmmaWait, kTensorLoad, kTensorStore, kTensorWaitLoad, kTensorWaitStore, kProduct,
  kCommit, kCopy, kCopyCommit, kCopyWait, kCopyArrive, kStall, kKinds
};
// kMove: shared, global memory, shuffles; kWarpProduct: mma.sync
enum Pipe : u8 { kNone, kFma, kAlu, kMufu, kConvert, kMove, kTensorMemory, kWarpProduct, kPipes };

// Written by time/replay.py in this layout.
struct Cost {
  u8 kind, pipe, slots, registers;  // registers: a wgmma whose A is there
  u32 occupancy, latency;           // clocks of the pipe; until the result is there
  u32 port;                         // clocks of the SM's shared memory
  u32 value;                        // groups that may be open; clocks of a product, of a stall, until a lane's copy comes
  u32 operands;                     // clocks of shared memory that a product on Hopper reads for
  u32 first, reads, writes;         // register slots: lists[first .. first + reads), then the written ones
  u8 loads;                         // it reads shared memory
  u8 ordered, stall, awaits, sets;  // machine code: issued in order; clocks until the next may be; scoreboards that it
                                    // awaits, a bit each; 1 + the one that its result frees | 16 * (1 + its operands')
  u32 line;                         // machine code: 1 + the line of code that it lies in
};

struct Parameters {
  u32 window;  // instructions of a warp among which the compiler is taken to choose
  u32 barrier_visible, barrier_wake, barrier_ready, barrier_remote;
  u32 named_base, named_warp, cluster_barrier;
  u32 copy_issue, copy_latency, store_latency;
  u32 wgmma_start, wgmma_tail, wgmma_registers, wgmma_queue;
  u32 product_start, product_tail;
  u32 lines_ahead, line_ahead, line_behind;  // lines of code that a launch brings ahead; clocks until an SM has one of
                                             // these, or of those behind, that it executes for the first time
  u32 beside[kPipes];  // clocks of a pipe while matrices multiply, in 64ths of its clocks when they do not
  double copy_rate;  // bytes a clock and SM
};

struct WarpTrace {
  const u32* instructions;
  const Note* notes;
  u64 instruction_count, note_count;
  u32 rank, warp;
  const u32* tests;  // positions in `instructions` where it asks whether a phase is complete, and goes on either way
  u64 test_count;
};
constexpr u32 kUnknown = 1u << 31;  // with a test: what the warp does when it is complete is not in the trace

struct Waited {
  u32 warp, pc;  // position in the traces given
  u64 start, end;
};

constexpr u32 kBin = 32;  // clocks
constexpr u32 kBins = 1 << 15;

struct Busy {
  u64 issue[4], pipes[4][kPipes], tensor, port, copied;
  u32 tensor_bins[kBins], mufu_bins[kBins];  // clocks of each bin; mufu: of the first sub-partition
};

}  // namespace replay
