"""The machines of the timing model: every number with its source, or marked as assumed.

Clocks are the SM's. `low`, `high`: the range that the band of a modelled time covers, where a number is not certain.
"""

from __future__ import annotations

import dataclasses

from tsmla.identity.arch import SHIPPED_ARCHS, SMS


@dataclasses.dataclass(frozen=True)
class Value:
    """A number and its source."""

    value: float
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def clocks(self) -> int:
        return round(self.value)


MEASURED = "measured: microbench-nvidia-h100-80gb-hbm3-20261124T084059.json"
MEASURED_SHARED = "measured: microbench-shared-nvidia-h100-80gb-hbm3-20261124T121256.json"
MEASURED_CODE = "measured on an H200: microbench-code-nvidia-h200-20261129T094609.json"
MEASURED_DEPENDENTS = "measured: microbench-dependents-nvidia-h100-80gb-hbm3-20261125T051836.json"
S4 = "B300, github.com/ademeure/QuickRunCUDA, B300_PIPE_CATALOG.md, audited values"
UMMA = "github.com/SemiAnalysisAI/microbench-blackwell, umma_latency, umma_throughput (B200)"
MOVES = "github.com/facebookexperimental/triton, LatencyModel.cpp (1d124e4), B200, four warps"
ASSUMED = "assumed"


@dataclasses.dataclass(frozen=True)
class Machine:
    """One GPU. Pipes: clocks of a warp instruction in one of the four sub-partitions; `*_latency`: until the result."""

    name: str
    clock: Value  # MHz
    hbm: Value  # GB/s, reading
    l2: Value  # bytes a clock and SM, all SMs copying what several of them read
    l2_own: Value  # the same, each its own
    l2_bytes: Value  # that L2 holds
    fma: Value
    fma_latency: Value
    alu: Value
    alu_latency: Value
    exponential: Value
    special: Value
    special_latency: Value
    convert: Value
    convert_pipe: str  # alu or convert
    warp_product: Value  # mma.sync m16n8k16, by a sub-partition's tensor core
    warp_product_latency: Value
    shuffle: Value
    shuffle_latency: Value
    shared_latency: Value
    load_latency: Value  # from L2
    load_latency_hbm: Value
    constant_latency: Value
    barrier_visible: Value
    barrier_wake: Value
    barrier_ready: Value
    barrier_remote: Value
    named_base: Value
    named_warp: Value
    cluster_barrier: Value
    copy_issue: Value
    copy_latency: Value  # of the first byte, from L2
    copy_latency_hbm: Value
    store_latency: Value
    proxy_fence: Value
    memory_fence: Value
    set_registers: Value
    launch: Value  # clocks between two kernels of a stream that nothing else fills
    launch_dependent: Value  # the same, of a kernel that is a dependent of the one before it (PDL)
    cta_gap: Value
    window: Value
    wgmma_start: Value
    wgmma_tail: Value
    wgmma_registers: Value
    wgmma_queue: Value  # products of an SM that are issued and not done; a warp with one more waits
    beside_fma: Value  # how much longer a pipe takes while wgmma multiplies
    beside_alu: Value
    beside_mufu: Value
    product_start: Value
    product_tail: Value
    tensor_load_rate: Value  # bytes a clock and sub-partition
    tensor_store_rate: Value
    tensor_load_latency: Value
    tensor_store_latency: Value
    tensor_alloc: Value
    lines_ahead: Value  # lines of code, of 128 bytes, that a launch brings ahead
    line_ahead: Value  # clocks that a warp waits for one of these that no other of the SM has executed
    line_behind: Value  # the same, of those behind

    @property
    def processors(self) -> int:
        """SMs of the GPU."""
        return SMS[self.name]


_WINDOW = Value(48, "assumed: instructions among which ptxas is taken to choose", 8, 96)
_NONE = Value(0, "not on this machine")

