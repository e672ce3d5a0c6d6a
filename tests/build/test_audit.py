"""The audit passes what the build made, and catches each thing that it exists to catch."""

from __future__ import annotations

import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.variant import DecodeVariant, Dtype, PrefillVariant
from tsmla.loading import manifest
from tsmla.loading.elf import MAGIC
from tsmla.loading.image import DIGEST_SECTION, sealed

from build_aot import cubin, descriptors, link, matrix
from build_aot.audit import audit_directory, audit_library, gpu_problems, instructions_meant, loading_process
from build_aot.build import STORE
from build_aot.errors import AuditError

STORE_LOCAL = 0x387
"""Low bits of the SASS instruction that writes local memory."""


@pytest.fixture
def library(own_build):
    (path,) = own_build.glob("*.so")
    return path


@pytest.fixture
def described(own_build):
    (record,) = manifest.read_directory(own_build).libraries
    return record.manifest


def relink(library, described, objects=None):
    """Link the library again from kept objects, so that it says what `described` says."""
    store = library.parent / STORE
    objects = objects or [store / f"{kernel.variant}.o" for kernel in described.kernels]
    link.link(objects, library, described.host, described.to_json())


def with_first_kernel(described, **changes):
    first, *rest = described.kernels
    return described._replace(kernels=(first._replace(**changes), *rest))


@pytest.fixture(scope="module")
def loading():
    """One process for all of these libraries, whose paths differ."""
    with loading_process() as process:
        yield process


@pytest.fixture
def problems(loading):
    def found(library, expected) -> str:
        with pytest.raises(AuditError) as caught:
            audit_library(library, expected, loading)
        return "\n".join(caught.value.problems)

    return found


def test_what_the_build_made_passes(own_build, library, described, small_variants, loading):
    assert audit_library(library, small_variants, loading) == described
    audit_directory(own_build, small_variants)


def test_relinking_unchanged_gives_the_same_bytes(library, described):
    before = library.read_bytes()
    relink(library, described)
    assert library.read_bytes() == before


def test_missing_symbol(library, described, small_variants, problems):
    store = library.parent / STORE
    relink(library, described, [store / f"{variant}.o" for variant in small_variants[:-1]])
    assert f"does not export __tvm_ffi_{small_variants[-1]}" in problems(library, small_variants)


def test_symbol_that_the_matrix_does_not_list(library, small_variants, problems):
    assert f"exports __tvm_ffi_{small_variants[0]}" in problems(library, small_variants[1:])


def test_manifest_that_lacks_a_kernel(library, described, small_variants, problems):
    objects = [library.parent / STORE / f"{variant}.o" for variant in small_variants]
    relink(library, described._replace(kernels=described.kernels[1:]), objects)
    assert f"manifest lacks {small_variants[0]}" in problems(library, small_variants)


def test_code_for_another_architecture(library, small_variants, problems):
    data = bytearray(library.read_bytes())
    at = data.index(MAGIC, 1)
    (flags,) = struct.unpack_from("<I", data, at + 48)
    assert flags & 0xFF == 90
    struct.pack_into("<I", data, at + 48, flags & ~0xFF | 80)
    library.write_bytes(sealed(bytes(data)))
    assert f"GPU code of {small_variants[0]} is for sm_80a" in problems(library, small_variants)


def test_spilled_registers(library, small_variants, problems):
    data = bytearray(library.read_bytes())
    image = cubin.images(library)[0]
    (code,) = [section.data for section in image.sections if section.name.startswith(".text.")]
    at = data.index(code)
    (word,) = struct.unpack_from("<H", data, at)
    struct.pack_into("<H", data, at, word & ~0xFFF | STORE_LOCAL)
    library.write_bytes(sealed(bytes(data)))
    found = problems(library, small_variants)
    assert f"{small_variants[0]} has spill_stores = 1; it has to be 0" in found
    assert "uses spill_stores 1 (manifest: 0)" in found


@pytest.mark.parametrize(
    ("low", "high", "counted"),
    [
        (0x79F0, 0, {"wgmma"}),
        (0x7DF3, 0, {"wgmma"}),
        (0x79C5, 1 << 16, {"wgmma_waits"}),
        (0x75EA, 0, {"tcgen05_mma"}),
        (0x79EA, 1 << 21, {"tcgen05_mma", "tcgen05_mma_2cta"}),
        (0x79EE, 1 << 21, {"tcgen05_ld"}),
        (0x79ED, 0, {"tcgen05_st"}),
        (0x75B4, 1 << 21, {"tma_loads"}),
        (0x73B5, 0, {"tma_stores"}),
        (0x79C8, 0, {"setmaxnreg"}),
    ],
)
def test_instructions_that_are_not_meant(library, small_variants, low, high, counted, problems):
    """Each is put in the place of a pack kernel's first instruction, which uses none of them."""
    data = bytearray(library.read_bytes())
    image = cubin.images(library)[0]
    (code,) = [section.data for section in image.sections if section.name.startswith(".text.")]
    assert not any(cubin.resources(image)[name] for name in counted)
    struct.pack_into("<QQ", data, data.index(code), low, high)
    library.write_bytes(sealed(bytes(data)))
    used = cubin.resources(cubin.images(library)[0])
    kinds = ("wgmma", "tcgen05", "tma", "setmaxnreg")
    assert {name for name in used if used[name] and name.partition("_")[0] in kinds} == counted
    found = problems(library, small_variants)
    for name in counted & set(instructions_meant(small_variants[0])):
        assert f"{small_variants[0]} has {name} = 1; it has to be 0" in found


