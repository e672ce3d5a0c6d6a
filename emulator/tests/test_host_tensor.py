"""Emulated tensors: they look like CUDA's, live in guarded and poisoned memory, and refuse what a GPU refuses."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc

import pytest
import torch
import tvm_ffi
from tsmla_emulator.run.host import memory
from tsmla_emulator.run.host.capture import extents
from tsmla_emulator.run.host.tensor import EmulatedDevice, EmulatedTensor, in_plain_tensors, to_device, unwritten


@pytest.fixture(autouse=True)
def device():
    with EmulatedDevice():
        yield


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4, device="cuda"),
        lambda: torch.randn(3, 4, device=torch.device("cuda:0"), dtype=torch.bfloat16),
        lambda: torch.tensor([1, 2], dtype=torch.int32, device="cuda"),
        lambda: torch.ones(3).cuda(),
        lambda: torch.ones(3).to("cuda", torch.float16),
        lambda: torch.ones(3, device="cuda").new_empty((2, 2), dtype=torch.float8_e4m3fn),
        lambda: torch.empty_like(torch.ones(3, device="cuda")),
        lambda: torch.cat([torch.ones(3, device="cuda")] * 2)[1:].double(),
        lambda: torch.zeros(3, device="cuda").to(torch.ones(1, device="cuda").device),
        lambda: torch.empty(0, device="cuda"),
    ],
)
def test_results_are_on_the_device(make):
    tensor = make()
    assert type(tensor) is EmulatedTensor
    assert tensor.is_cuda and not tensor.is_cpu
    assert tensor.device == torch.device("cuda", 0)
    assert memory.block_at(tensor.untyped_storage().data_ptr())


def test_other_tensors_are_left_alone():
    assert type(torch.zeros(3)) is torch.Tensor
    assert type(torch.zeros(3, device="cuda").cpu()) is torch.Tensor
    assert type(torch.zeros(3, device="cuda").to("cpu")) is torch.Tensor


def test_cpu_copies_share_nothing():
    tensor = torch.zeros(3, device="cuda")
    copy = tensor.cpu()
    tensor += 1
    assert copy.tolist() == [0, 0, 0] and tensor.tolist() == [1, 1, 1]


def test_numbers_can_be_formatted():
    assert f"{torch.ones(2, device='cuda').sum():.2f}" == "2.00"


def test_deep_copies_are_on_the_device():
    tensor = torch.ones(3, device="cuda")
    copied = copy.deepcopy(tensor)
    tensor.zero_()
    assert copied.is_cuda and copied.tolist() == [1, 1, 1]


def test_views_share_memory_and_strides():
    base = torch.zeros(4, 6, 8, dtype=torch.bfloat16, device="cuda")
    view = base[1:, ::2, 4:]
    assert view.stride() == (48, 16, 1)
    assert view.data_ptr() - base.data_ptr() == (48 + 4) * 2
    view.fill_(1)
    assert base.sum().item() == 3 * 3 * 4
    (covered,) = extents((view, 3, None), ["x", "y", "z"], lambda name: name == "x")
    assert covered == memory.Extent(view.data_ptr(), base.data_ptr() + (3 * 48 + 4 * 8 + 8) * 2, "x", True)


def test_uninitialised_memory_is_poison():
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.empty(7, 3, dtype=dtype, device="cuda")
        assert tensor.float().isnan().all() and unwritten(tensor) == 21
    tensor[0] = 1
    assert unwritten(tensor) == 18
    assert unwritten(torch.zeros(3, device="cuda")) == 0


def test_addresses_are_aligned_as_cuda_aligns_and_no_more():
    addresses = [torch.empty(5, device="cuda").data_ptr() for _ in range(4)]
    assert all(address % 512 == 0 and address % 1024 for address in addresses)


@pytest.mark.parametrize("offset, said", [(64, "byte 0 after"), (-3, "byte 3 before"), (64 + 4000, "byte 4000 after")])
def test_guard_zones(offset, said):
    tensor = torch.zeros(16, device="cuda")
    memory.check_guards()
    place = ctypes.c_ubyte.from_address(tensor.data_ptr() + offset)
    before, place.value = place.value, place.value ^ 1
    with pytest.raises(memory.GuardError, match=f"{said} allocation .*64 bytes at {tensor.data_ptr():#x}"):
        memory.check_guards()
    place.value = before
    memory.check_guards()


def test_memory_is_freed_and_its_address_not_used_again():
    tensor = torch.zeros(1000, device="cuda")
    address, view = tensor.data_ptr(), tensor[3:]
    del tensor
    gc.collect()
    assert memory.block_at(address), "a view keeps the memory alive"
    del view
    gc.collect()
    assert memory.block_at(address) is None
    assert torch.zeros(1000, device="cuda").data_ptr() > address


def test_an_occupied_address_is_refused():
    tensor = torch.zeros(3, device="cuda")
    with pytest.raises(MemoryError, match="cannot be had: File exists"):
        memory.allocate(12, tensor.data_ptr())


def test_dlpack_says_cuda():
    tensor = torch.arange(6, dtype=torch.int32, device="cuda").view(2, 3)
    assert tensor.__dlpack_device__() == (2, 0)
    for shown in (tvm_ffi.from_dlpack(tensor), tvm_ffi.convert(tensor)):
        assert str(shown.device) == "cuda:0" and tuple(shown.shape) == (2, 3) and str(shown.dtype) == "int32"
        assert shown.data_ptr() == tensor.data_ptr()


def test_what_a_gpu_refuses_is_refused():
    tensor = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="cpu\\(\\) first"):
        tensor.numpy()
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        tensor + torch.ones(3)
    assert (tensor + torch.tensor(1.0)).tolist() == [2, 2, 2], "a number in a tensor may come from the CPU"
    tensor.copy_(torch.zeros(3))
    assert tensor.tolist() == [0, 0, 0]


def test_transposed_and_expanded_tensors_move():
    assert to_device(torch.arange(6).view(2, 3).T).stride() == (1, 3)
    expanded = to_device(torch.ones(1, 3).expand(4, 3))
    assert expanded.stride() == (3, 1) and expanded.sum().item() == 12


def test_addresses_from_another_beginning():
    usual = torch.zeros(5, device="cuda").data_ptr()
    with memory.addresses_from(0x202000000):
        one, other = (torch.zeros(5, device="cuda") for _ in range(2))
    assert 0x202000000 < one.data_ptr() < other.data_ptr() < 0x203000000
    last = other.data_ptr()
    del one, other
    gc.collect()
    with memory.addresses_from(0x202000000):
        assert torch.zeros(5, device="cuda").data_ptr() > last, "an address is not used again"
    assert torch.zeros(5, device="cuda").data_ptr() > usual


def test_a_function_of_numbers_gets_plain_tensors_and_gives_emulated_ones():
    @dataclasses.dataclass
    class Given:
        rows: list[torch.Tensor]

    def total(given, factor):
        assert all(type(x) is torch.Tensor for x in given.rows)
        return sum(given.rows) * factor, len(given.rows)

    rows = [torch.ones(3, device="cuda"), torch.ones(3)]
    made, count = in_plain_tensors(total)(Given(rows), 2)
    assert made.is_cuda and made.tolist() == [4.0] * 3 and count == 2 and rows[0].is_cuda
    assert not in_plain_tensors(total)(Given(rows[1:]), 2)[0].is_cuda


def test_memory_that_was_freed_serves_again_at_new_addresses_and_holds_poison():
    tensor = torch.zeros(1000, device="cuda")
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    again = torch.empty(1000, device="cuda")
    assert again.data_ptr() > address and unwritten(again) == 1000
    memory.check_guards()
    block, _ = memory.allocate(4000, address)
    assert block.content() == bytes([memory.POISON]) * 4000
