"""The decoder that keeps host code within the x86-64 baseline. Encodings are as GNU as gives them."""

from __future__ import annotations

import pytest

from build_aot import x86

BASELINE = {
    "push %rbp": "55",
    "mov %rsp,%rbp": "48 89 e5",
    "movabs $0x1122334455667788,%rax": "48 b8 88 77 66 55 44 33 22 11",
    "movw $0x1234,(%rax)": "66 c7 00 34 12",
    "mov 0x10(%rip),%rax": "48 8b 05 10 00 00 00",
    "lea 0x12345678(%rax,%rbx,4),%rcx": "48 8d 8c 98 78 56 34 12",
    "mov 0x0(,%rax,8),%rcx": "48 8b 0c c5 00 00 00 00",
    "testb $0x1,(%rdi)": "f6 07 01",
    "test $0x12345678,%ecx": "f7 c1 78 56 34 12",
    "neg %rax": "48 f7 d8",
    "call": "e8 00 00 00 00",
    "jne (near)": "0f 85 00 01 00 00",
    "movups (%rsi),%xmm0": "0f 10 06",
    "movsd %xmm0,(%rax)": "f2 0f 11 00",
    "cvtsi2sd %rax,%xmm0": "f2 48 0f 2a c0",
    "pshufd $0x44,%xmm0,%xmm1": "66 0f 70 c8 44",
    "cmove %rax,%rbx": "48 0f 44 d8",
    "rep bsf (tzcnt)": "f3 0f bc c0",
    "lock cmpxchg8b (%rdi)": "f0 0f c7 0f",
    "endbr64": "f3 0f 1e fa",
    "mfence": "0f ae f0",
    "nopw 0x0(%rax,%rax,1)": "66 2e 0f 1f 84 00 00 00 00 00",
    "shufps $0x4e,%xmm0,%xmm0": "0f c6 c0 4e",
    "ret": "c3",
}
BEYOND = {
    "vmovaps %ymm0,%ymm1": "c5 fc 28 c8",
    "vfmadd213ss": "c4 e2 71 a9 c2",
    "vmovdqu64 %zmm0,(%rdi)": "62 f1 fe 48 7f 07",
    "bzhi %rax,%rbx,%rcx": "c4 e2 f8 f5 cb",
    "popcnt %eax,%eax": "f3 0f b8 c0",
    "lzcnt %eax,%eax": "f3 0f bd c0",
    "movbe (%rax),%ecx": "0f 38 f0 08",
    "pshufb %xmm0,%xmm1": "66 0f 38 00 c8",
    "roundsd $0x9,%xmm0,%xmm0": "66 0f 3a 0b c0 09",
    "haddps %xmm0,%xmm0": "f2 0f 7c c0",
    "movddup %xmm0,%xmm0": "f2 0f 12 c0",
    "lddqu (%rax),%xmm0": "f2 0f f0 00",
    "cmpxchg16b (%rdi)": "48 0f c7 0f",
    "rdrand %eax": "0f c7 f0",
    "xsave (%rdi)": "0f ae 27",
    "xop": "8f e8 78 c0 c0 01",
}


@pytest.mark.parametrize("name", BASELINE)
def test_baseline_instructions_are_measured_exactly(name):
    code = bytes.fromhex(BASELINE[name])
    assert list(x86.beyond_baseline(code * 3)) == []
    later = bytes.fromhex(BEYOND["vmovaps %ymm0,%ymm1"])
    assert f"at offset {2 * len(code):#x}:" in next(x86.beyond_baseline(code * 2 + later))


@pytest.mark.parametrize("name", BEYOND)
def test_later_instructions_are_found(name):
    prefix = bytes.fromhex("".join(BASELINE.values()))
    found = list(x86.beyond_baseline(prefix + bytes.fromhex(BEYOND[name]) + b"\xc3"))
    assert len(found) == 1 and f"at offset {len(prefix):#x}:" in found[0]


def test_code_that_ends_inside_an_instruction_is_reported():
    assert list(x86.beyond_baseline(bytes.fromhex("c3 48 b8 00"))) == ["the last instruction is cut off"]