def test_instructions_that_attention_is_meant_to_have():
    meant = {
        arch: instructions_meant(PrefillVariant(arch, Dtype.BF16, Dtype.BF16, 192, 128, True, True)) for arch in Arch
    }
    assert meant[Arch.SM90A]["wgmma"] and not meant[Arch.SM90A]["tcgen05_mma"]
    for arch in (Arch.SM100A, Arch.SM103A):
        wanted = {"wgmma": False, "tcgen05_mma": True, "tcgen05_mma_2cta": False, "setmaxnreg": True}
        assert meant[arch] == wanted
        wide = PrefillVariant(arch, Dtype.BF16, Dtype.BF16, 256, 256, True, True)
        assert instructions_meant(wide) == {**wanted, "tcgen05_mma_2cta": True}
    decodes = {arch: instructions_meant(DecodeVariant(arch, Dtype.BF16, Dtype.BF16, True)) for arch in Arch}
    assert [decodes[arch]["setmaxnreg"] for arch in (Arch.SM90A, Arch.SM100A)] == [True, False]
    gathers = instructions_meant(DecodeVariant(Arch.SM100A, Dtype.BF16, Dtype.BF16, True, gathers=True))
    assert gathers["setmaxnreg"] and gathers["tcgen05_mma"]


def test_attention_without_tensor_instructions(library, described):
    """A manifest that calls a pack kernel by the name of a prefill."""
    prefill = PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, True, True)
    found = "\n".join(gpu_problems(library, with_first_kernel(described, variant=prefill)))
    assert f"{prefill} has wgmma = 0; it has to be above 0" in found
    assert f"{prefill} has setmaxnreg = 0; it has to be above 0" in found


def test_registers_at_launch_that_roles_do_not_share(library, described):
    """A pack kernel of 64 registers, with one setmaxnreg in the place of its first instruction."""
    data = bytearray(library.read_bytes())
    (code,) = [s.data for s in cubin.images(library)[0].sections if s.name.startswith(".text.")]
    struct.pack_into("<Q", data, data.index(code), 0x79C8)
    library.write_bytes(sealed(bytes(data)))
    used = described.kernels[0].resources
    found = "\n".join(gpu_problems(library, described))
    assert f"starts with {used['registers']} registers; its roles share {65536 // used['threads'] // 8 * 8} a" in found


