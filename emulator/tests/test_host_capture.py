"""The host half of exported objects runs for real: launches and tensor maps are what the arguments imply."""

from __future__ import annotations

import ctypes
import json
import struct

import numpy as np
import pytest
import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PackVariant, PrefillVariant
from tsmla_emulator.prove import check
from tsmla_emulator.run import machine, record
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.host import launch_config
from tsmla_emulator.run.host.compile import compile_for_emulation
from tsmla_emulator.run.host.launch_config import KernelLimits
from tsmla_emulator.run.host.link import LinkError, link
from tsmla_emulator.run.host.memory import GuardError
from tsmla_emulator.run.host.tensor_map import TensorMap
from tsmla_emulator.run.machine import EmulationError, Launch, Options, Report

PACK = PackVariant(Arch.SM100A, Dtype.BF16, Dtype.E4M3, 128, 64, 128)
PREFILL = PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, True, True)


@pytest.fixture
def seen(monkeypatch):
    """What reached the machine, which runs nothing: (module, launch, regions by name) of each launch."""
    launched = []

    def note(module, launches, regions, options):
        launched.extend((module, launch, {r.name: r for r in regions}) for launch in launches)
        return Report()

    monkeypatch.setattr(machine, "run_launches", note)
    return launched


def pack_inputs(tokens=5, heads=3):
    both = torch.randn(tokens, heads, 256, device="cuda", dtype=torch.bfloat16)
    return both[..., :128], torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16), both[..., 128:]


def prefill(q, k, v, ends_q, ends_kv, **options):
    cum_q, cum_kv = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in (ends_q, ends_kv))
    return tsmla.tsmla_prefill(q, k, v, None, cum_kv, 0, len(ends_q) - 1, 0.25, True, True, cum_q, **options)


def params(module, launch):
    return [launch.params[p.offset : p.offset + p.size] for p in module.entries[launch.entry].params]


def test_pack_launch(seen):
    with emulated("sm_100a") as gpu:
        k_nope, k_pe, v = pack_inputs()
        k_out, v_out = tsmla.mla_kv_pack_quantize_fp8(k_nope, k_pe, v, 0.5, 3.0, enable_pdl=True)
    ((module, launch, regions),) = seen
    assert (launch.grid, launch.block, launch.cluster) == ((1, 1, 1), (320, 1, 1), (1, 1, 1))
    assert launch.shared_bytes == 0 and launch.pdl
    values = params(module, launch)
    pointer, tokens, heads, token_stride, head_stride = struct.unpack("<QiiQQ", values[0])
    assert (pointer, tokens, heads, token_stride, head_stride) == (k_nope.data_ptr(), 5, 3, 768, 256)
    assert struct.unpack("<Qi4xQ", values[1]) == (k_pe.data_ptr(), 5, 64)
    assert [struct.unpack_from("<Q", value)[0] for value in values[2:5]] == [x.data_ptr() for x in (v, k_out, v_out)]
    assert struct.unpack("<ff", b"".join(values[5:7])) == (0.5, 3.0)
    assert {name: (r.size, r.writable) for name, r in regions.items()} == {
        "k_nope+v": (5 * 3 * 256 * 2, False),
        "k_pe": (5 * 64 * 2, False),
        "k_out": (5 * 3 * 192, True),
        "v_out": (5 * 3 * 128, True),
    }
    (call,) = gpu.calls
    assert call.unwritten == {"k_out": 5 * 3 * 192, "v_out": 5 * 3 * 128}, "the machine ran nothing"


