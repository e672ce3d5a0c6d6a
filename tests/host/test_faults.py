"""Files are damaged by the hundred: each is refused with a reason or gives what the sound one gives; no crash, no
silence. Faults are random; a failing test prints the seed that repeats them."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_variants import PACK, PREFILL, run_python
from faults import edited, struck
from tsmla.errors import CacheMiss
from tsmla.loading import image, jit, manifest, settings

from build_aot import link

LOAD = """
import pathlib, sys
from random import Random
from faults import edited, struck
from tsmla.loading import loader, manifest, resolve, toolchain
from tsmla.errors import TsmlaError
from tsmla.identity.arch import Arch

sound, scratch, what, seed, count = *map(pathlib.Path, sys.argv[1:3]), sys.argv[3], *map(int, sys.argv[4:])
record, = manifest.read_directory(sound).libraries
chance, described = Random(seed), (sound / "manifest.json").read_text()

def strike(directory):
    directory.mkdir()
    code = (sound / record.file).read_bytes()
    text, fault = described.encode(), "edit"
    if what == "manifest":
        if chance.random() < 0.7:
            text = edited(described, chance).encode()
        else:
            fault, text = struck(text, chance)
    else:
        fault, code = struck(code, chance)
    (directory / record.file).write_bytes(code)
    (directory / "manifest.json").write_bytes(text)
    return fault

def serve(directory):
    if what == "path":
        return loader.open_library(directory / record.file)
    toolchain.shipped_libraries = lambda: directory
    return resolve.shipped_library("pack", Arch.SM90A)

for number in range(count):
    directory = scratch / str(number)
    fault = strike(directory)
    print(number, fault, end=" ", flush=True)
    try:
        library = serve(directory)
    except TsmlaError as error:
        assert str(directory) in str(error), error
        print("refused", flush=True)
    else:
        same = library.manifest == record.manifest and all(
            library.function(kernel.variant, check_signature=True) for kernel in record.manifest.kernels)
        print("same" if same else f"CHANGED {library.manifest}", flush=True)
"""
"""Strike what lies in a directory of libraries, `count` times, and ask for its library each time."""


@pytest.fixture
def seed() -> int:
    found = random.SystemRandom().getrandbits(64)
    print("seed", found)
    return found


def outcomes(sound: Path, scratch: Path, what: str, seed: int, count: int) -> Counter[str]:
    """How often what came of it, in a process of its own: a fault that is not seen may end the process."""
    done = run_python(LOAD, sound, scratch, what, seed, count)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == count, (lines[-1:], done.stderr[-2000:])
    assert "CHANGED" not in done.stdout, [line for line in lines if "CHANGED" in line]
    return Counter(line.split()[2] for line in lines)


@pytest.mark.parametrize("what", ["shipped", "path"])
def test_a_struck_library_is_refused(pack_directory: Path, tmp_path: Path, what: str, seed: int) -> None:
    assert outcomes(pack_directory, tmp_path, what, seed, 300) == {"refused": 300}


def test_a_struck_directory_manifest_is_refused_or_says_the_same(
    pack_directory: Path, tmp_path: Path, seed: int
) -> None:
    found = outcomes(pack_directory, tmp_path, "manifest", seed, 400)
    assert found["refused"] > 200 and found["same"] == 400 - found["refused"]


def test_every_bit_of_what_the_loader_reads_first(pack_directory: Path, tmp_path: Path) -> None:
    """Header, section headers, digest and manifest, by path: nothing else knows what they were."""
    record = manifest.read_directory(pack_directory).libraries[0]
    sound = (pack_directory / record.file).read_bytes()
    struck_file = tmp_path / record.file
    digest = sound.index(image.read_image(pack_directory / record.file).manifest.source_digest.encode())
    places = [*range(64), *range(digest, digest + 16), *range(len(sound) - 21 * 64, len(sound), 3)]
    for at in places:
        struck_file.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        with pytest.raises((image.LibraryError, manifest.ManifestError)):
            image.read_image(struck_file)


def test_other_libraries_in_its_place(pack_directory: Path, make_library, tmp_path: Path) -> None:
    """Sound ones of ours, of which the path says nothing wrong, and foreign ones."""
    record = manifest.read_directory(pack_directory).libraries[0]
    (tmp_path / "objs").mkdir()
    shutil.copy(pack_directory / manifest.MANIFEST_FILE, tmp_path / "objs")
    place = tmp_path / "objs" / record.file
    for other in (
        make_library("other.so"),
        make_library("old.so", describe=False),
        make_library("imitation.so", listed=(PACK,)),
        link.runtime_directories()[1] / "libtvm_ffi.so",
    ):
        shutil.copy(other, place)
        with pytest.raises(manifest.ManifestError, match="but its manifest says"):
            image.read_image(place, record)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a cache that holds PACK and PREFILL, whose loader gives the code itself."""
    monkeypatch.setattr(jit, "_compile", lambda variant: f"code of {variant}".encode() * 100)
    monkeypatch.setattr(jit, "_load_object", lambda code, symbol: code)
    for variant in (PACK, PREFILL):
        jit.compile_now(variant)
    yield next(settings.cache_dir().rglob("*.o")).parent


def test_a_struck_cache_entry_is_a_miss_or_says_the_same(cached: Path, seed: int) -> None:
    sound, chance = jit.load_cached(PACK), random.Random(seed)
    found = Counter[str]()
    for _ in range(400):
        file = cached / f"{PACK}{chance.choice(['.o', '.json'])}"
        before = file.read_bytes()
        fault, changed = struck(before, chance)
        if file.suffix == ".json" and chance.random() < 0.6:
            fault, changed = "edit", edited(before.decode(), chance).encode()
        file.write_bytes(changed)
        try:
            assert jit.load_cached(PACK) == sound, fault
            assert file.suffix == ".json", fault
            found["same"] += 1
        except CacheMiss:
            found["missed"] += 1
        file.write_bytes(before)
    assert found["missed"] > 200 and jit.load_cached(PACK) == sound


def test_an_entry_in_anothers_place_is_a_miss(cached: Path) -> None:
    """Whole and with its own record, so that only what the record is of can tell."""
    for suffix in (".o", ".json"):
        shutil.copy(cached / f"{PREFILL}{suffix}", cached / f"{PACK}{suffix}")
    with pytest.raises(CacheMiss, match=f"it is of {PREFILL}"):
        jit.load_cached(PACK)


def test_an_entry_of_other_sources_is_a_miss(cached: Path) -> None:
    record = cached / f"{PACK}.json"
    said = json.loads(record.read_text())
    said["key"]["sources"] = "0" * 64
    record.write_text(json.dumps(said))
    with pytest.raises(CacheMiss, match="it was made from other sources or by another compiler"):
        jit.load_cached(PACK)