@pytest.mark.parametrize(("waits", "serialised"), [(1, False), (2, True)])
def test_products_that_ptxas_has_serialised(library, described, waits, serialised):
    """A pack kernel that begins with two products and waits for both, or for each."""
    data = bytearray(library.read_bytes())
    (code,) = [s.data for s in cubin.images(library)[0].sections if s.name.startswith(".text.")]
    instructions = [(0x79F0, 0)] * 2 + [(0x79C5, 1 << 16)] * waits
    begin = data.index(code)
    for number, words in enumerate(instructions):
        struct.pack_into("<QQ", data, begin + 16 * number, *words)
    library.write_bytes(sealed(bytes(data)))
    found = "\n".join(gpu_problems(library, described))
    assert ("waits for each of its 2 wgmma: ptxas has serialised them" in found) == serialised


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("MMPP", False),  # half of them
        ("MPMPP", True),
        ("PMPMP", True),
        ("MPPMP", True),
        ("PPPMMMM", False),  # behind the last
        ("M" + 24 * "." + "P", False),  # far away
        ("M" + 23 * "." + "P", True),
    ],
)
def test_descriptors_in_vector_registers(library, described, code, found):
    """A pack kernel that begins with products (P), and moves to uniform registers (M)."""
    data = bytearray(library.read_bytes())
    (text,) = [s.data for s in cubin.images(library)[0].sections if s.name.startswith(".text.")]
    begin = data.index(text)
    data[begin : begin + len(text)] = instructions(code.ljust(len(text) // 16, "."))
    library.write_bytes(sealed(bytes(data)))
    said = "\n".join(gpu_problems(library, described))
    moved = "computes descriptors of" in said
    assert moved == found


def test_products_are_counted_for_each_kernel():
    """Two kernels lie in one image; the larger is fine, and together they would be."""
    sections = [SimpleNamespace(name=f".text.{code}", data=instructions(code)) for code in ("PPPPP", "MPMPP")]
    image = SimpleNamespace(sections=[SimpleNamespace(name=".data", data=instructions("MP")), *sections])
    assert descriptors.products(image) == [(5, 0), (3, 2)]


def instructions(code: str) -> bytes:
    """Products (P), moves to uniform registers (M), and others."""
    words = {"P": 0x79F0, "M": 0x72CA, ".": 0x7919}  # HGMMA, R2UR, S2R
    return b"".join(struct.pack("<QQ", words[letter], 0) for letter in code)


@pytest.mark.parametrize("resource", ["registers", "static_shared_bytes", "threads"])
def test_manifest_that_misstates_a_resource(library, described, small_variants, resource, problems):
    used = described.kernels[0].resources
    relink(library, with_first_kernel(described, resources={**used, resource: used[resource] + 1}))
    assert f"uses {resource} {used[resource]} (manifest: {used[resource] + 1})" in problems(library, small_variants)


def test_manifest_that_misstates_a_signature(library, described, small_variants, problems):
    relink(library, with_first_kernel(described, signature="Expects 1 parameter"))
    assert "but the manifest says 'Expects 1 parameter'" in problems(library, small_variants)


@pytest.mark.parametrize(
    ("option", "body"),
    [
        ("-mavx2", "for (int i = 0; i < 64; i++) a[i] *= b[i];"),
        ("-mavx512f", "for (int i = 0; i < 64; i++) a[i] *= b[i];"),
        ("-mbmi2", "a[0] = *(unsigned *)b << (*(unsigned *)a & 31);"),
        ("-mpopcnt", "a[0] = __builtin_popcount(*(unsigned *)b);"),
    ],
)
def test_host_code_beyond_the_baseline(library, described, small_variants, option, body, tmp_path, loading, problems):
    source, obj = tmp_path / "fast.c", tmp_path / "fast.o"
    source.write_text(
        f"__attribute__((used, retain)) static void fast(float *restrict a, float *restrict b) {{ {body} }}"
    )
    target = ["-target", link.ZIG_TARGETS[described.host], "-O3", "-fPIC"]
    command = [sys.executable, "-m", "ziglang", "cc", *target, "-c", str(source), "-o", str(obj)]
    objects = [library.parent / STORE / f"{variant}.o" for variant in small_variants]
    subprocess.run([*command, "-mcpu=baseline"], check=True)
    relink(library, described, [*objects, obj])
    audit_library(library, small_variants, loading)
    subprocess.run([*command, option], check=True)
    relink(library, described, [*objects, obj])
    assert "host code in .text: an" in problems(library, small_variants)


def test_library_that_needs_another_library(library, small_variants, problems):
    library.write_bytes(library.read_bytes().replace(b"libtvm_ffi.so\0", b"libtvm_fff.so\0"))
    assert "it needs libcute_dsl_runtime.so, libtvm_fff.so" in problems(library, small_variants)


def test_truncated_library(library, small_variants, problems):
    library.write_bytes(library.read_bytes()[:-100])
    assert "it is not a library: truncated" in problems(library, small_variants)


def test_library_without_its_digest(library, small_variants, described, problems):
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    assert "is damaged: its bytes hash to" in problems(library, small_variants)
    link.link([library.parent / STORE / f"{v}.o" for v in small_variants], library, described.host)
    assert f"it lacks the sections .tsmla.manifest and {DIGEST_SECTION}" in problems(library, small_variants)


def directory_problems(directory, expected):
    with pytest.raises(AuditError) as caught:
        audit_directory(directory, expected)
    return "\n".join(caught.value.problems)


def test_library_changed_after_it_was_recorded(own_build, library, small_variants):
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    assert "the file changed after it was built" in directory_problems(own_build, small_variants)


def test_library_that_is_not_in_the_manifest_or_not_there(own_build, library, small_variants):
    (own_build / "tsmla_extra.so").write_bytes(library.read_bytes())
    library.unlink()
    found = directory_problems(own_build, small_variants)
    assert "tsmla_extra.so lies there but is not in the manifest" in found
    assert f"{library.name} is in the manifest but cannot be read" in found


def test_directory_that_lacks_a_library_of_the_matrix(own_build):
    found = directory_problems(own_build, matrix.shipped())
    assert "tsmla_prefill_sm_90a_x86_64.so should be there and is not in the manifest" in found


def test_command_line(own_build, library):
    command = [sys.executable, "-m", "build_aot.audit", str(own_build), "--arch", "sm_90a", "--family", "pack"]
    assert subprocess.run(command, capture_output=True).returncode == 0
    library.unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and library.name in done.stderr
