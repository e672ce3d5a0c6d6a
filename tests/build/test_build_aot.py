"""`python -m build_aot`: what it makes, what it reuses, what it says."""

from __future__ import annotations

import fcntl
import re
import threading

from building import SMALL, build_aot, copy_of_the_project
from tsmla.loading import manifest

from build_aot.build import STORE

OPTIONS = ("--arch", SMALL["arch"], "--family", SMALL["family"], "--jobs", "2")
LIBRARY = "tsmla_pack_sm_90a_x86_64.so"


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_first_run_shows_progress_and_leaves_library_and_manifest(small_build, small_variants):
    out, ran = small_build
    lines = [line for line in ran.output.splitlines() if not line.startswith("import time:")]
    total = len(small_variants)
    assert lines[0].startswith(f"compiling {total} kernels for sm_90a in 2 processes: about ")
    assert [int(line.split()[0]) for line in lines[1 : 1 + total]] == list(range(1, total + 1))
    for line in lines[1 : 1 + total]:
        assert re.fullmatch(rf" *\d+ of {total}  tsmla_pack_\S+  \d+\.\d s, about .* left", line), line
    assert re.search(rf"{total} kernels in 1 libraries .*: {total} compiled, 0 reused, \d+\.\d s", lines[-1])
    assert contents(out).keys() == {LIBRARY, manifest.MANIFEST_FILE}
    (record,) = manifest.read_directory(out).libraries
    assert [kernel.variant for kernel in record.manifest.kernels] == list(small_variants)


def test_ptx_is_kept_and_agrees_with_what_the_machine_code_says(small_build):
    out, _ = small_build
    (record,) = manifest.read_directory(out).libraries
    for kernel in record.manifest.kernels:
        ptx = (out / "ptx" / f"{kernel.variant}.ptx").read_text()
        assert f".target {kernel.variant.arch}" in ptx
        (threads,) = re.findall(r"\.(?:reqntid|maxntid) (\d+)", ptx)
        assert kernel.resources["threads"] == int(threads)
        assert ptx.count(".visible .entry") == kernel.resources["gpu_kernels"]
        assert 0 < kernel.resources["registers"] <= 255


def test_second_run_reuses_everything_without_loading_the_compiler(own_build):
    before = contents(own_build)
    ran = build_aot(*OPTIONS, "--out", own_build)
    assert ran.status == 0 and "0 compiled" in ran.output
    assert ran.seconds < 3
    imported = {line.split("|")[-1].strip() for line in ran.output.splitlines() if line.startswith("import time:")}
    assert "build_aot.build" in imported
    assert not imported & {"cutlass", "torch", "tvm_ffi"}
    assert contents(own_build) == before


def test_a_damaged_result_or_library_is_made_again_with_the_same_bytes(own_build, small_variants):
    before = contents(own_build)
    damaged = own_build / STORE / f"{small_variants[0]}.o"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (own_build / LIBRARY).write_bytes(before[LIBRARY][:-1])
    ran = build_aot(*OPTIONS, "--out", own_build)
    assert ran.status == 0 and "1 compiled" in ran.output and "audited" in ran.output
    assert contents(own_build) == before


def test_changed_sources_are_compiled_again(own_build, tmp_path, small_variants):
    project = copy_of_the_project(tmp_path / "project")
    with open(project / "kernels" / "tsmla_kernels" / "registry.py", "a") as stream:
        stream.write("# changed\n")
    ran = build_aot(*OPTIONS, "--out", own_build, project=project)
    assert ran.status == 0 and f"{len(small_variants)} compiled, 0 reused" in ran.output


def test_a_variant_that_does_not_compile_is_named_and_changes_nothing(own_build, tmp_path, small_variants):
    project = copy_of_the_project(tmp_path / "project")
    source = project / "kernels" / "tsmla_kernels" / "registry.py"
    source.write_text(source.read_text() + "\n\ndef compile_variant(variant):\n    raise ValueError('deliberate')\n")
    before = contents(own_build)
    ran = build_aot(*OPTIONS, "--out", own_build, project=project)
    assert ran.status == 1
    assert re.search(r"build_aot: tsmla_pack_\S+ did not compile: ValueError: deliberate", ran.output)
    assert contents(own_build) == before


def test_output_holds_exactly_what_was_asked_for(own_build):
    (own_build / "tsmla_prefill_sm_90a_x86_64.so").write_bytes(b"left from before")
    assert build_aot(*OPTIONS, "--out", own_build).status == 0
    assert contents(own_build).keys() == {LIBRARY, manifest.MANIFEST_FILE}


def test_results_of_variants_that_are_gone_do_not_stay(own_build, small_variants):
    store, gone, other = own_build / STORE, "tsmla_pack_sm_90a_of_old", "tsmla_pack_sm_100a_bf16_to_e4m3_d128x64x128"
    for name in (f"{gone}.o", f"{gone}.json", f"{gone}.ll.gz", f"{other}.o"):
        (store / name).write_bytes(b"left from before")
    assert build_aot(*OPTIONS, "--out", own_build).status == 0
    assert not [*store.glob(f"{gone}*")] and (store / f"{other}.o").exists()
    assert all((store / f"{variant}.o").exists() for variant in small_variants)


def test_wrong_use_is_refused_with_what_exists(tmp_path):
    ran = build_aot("--arch", "sm_80", "--out", tmp_path)
    assert ran.status == 2 and "sm_80" in ran.output and "sm_90a" in ran.output
    ran = build_aot("--family", "attention", "--out", tmp_path)
    assert ran.status == 2 and "attention" in ran.output and "prefill" in ran.output
    assert not any(tmp_path.iterdir())


def test_two_builds_of_one_directory_take_turns(own_build):
    with open(own_build / STORE / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        threading.Timer(2, fcntl.flock, (stream, fcntl.LOCK_UN)).start()
        ran = build_aot(*OPTIONS, "--out", own_build)
    assert ran.status == 0 and ran.seconds > 1.5
