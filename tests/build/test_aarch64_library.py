"""A library for aarch64 hosts, made on x86-64 of what was compiled for that."""

from __future__ import annotations

import platform
import struct

import pytest
from building import SMALL, build_aot
from tsmla.errors import LibraryError
from tsmla.loading import elf, loader
from tsmla.loading.manifest import read_directory

from build_aot import link
from build_aot.audit import audit_library, loading_process
from build_aot.errors import AuditError, BuildError

HOST = "aarch64"
E_MACHINE = 18
"""Offset in an ELF header."""
elsewhere = pytest.mark.skipif(platform.machine() == HOST, reason="this machine's own libraries are for aarch64")


@pytest.fixture
def library(own_build):
    """A library of the small build, whose kernels are not compiled again."""
    ran = build_aot("--arch", SMALL["arch"], "--family", SMALL["family"], "--out", own_build, "--host", HOST)
    assert ran.status == 0 and " 0 compiled" in ran.output, ran.output
    (record,) = read_directory(own_build).libraries
    assert record.manifest.host == HOST and record.file.endswith("_aarch64.so")
    return own_build / record.file


def audited(library, variants, host):
    with loading_process() as loading:
        return audit_library(library, variants, loading, host)


@elsewhere
def test_it_is_what_was_asked_for_and_for_aarch64_only(library, small_variants):
    image = elf.Elf(library.read_bytes())
    assert struct.unpack_from("<H", library.read_bytes(), E_MACHINE) == (183,)  # EM_AARCH64
    assert sorted(image.dynamic_strings(elf.DT_NEEDED)) == sorted(link.NEEDED)
    assert all(alignment % (1 << 16) == 0 for alignment in image.alignments)
    manifest = audited(library, small_variants, HOST)
    assert [kernel.variant for kernel in manifest.kernels] == list(small_variants)
    with pytest.raises(AuditError, match="its code is for aarch64, not for x86_64"):
        audited(library, small_variants, "x86_64")
    with pytest.raises(LibraryError, match=f"is for aarch64 hosts; this one is {platform.machine()}"):
        loader.open_library(library)


@elsewhere
def test_a_header_of_another_machine_is_refused(library, small_variants):
    data = bytearray(library.read_bytes())
    struct.pack_into("<H", data, E_MACHINE, 62)  # EM_X86_64
    library.write_bytes(data)
    with pytest.raises(AuditError, match="its code is for x86_64, not for aarch64"):
        audited(library, small_variants, HOST)


@elsewhere
def test_an_object_of_this_machine_is_not_linked(small_build, small_variants, tmp_path):
    objects = [small_build[0] / ".compiled" / f"{variant}.o" for variant in small_variants]
    with pytest.raises(BuildError):
        link.link(objects, tmp_path / "mixed.so", HOST)


@elsewhere
def test_damaged_ir_is_reported_and_then_compiled_again(own_build, small_variants):
    chosen = ("--arch", SMALL["arch"], "--family", SMALL["family"], "--out", own_build, "--host", HOST)
    kept = own_build / ".compiled" / f"{small_variants[0]}.ll.gz"
    kept.write_bytes(kept.read_bytes()[:-9])
    ran = build_aot(*chosen)
    assert ran.status == 1 and "was damaged" in ran.output and "run the build again" in ran.output, ran.output
    ran = build_aot(*chosen)
    assert ran.status == 0 and " 1 compiled" in ran.output, ran.output