def test_prefill_launch_and_tensor_maps(seen):
    with emulated("sm_90a"):
        q = torch.randn(200, 4, 192, device="cuda", dtype=torch.bfloat16)
        both = torch.randn(300, 2, 320, device="cuda", dtype=torch.bfloat16)
        k, v = both[..., :192], both[..., 192:]
        out, lse = prefill(q, k, v, [0, 150, 200], [0, 150, 300])
    ((module, launch, regions),) = seen
    assert launch.block == (384, 1, 1) and launch.grid[0] % 4 == 0 and not launch.pdl
    values = params(module, launch)
    maps = [TensorMap.decode(value) for value in values if len(value) == 128]
    q_map, q_pe_map, k_map, k_pe_map, v_map = maps
    assert all(m.dtype == "bf16" and m.swizzle == 128 and m.box[0] == 64 and not m.nan_fill for m in maps)
    # Joined or not, queries and keys are read in two pieces.
    for piece, tensor, rows, heads, width in ((q_map, q, 200, 4, 192), (k_map, k, 300, 2, 320)):
        assert (piece.address, piece.shape) == (tensor.data_ptr(), (128, rows, heads))
        assert piece.strides == (heads * width * 2, width * 2)
    for piece, first in ((q_pe_map, q_map), (k_pe_map, k_map)):
        assert (piece.address, piece.strides) == (first.address + 128 * 2, first.strides)
        assert piece.shape == (64, *first.shape[1:])
    # V is clipped at a sequence's end by a fourth dimension that reaches back from the rows' end.
    assert v_map.shape[0] == 128 and v_map.strides[1] == 320 * 2 and v_map.strides[0] == v_map.strides[2] == 2 * 320 * 2
    pointers = [struct.unpack_from("<Q", value)[0] for value in values if 8 <= len(value) < 128]
    assert lse.data_ptr() in pointers and out.data_ptr() in pointers
    assert 0.25 in [struct.unpack("<f", value)[0] for value in values if len(value) == 4]
    assert regions["k+v"].size == 300 * 2 * 320 * 2 and not regions["k+v"].writable
    assert regions["out"].address == out.data_ptr() and regions["out"].writable and regions["lse"].writable


def test_every_call_is_recorded_in_order(seen):
    with emulated("sm_100a") as gpu:
        for tokens in (5, 70, 0):
            tsmla.mla_kv_pack_quantize_fp8(*pack_inputs(tokens), enable_pdl=True)
    assert [launch.grid[0] for _, launch, _ in seen] == [1, 70 * 3 // 64 + 1], "no tokens launch nothing"
    assert len(gpu.calls) == 2


def test_the_operator_raises_as_on_a_gpu(seen):
    with emulated("sm_100a"):
        k_nope, k_pe, v = pack_inputs()
        with pytest.raises(tsmla.ArgumentError, match="k_pe is on cpu"):
            tsmla.mla_kv_pack_quantize_fp8(k_nope, k_pe.cpu(), v)
        with pytest.raises(tsmla.UnsupportedError, match="prefill head dims"):
            q = torch.zeros(8, 1, 40, device="cuda", dtype=torch.bfloat16)
            prefill(q, q, q, [0, 8], [0, 8])
    assert not seen


def test_argument_checks_of_the_exported_function_run(seen):
    with emulated("sm_100a") as gpu:
        kernel = gpu.kernel(PACK)
        k_nope, k_pe, v = pack_inputs()
        k_out = k_nope.new_empty(5, 3, 192, dtype=torch.float8_e4m3fn)
        v_out = k_nope.new_empty(5, 3, 128, dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="k_pe"):
            kernel(k_nope, k_pe[1:], v, k_out, v_out, 1.0, 1.0, 0)
        with pytest.raises(TypeError, match="Expects 8 parameters"):
            kernel(k_nope, k_pe, v)
        with pytest.raises(TypeError, match="v is on cpu"):
            kernel(k_nope, k_pe, v.cpu(), k_out, v_out, 1.0, 1.0, 0)
    assert not seen


def test_a_kernel_of_another_architecture_is_refused():
    with emulated("sm_90a") as gpu, pytest.raises(ValueError, match="is for sm_100a; the emulated GPU is sm_90a"):
        gpu.kernel(PACK)
    with pytest.raises(ValueError, match="emulated: sm_90a, sm_100a, sm_103a"):
        with emulated("sm_80"):
            pass


def test_ptx_of_another_compile_is_refused(seen, tmp_path):
    made = compile_for_emulation(PACK)
    other = tmp_path / "other.ptx"
    other.write_text(made.ptx.read_text().replace("PackKernel", "OtherKernel"))
    with emulated("sm_100a") as gpu:
        kernel = gpu.load(made.ptx.with_name("kernel.o"), other, PACK.symbol())
        tensors = pack_inputs()
        outs = [tensors[0].new_empty(5, 3, d, dtype=torch.float8_e4m3fn) for d in (192, 128)]
        with pytest.raises(EmulationError, match="must come from the same compile"):
            kernel(*tensors, *outs, 1.0, 1.0, 0)
        with pytest.raises(AttributeError, match="exports no function nonsense"):
            gpu.load(made.ptx.with_name("kernel.o"), made.ptx, "nonsense")
    assert not seen


def test_objects_that_cannot_be_linked(tmp_path):
    with pytest.raises(LinkError, match="cannot be read"):
        link(tmp_path / "missing.o")
    (tmp_path / "broken.o").write_bytes(b"not an object")
    with pytest.raises(LinkError, match="zig cc .* failed"):
        link(tmp_path / "broken.o")


def test_torch_and_tsmla_are_as_before_afterwards(seen):
    from tsmla.loading import resolve

    capability, search = torch.cuda.get_device_capability, resolve._search
    with emulated("sm_103a"):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 3)
        tsmla.mla_kv_pack_quantize_fp8(*pack_inputs(), enable_pdl=True)
        assert list(resolve.served().values()) == ["emulated"]
    assert torch.cuda.get_device_capability is capability and resolve._search is search
    assert not resolve.served(), "an emulated kernel must not serve later calls"