H100 = Machine(
    name="H100",
    clock=Value(1980, "nvidia-smi: most"),
    hbm=Value(3260, MEASURED + ": 12.48 bytes a clock and SM at 1.98 GHz"),
    l2=Value(65, MEASURED + ": SMs that share what they read; 30 where each reads its own", 30, 84),
    l2_own=Value(30, MEASURED),
    l2_bytes=Value(50e6, "NVIDIA H100 white paper: 50 MB", 25e6, 50e6),
    fma=Value(1, MEASURED),
    fma_latency=Value(4, MEASURED + ": 4.6 with the loop"),
    alu=Value(2, MEASURED),
    alu_latency=Value(4.6, MEASURED),
    exponential=Value(8, MEASURED),
    special=Value(8, MEASURED),
    special_latency=Value(17, MEASURED),
    convert=Value(2, MEASURED + ": in the pipe of the maxima"),
    convert_pipe="alu",
    warp_product=Value(6, "assumed: six tenths of the rate of wgmma, of which 4 clk would be all", 4, 8),
    warp_product_latency=Value(33, ASSUMED),
    shuffle=Value(4, MEASURED),
    shuffle_latency=Value(24, MEASURED),
    shared_latency=Value(23, MEASURED),
    load_latency=Value(284, MEASURED + ": L2"),
    load_latency_hbm=Value(638, "HPMLL/NVIDIA-Hopper-Benchmark (H800)"),
    constant_latency=Value(30, ASSUMED),
    barrier_visible=Value(30, MEASURED + ": 88 clk of a handover, divided by assumption"),
    barrier_wake=Value(50, MEASURED + ": 88 clk of a handover, divided by assumption"),
    barrier_ready=Value(36, MEASURED + ": 41 with the loop"),
    barrier_remote=Value(180, "HPMLL/NVIDIA-Hopper-Benchmark: 181 clk of a load from the other CTA's shared memory"),
    named_base=Value(26, MEASURED),
    named_warp=Value(2, MEASURED),
    cluster_barrier=Value(190, ASSUMED),
    copy_issue=Value(80, MEASURED + ": 101 clk with the announcement", 48, 100),
    copy_latency=Value(490, MEASURED + ": 708 clk of a box of 16 KB, the transfer and the wait taken off", 440, 600),
    copy_latency_hbm=Value(1050, MEASURED + ": 1127 to 1290 clk, the transfer and the wait taken off", 950, 1360),
    store_latency=Value(500, ASSUMED),
    proxy_fence=Value(23, S4),
    memory_fence=Value(500, ASSUMED),
    set_registers=Value(130, MEASURED + ": 117 down, 147 up"),
    launch=Value(3500, MEASURED + ": a kernel of all SMs, its own clocks taken off"),
    launch_dependent=Value(1500, MEASURED_DEPENDENTS, 1320, 1610),
    cta_gap=Value(331, MEASURED),
    window=_WINDOW,
    wgmma_start=Value(30, MEASURED + ": 107 clk beyond the product, divided by assumption"),
    wgmma_tail=Value(65, MEASURED + ": 107 clk beyond the product, divided by assumption"),
    wgmma_registers=Value(8, MEASURED + ": one warpgroup, A in registers: 72 clk for N 128, 40 for N 64"),
    wgmma_queue=Value(7, MEASURED_SHARED + ": the eighth product and later ones are issued when one is done"),
    beside_fma=Value(1.75, MEASURED + ": 1.73 and 1.82 of 1.0", 1, 1.75),
    beside_alu=Value(2.0, MEASURED + ": 4.27 clk of a maximum", 1, 2.0),
    beside_mufu=Value(1.31, MEASURED + ": 10.6 clk of an exponential", 1, 1.37),
    product_start=_NONE,
    product_tail=_NONE,
    tensor_load_rate=_NONE,
    tensor_store_rate=_NONE,
    tensor_load_latency=_NONE,
    tensor_store_latency=_NONE,
    tensor_alloc=_NONE,
    lines_ahead=Value(512, MEASURED_CODE + ": 64 KB"),
    line_ahead=Value(8, MEASURED_CODE + ": 0.2 to 1.8 clk an instruction, the more the further back", 2, 27),
    line_behind=Value(89, MEASURED_CODE + ": 10.7 to 11.6 clk an instruction", 85, 93),
)
H200 = dataclasses.replace(
    H100, name="H200", hbm=Value(4515, "measured on an H200: a large read, benchmarks/results, decode records")
)
_ON_HOPPER = "as measured on an H100"
B200 = dataclasses.replace(
    H100,
    name="B200",
    launch_dependent=Value(1500, MEASURED_DEPENDENTS + "; assumed the same in clk here", 1320, 3500),
    clock=Value(1850, "VeOmni#986: 1965 at most; 1845 seen under light load", 1700, 1965),
    hbm=Value(7260, "SemiAnalysisAI/microbench-blackwell"),
    l2=Value(65, _ON_HOPPER, 30, 100),
    l2_own=Value(30, _ON_HOPPER),
    l2_bytes=Value(126e6, "torch.cuda.get_device_properties of a B200, as others report it: 126 MB", 63e6, 126e6),
    fma=Value(1, S4),
    fma_latency=Value(4, S4),
    alu=Value(2, S4),
    alu_latency=Value(4, S4),
    exponential=Value(8, "cudnn-frontend#1178: 16 a clock and SM"),
    special=Value(8, S4),
    special_latency=Value(18, "assumed; B300 14.5, H100 17"),
    convert=Value(4, S4 + ": not measured on a B200", 2, 4),
    convert_pipe="convert",
    shuffle=Value(4, _ON_HOPPER),
    shuffle_latency=Value(26, S4),
    shared_latency=Value(29, S4),
    load_latency=Value(298, S4),
    load_latency_hbm=Value(800, S4 + ": 764 to 837"),
    barrier_visible=Value(30, _ON_HOPPER),
    barrier_wake=Value(50, _ON_HOPPER + "; " + S4 + ": 123 of one thread's arrive and wait", 50, 90),
    barrier_ready=Value(36, _ON_HOPPER),
    named_base=Value(22, S4),
    named_warp=Value(2, S4),
    copy_latency=Value(600, "assumed; H100 and " + S4, 450, 800),
    copy_latency_hbm=Value(1100, "assumed; microbench-blackwell: 1413 with all SMs loading", 900, 1400),
    beside_fma=Value(1, "assumed: accumulators are not in registers"),
    beside_alu=Value(1, "assumed: accumulators are not in registers"),
    beside_mufu=Value(1, "assumed: accumulators are not in registers"),
    product_start=Value(25, UMMA + ": 148 of SS M128 without the products, divided by assumption"),
    product_tail=Value(115, UMMA + ": 148 of SS M128 without the products, divided by assumption", 95, 150),
    tensor_load_rate=Value(128, "assumed; " + S4 + ": 53 to 128 bytes a clock and sub-partition", 64, 128),
    tensor_store_rate=Value(256, MOVES + ": 96 clk of 128 columns less 64 of 64; " + S4 + ": 86 to 115", 86, 256),
    tensor_load_latency=Value(
        115, MOVES + ": 179 clk of 64 columns, the transfer taken off, at most 532 less that of 128", 51, 404
    ),
    tensor_store_latency=Value(32, MOVES + ": 64 clk of 64 columns, the transfer taken off", 15, 100),
    tensor_alloc=Value(253, S4),
)
GB200 = dataclasses.replace(B200, name="GB200", clock=Value(2062, "VeOmni#986: at most", 1850, 2062))
B300 = dataclasses.replace(
    B200,
    name="B300",
    clock=Value(1920, S4 + ": locked; 2032 to 2070 at most", 1800, 2032),
    hbm=Value(7180, S4),
    exponential=Value(4, S4),
    special_latency=Value(15, S4),
    convert=Value(4, S4),
)
GB300 = dataclasses.replace(
    B300, name="GB300", clock=Value(2000, "facebookexperimental/triton#2023: 2070 at most", 1850, 2070)
)
MACHINES = {machine.name: machine for machine in (H100, H200, B200, GB200, B300, GB300)}
OF_ARCH = {str(arch): next(iter(arch.facts.gpus)) for arch in SHIPPED_ARCHS}
"""Architecture -> the machine that its kernels are modelled on unless another is named."""
