"""What builds share through a directory, what decides whether a result fits, and what is not believed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
import zipfile
from pathlib import Path

import build_wheel
import pytest
from building import SMALL, build_aot, copy_of_the_project
from example_variants import run_python
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.variant import DecodeVariant, Dtype, PackVariant, PrefillVariant
from tsmla.loading.manifest import MANIFEST_FILE, read_directory

from build_aot import sources
from build_aot.build import store_of
from build_aot.cache import KEPT, UNUSED_DAYS, Cache
from build_aot.compile import ResultStore

OPTIONS = ("--arch", SMALL["arch"], "--family", SMALL["family"], "--jobs", "2", "--keep-ptx")
KERNELS = {
    "tsmla_kernels.pack.kernel": PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128),
    "tsmla_kernels.sm90.prefill.kernel": PrefillVariant(
        Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, causal=True, lse=False
    ),
    "tsmla_kernels.sm100.decode.kernel": DecodeVariant(Arch.SM100A, Dtype.BF16, Dtype.BF16, lse=False),
}


@pytest.fixture
def store(own_build) -> ResultStore:
    """Results of the small build."""
    return store_of(own_build)


@pytest.fixture
def empty(store, tmp_path) -> ResultStore:
    """A store of the same key and sources, of another build that has compiled nothing."""
    (tmp_path / "empty").mkdir()
    return ResultStore(tmp_path / "empty", store.key, store.sources)


@pytest.fixture
def filled(store, small_variants, tmp_path) -> Cache:
    cache = Cache(tmp_path / "cache" / "tsmla")
    for variant in small_variants:
        cache.keep(variant, store)
    return cache


def entries(cache: Cache) -> list[Path]:
    return sorted(cache.directory.iterdir())


def test_a_build_from_nothing_takes_everything_and_gives_the_same_bytes(filled, own_build, small_variants, tmp_path):
    project, out = copy_of_the_project(tmp_path / "project"), tmp_path / "fresh"
    ran = build_aot(*OPTIONS, "--out", out, "--cache", filled.directory, project=project)
    assert ran.status == 0, ran.output
    count = len(small_variants)
    assert f"{count} of {count} variants come from the build cache {filled.directory}" in ran.output
    assert f"0 compiled, {count} reused" in ran.output
    (record,) = read_directory(own_build).libraries
    for name in (record.file, MANIFEST_FILE, *(f"ptx/{kernel.variant}.ptx" for kernel in record.manifest.kernels)):
        assert (out / name).read_bytes() == (own_build / name).read_bytes(), name


def test_a_change_that_no_kernel_of_it_sees_compiles_nothing(own_build, small_variants, tmp_path):
    """The library is linked anew: it says which sources it is of."""
    project, (before,) = copy_of_the_project(tmp_path / "project"), read_directory(own_build).libraries
    with open(project / "kernels" / "tsmla_kernels" / "sm100" / "decode" / "kernel.py", "a") as stream:
        stream.write("# changed\n")
    ran = build_aot(*OPTIONS, "--out", own_build, project=project)
    assert ran.status == 0 and f"0 compiled, {len(small_variants)} reused" in ran.output and "audited" in ran.output
    (after,) = read_directory(own_build).libraries
    assert after.manifest.kernels == before.manifest.kernels
    assert after.manifest.source_digest != before.manifest.source_digest


@pytest.mark.parametrize("kernel", KERNELS)
def test_sources_behind_a_kernel(kernel):
    """Its own folder, what every variant needs, and no other kernel's."""
    behind = sources.behind(kernel)
    own = "/".join(kernel.split(".")[:-1])
    assert behind <= sources.hashes().keys()
    shared = {"tsmla_kernels/registry.py", "tsmla_kernels/entry.py"}
    assert behind >= {"tsmla/identity/variant.py", "tsmla/identity/plan.py"} | shared
    assert behind >= {f"{own}/kernel.py", f"{own}/__init__.py"} & sources.hashes().keys()
    kernels = {name for name in sources.hashes() if name.endswith("/kernel.py")}
    assert len(kernels) == 7 and behind & kernels == {f"{own}/kernel.py"}


@pytest.mark.parametrize(("kernel", "variant"), KERNELS.items(), ids=list(KERNELS))
def test_sources_behind_a_kernel_are_all_that_its_recipe_imports(kernel, variant):
    script = (
        "import sys; from build_aot import matrix, sources; from tsmla_kernels.registry import recipe\n"
        "kernel, symbol = sys.argv[1:]\n"
        "(variant,) = (variant for variant in matrix.shipped() if variant.symbol() == symbol)\n"
        "assert type(recipe(variant).entry).__module__ == kernel\n"
        "print(sorted(sources.names_of(sources.loaded()) - sources.behind(kernel)))"
    )
    done = run_python(script, kernel, variant.symbol())
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_a_source_that_is_not_listed_fails_the_build(tmp_path):
    """A kernel that imports by a name which cannot be read from its text."""
    project = copy_of_the_project(tmp_path / "project")
    kernel = project / "kernels" / "tsmla_kernels" / "pack" / "kernel.py"
    hidden = "\nimport importlib\nimportlib.import_module('tsmla_kernels.parts.' + 'seqlen')\n"
    kernel.write_text(kernel.read_text() + hidden)
    ran = build_aot(*OPTIONS, "--jobs", 1, "--out", tmp_path / "objs", project=project)
    assert ran.status == 1 and "is decided by tsmla_kernels/parts/seqlen.py" in ran.output, ran.output