def test_writes_outside_of_allocations_are_found(monkeypatch):
    def careless(module, launches, regions, options):
        end = max(region.address + region.size for region in regions)
        ctypes.c_ubyte.from_address(end + 7).value ^= 1
        return Report()

    monkeypatch.setattr(machine, "run_launches", careless)
    with emulated("sm_100a"), pytest.raises(GuardError, match="byte 7 after allocation"):
        tsmla.mla_kv_pack_quantize_fp8(*pack_inputs(), enable_pdl=True)


@pytest.mark.parametrize("variant", [PACK, PREFILL], ids=str)
def test_a_variant_that_computes_nothing_fails_its_check(seen, variant):
    assert check.check(variant).error


REFUSED = [
    ({"grid": (0, 1, 1)}, "grid is"),
    ({"grid": (1, 65536, 1)}, "grid is"),
    ({"block": (1024, 2, 1)}, "2048 threads"),
    ({"block": (128, 1, 1)}, "exactly \\(320, 1, 1\\)"),
    ({"cluster": (2, 1, 1)}, "not a multiple"),
    ({"grid": (16, 1, 1), "cluster": (16, 1, 1)}, "may have 8"),
    ({"shared_bytes": 50_000}, "may have 49152"),
    ({"grid": (133, 1, 1), "cooperative": True}, "132 CTAs are there at the same time"),
    ({"params": b"1234"}, "4 bytes of parameters"),
]


@pytest.mark.parametrize("change, said", REFUSED, ids=[said for _, said in REFUSED])
def test_launches_that_a_gpu_refuses(change, said):
    module = machine.parse(compile_for_emulation(PACK).ptx.read_text())
    (entry,) = module.entries.values()
    good = {"grid": (1, 1, 1), "block": (320, 1, 1), "cluster": (1, 1, 1), "shared_bytes": 0}
    good["params"] = bytes(entry.param_bytes)
    launch_config.check(Launch(entry.name, **good), entry, KernelLimits(), 132)
    launch_config.check(
        Launch(entry.name, **{**good, "grid": (132, 1, 1), "cooperative": True}), entry, KernelLimits(), 132
    )
    with pytest.raises(EmulationError, match=said):
        launch_config.check(Launch(entry.name, **{**good, **change}), entry, KernelLimits(), 132)
    if "may have" not in said and "cooperative" not in change:  # whatever host code allowed, as in a record
        with pytest.raises(EmulationError, match=said):
            machine.run_launches(module, [Launch(entry.name, **{**good, **change})], [], machine.Options())


