// The switch over the lane-wise operations of machine code, generated from sass/lane_ops.py.
#include "ops.h"
#include "sass_lanes.h"

void execute_sass_lanes(const Insn& in, Warp& w, u32 mask) {
  switch (in.op - OP_SASS_LANES) {
#include "sass_ops.inc"
  }
}