def test_results_of_another_key_or_other_sources_are_left(filled, empty, small_variants):
    variant = small_variants[0]
    assert not filled.fetch(variant, ResultStore(empty.directory, "0" * 64, empty.sources), True)
    other = empty.sources | {"tsmla_kernels/pack/kernel.py": "0" * 64}
    assert not filled.fetch(variant, ResultStore(empty.directory, empty.key, other), True)
    unseen = empty.sources | {"tsmla_kernels/sm90/decode/row64/kernel.py": "0" * 64}
    assert filled.fetch(variant, ResultStore(empty.directory, empty.key, unseen), True)


def test_an_entry_without_ptx_serves_only_who_needs_none(store, empty, small_variants, tmp_path):
    variant, cache = small_variants[0], Cache(tmp_path / "cache")
    store.ptx(variant).unlink()
    cache.keep(variant, store)
    assert not cache.fetch(variant, empty, True)
    assert cache.fetch(variant, empty, False)


@pytest.mark.parametrize("damage", ["cut", "emptied", "object", "description", "directory", "link"])
def test_a_damaged_entry_is_a_miss(filled, empty, small_variants, damage, tmp_path):
    variant, (entry, *_) = small_variants[0], entries(filled)
    if damage in ("cut", "emptied"):
        entry.write_bytes(entry.read_bytes()[:-30] if damage == "cut" else b"")
    elif damage in ("object", "description"):
        with zipfile.ZipFile(entry) as opened:
            files = {name: opened.read(name) for name in opened.namelist()}
        name = "result.o" if damage == "object" else "result.json"
        files[name] = files[name][:-1] + b"x" if damage == "object" else json.dumps([1]).encode()
        with zipfile.ZipFile(entry, "w") as opened:
            for name, data in files.items():
                opened.writestr(name, data)
    else:
        moved = entry.rename(tmp_path / "moved.zip")
        entry.mkdir() if damage == "directory" else entry.symlink_to(moved)
    assert not filled.fetch(variant, empty, True)
    assert empty.find(variant) is None


def test_what_others_could_have_put_there_is_not_used(filled, empty, small_variants):
    variant = small_variants[0]
    assert stat.S_IMODE(os.stat(filled.directory).st_mode) == 0o700
    entry = entries(filled)[0]
    entry.chmod(0o666)
    assert not filled.fetch(variant, empty, True)
    entry.chmod(0o600)
    filled.directory.chmod(0o777)
    open_to_all = Cache(filled.directory)
    assert open_to_all.why_unused and "can be written to by others" in open_to_all.why_unused
    assert not open_to_all.fetch(variant, empty, True)
    filled.directory.chmod(0o700)
    assert Cache(filled.directory).fetch(variant, empty, True)


def test_a_cache_that_cannot_be_used_costs_a_sentence(own_build, tmp_path):
    (tmp_path / "file").write_text("")
    ran = build_aot(*OPTIONS, "--out", own_build, "--cache", tmp_path / "file")
    assert ran.status == 0 and f"the build cache is not used: {tmp_path / 'file'} is not a directory" in ran.output


def test_a_variant_keeps_its_latest_entries(filled, store, small_variants):
    variant = small_variants[0]
    for number in range(KEPT + 2):
        described = json.loads(store.described(variant).read_text())
        store.described(variant).write_text(json.dumps(described | {"key": f"{number}"}))
        filled.keep(variant, store)
    of_it = list(filled.directory.glob(f"{variant}-*.zip"))
    assert len(of_it) == KEPT
    assert len(entries(filled)) == KEPT + len(small_variants) - 1


def test_entries_that_no_build_takes_go(filled, store, small_variants):
    old, lately, *_ = (filled._of(variant)[0] for variant in small_variants)
    for path, days in ((old, UNUSED_DAYS + 1), (lately, UNUSED_DAYS - 1)):
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    filled.keep(small_variants[-1], store)
    assert not old.exists() and lately.exists()


def test_wheels_to_publish_take_nothing_from_it(monkeypatch, tmp_path):
    """Neither a cache nor any other setting of the environment reaches their build."""
    seen = {}

    def run(command, env, **options):
        seen.update(env)
        raise RuntimeError("enough")

    monkeypatch.setattr(build_wheel.subprocess, "run", run)
    monkeypatch.setenv("SKBUILD_CMAKE_DEFINE", f"TSMLA_BUILD_CACHE={tmp_path}")
    monkeypatch.setenv("CMAKE_ARGS", f"-DTSMLA_BUILD_CACHE={tmp_path}")
    monkeypatch.setenv("TSMLA_ARCHS", "sm_90a")
    with pytest.raises(RuntimeError, match="enough"):
        build_wheel.build_wheel("binary", tmp_path / "out")
    assert not any(str(tmp_path) in value for name, value in seen.items() if name != "PYTEST_CURRENT_TEST")
    assert seen["TSMLA_ARCHS"] == ";".join(SHIPPED_ARCHS)
    shutil.rmtree(tmp_path / "out")