def test_bare_entries_take_packed_parameters(seen):
    text = compile_for_emulation(PACK).ptx.read_text()
    with emulated("sm_100a") as gpu:
        module = machine.parse(text)
        (entry,) = module.entries.values()
        values = [bytes(param.size) for param in entry.params]
        x = torch.zeros(8, device="cuda")
        values[5:8] = [1.5, 2.0, -7]
        values[0] = x.data_ptr().to_bytes(32, "little")
        gpu.launch(text, entry.name, (2,), (320,), values, pdl=True, touches=[x])
        with pytest.raises(EmulationError, match="has 32 bytes, .* has 128"):
            values[0] = TensorMap(0, "f32", (8,), (), (8,), (1,), 0)
            gpu.launch(text, entry.name, (2,), (320,), values)
        with pytest.raises(EmulationError, match="takes 10 parameters, 1 given"):
            gpu.launch(text, entry.name, (2,), (320,), [x])
        with pytest.raises(EmulationError, match="has no entry nonsense"):
            gpu.launch(text, "nonsense", (2,), (320,), [x])
    ((_, launch, regions),) = seen
    assert launch.grid == (2, 1, 1) and launch.pdl
    assert struct.unpack("<ffi", b"".join(params(module, launch)[5:8])) == (1.5, 2.0, -7)
    assert [r.address for r in regions.values()] == [x.data_ptr()]


def test_records_run_in_another_place_with_the_same_memory(seen, tmp_path):
    with emulated("sm_100a", record_to=tmp_path):
        tensors = pack_inputs()
        sources = tensors[1].cpu()
        result = tsmla.mla_kv_pack_quantize_fp8(*tensors, enable_pdl=True)
    (path,) = tmp_path.glob("*.npz")
    module = machine.parse(path.with_suffix(".ptx").read_text())
    recorded = record.Record(path)
    with pytest.raises(MemoryError, match="cannot be had"):
        recorded.run(module, Options())
    del tensors, result
    _, outputs = recorded.run(module, Options())
    (_, first, before), (_, second, after) = seen
    assert first == second
    assert before == after
    assert set(outputs) == {"k_out", "v_out"} and outputs["k_out"].size == 5 * 3 * 192
    with np.load(path) as stored:
        assert stored["memory/k_pe"].tobytes() == sources.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "text, said",
    [
        ("nonsense", "not a launch record"),
        ('{"memory": {}}', "KeyError: 'launches'"),
        ('{"memory": {"x": {"address": 17592286048768, "bytes": 4, "fill": "ones"}}, "launches": []}', "known: stored"),
    ],
)
def test_records_that_cannot_be_read(tmp_path, text, said):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(record.RecordError, match=said):
        record.Record(path)


def test_regions_of_a_record_may_lie_side_by_side(tmp_path):
    first = 0x1000_2000_0200
    places = {"a": first, "b": first + 128, "c": first + 0x8000}
    memory = {
        name: {"address": address, "bytes": 100, "writable": name != "c", "fill": "zeros"}
        for name, address in places.items()
    }
    (path := tmp_path / "r.json").write_text(json.dumps({"memory": memory, "launches": []}))
    module = machine.parse(".version 9.0\n.target sm_100a\n.address_size 64\n")
    for _ in range(2):
        _, results = record.Record(path).run(module, Options())
        assert {name: bytes(content) for name, content in results.items()} == {"a": bytes(100), "b": bytes(100)}
