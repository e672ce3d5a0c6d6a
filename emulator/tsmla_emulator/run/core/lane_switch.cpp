// The switch over the lane-wise instructions, generated from ptx/simple_ops.py.
#include "lanes.h"
#include "ops.h"

void execute_lanes(const Insn& in, Warp& w, u32 mask) {
  switch (in.op) {
#include "simple_ops.inc"
  }
}
