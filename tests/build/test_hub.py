"""Folders for the Hugging Face Hub, and one loaded as `kernels` 0.17.2 loads it: as a module with metadata.json's id.

This environment has tsmla and tsmla_kernels, too, and the folder's package must not come to them. `kernels` itself was
run by hand (wheels/README.md).
"""

from __future__ import annotations

import filecmp
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import build_hub
import build_wheel
import pytest
from building import SMALL

from build_aot.build import store_of
from build_aot.cache import Cache

HOSTS = ("x86_64", "aarch64")
LOAD = """
import importlib.util, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loaded)
"""


@pytest.fixture(scope="module")
def wheels(small_build, small_variants, tmp_path_factory) -> list[Path]:
    """A small one for each host, of kernels that the small build compiled."""
    made = tmp_path_factory.mktemp("made")
    compiled = Cache(made / "cache")
    for variant in small_variants:
        compiled.keep(variant, store_of(small_build[0]))
    part = [f"cmake.define.TSMLA_ARCHS={SMALL['arch']}", f"cmake.define.TSMLA_FAMILIES={SMALL['family']}"]
    part += [f"cmake.define.TSMLA_BUILD_CACHE={compiled.directory}", f"build-dir={made / 'build'}"]
    return [build_wheel.build_wheel("binary", made, isolated=False, settings=part, host=host) for host in HOSTS]


@pytest.fixture(scope="module")
def hub(wheels, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    build_hub.build(wheels, out)
    return out


@pytest.fixture(scope="module")
def here(hub) -> Path:
    """The folder for this machine."""
    return hub / "build" / build_hub.variant_name("13.0", platform.machine())


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOAD + script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_there_is_a_folder_for_each_host_and_cuda_version(hub):
    names = {path.name for path in (hub / "build").iterdir()}
    assert names == {f"tvm-ffi01-{cuda}-{host}-linux" for cuda in ("cu129", "cu130") for host in HOSTS}
    card = (hub / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert all(f"| `build/{name}` |" in card for name in names)
    assert "{" not in card.replace("{tsmla.__name__}", "")


@pytest.mark.parametrize("host", HOSTS)
def test_a_folder_holds_the_libraries_of_the_wheel(hub, wheels, host):
    folder = hub / "build" / build_hub.variant_name("12.9", host)
    with zipfile.ZipFile(wheels[HOSTS.index(host)]) as wheel:
        libraries = [name for name in wheel.namelist() if name.startswith("tsmla/objs/")]
        assert f"tsmla/objs/tsmla_pack_sm_90a_{host}.so" in libraries
        for name in libraries:
            assert (folder / name.removeprefix("tsmla/")).read_bytes() == wheel.read(name)
    info = folder / f"tsmla-{importlib.metadata.version('tsmla')}.dist-info"
    assert {path.name for path in info.iterdir()} == set(build_hub.METADATA)
    compared = filecmp.dircmp(folder, folder.with_name(build_hub.variant_name("13.0", host)), ignore=[])
    assert not (compared.left_only or compared.right_only or compared.diff_files)


def test_what_only_an_installation_can_serve_is_left_out(here):
    assert not any((here / room).exists() for room in build_hub.LEFT_OUT)
    assert (here / "integrations" / "transformers.py").exists() and not (here / "integrations" / "vllm").exists()
    assert not list(here.rglob("tsmla_kernels")) and not (here / "__main__.py").exists()


def test_metadata_says_what_kernels_asks_for(here, hub):
    said = json.loads((here / "metadata.json").read_text())
    assert said["id"].isidentifier() and said["id"].startswith("_tsmla_cuda_")
    assert said | {"id": ""} == {
        "name": "tsmla",
        "id": "",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": ["tvm-ffi", "nvidia-cutlass-dsl"],
        "backend": {"type": "cuda", "archs": ["9.0a"]},
    }
    ids = {path.parent.name: json.loads(path.read_text())["id"] for path in hub.rglob("metadata.json")}
    assert len(ids) == 4 and len(set(ids.values())) == 2


def test_it_loads_under_its_own_name_beside_an_installed_tsmla(here):
    done = run(
        here,
        """
import torch
from importlib.metadata import version
assert loaded.__version__ == version("tsmla")
print(loaded.binary_status("sm_90a").families["pack"].path)
print({loaded.has_binary_prefill(arch=arch) for arch in loaded.Arch}, loaded.has_binary_decode("sm_90a"))
try:
    loaded.mla_kv_pack_quantize_fp8(*(torch.zeros(1, 1, n, dtype=torch.bfloat16) for n in (128, 64, 128)))
except loaded.ArgumentError as error:
    print(error)
print([name for name in sys.modules if name.split(".")[0] in ("tsmla", "tsmla_kernels")])
""",
    )
    pack, others, refused, foreign = done.stdout.splitlines() or [done.stderr] * 4
    assert pack == str(here / "objs" / f"tsmla_pack_sm_90a_{platform.machine()}.so")
    assert others == "{False} False" and foreign == "[]"
    assert refused == "mla_kv_pack_quantize_fp8: k_nope is on cpu; it must be a CUDA tensor"


def test_what_no_library_holds_is_an_error_that_says_why(here):
    """And not a kernel of the sources of the tsmla that is installed."""
    done = run(
        here,
        """
resolve = importlib.import_module(f"{name}.loading.resolve")
variant = loaded.PackVariant(loaded.Arch.SM90A, loaded.Dtype.BF16, loaded.Dtype.E4M3, 128, 64, 256)
try:
    resolve.kernel(variant)
except loaded.KernelUnavailable as error:
    print(str(error).replace(name, "NAME"))
""",
    )
    assert "jit: cannot compile here: this copy of tsmla, loaded as NAME, comes without kernel sources" in done.stdout
    assert "cached: cannot compile here" in done.stdout, done.stderr


def test_its_operators_are_torch_s_under_its_name(here):
    """Traced calls come to them, too; the installed package's are others."""
    done = run(
        here,
        """
import torch, tsmla.torch_ops
importlib.import_module(f"{name}.torch_ops")
ours, theirs = (getattr(torch.ops, space).pack.default for space in (name, "tsmla"))
print(str(ours._schema) == str(theirs._schema).replace("tsmla::", f"{name}::"))
graphs = []
def backend(graph, inputs):
    graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
    return graph
compiled = torch.compile(loaded.mla_kv_pack_quantize_fp8, backend=backend, fullgraph=True)
try:
    compiled(*(torch.zeros(1, 1, n, dtype=torch.bfloat16) for n in (128, 64, 128)))
except loaded.ArgumentError as error:
    print(error)
print(f"{name}.pack.default" in graphs[0])
""",
    )
    assert done.stdout.splitlines() == [
        "True",
        "mla_kv_pack_quantize_fp8: k_nope is on cpu; it must be a CUDA tensor",
        "True",
    ], done.stderr


def test_two_versions_load_into_one_process(here, tmp_path):
    other = Path(shutil.copytree(here, tmp_path / "other"))
    said = json.loads((other / "metadata.json").read_text())
    (other / "metadata.json").write_text(json.dumps(said | {"id": "_tsmla_cuda_other"}))
    done = run(
        here,
        f"""
first, second = loaded, {str(other)!r}
importlib.import_module(f"{{name}}.torch_ops")
sys.argv[1] = second
exec({LOAD!r})
importlib.import_module(f"{{name}}.torch_ops")
print(first is not loaded, name, first.has_binary_prefill is not loaded.has_binary_prefill)
print(*(package.binary_status("sm_90a").families["pack"].available for package in (first, loaded)))
""",
    )
    assert done.stdout.splitlines() == ["True _tsmla_cuda_other True", "True True"], done.stderr


def test_wheels_that_do_not_belong_together_are_refused(wheels, jit_wheel, tmp_path):
    def refused(*given: Path) -> str:
        with pytest.raises(RuntimeError) as found:
            build_hub.build(given, tmp_path / "out")
        return str(found.value)

    assert "has no libraries" in refused(jit_wheel[0])
    assert "two wheels are for x86_64" in refused(wheels[0], wheels[0])
    damaged = tmp_path / wheels[0].name
    damaged.write_bytes(wheels[0].read_bytes()[:-1])
    assert "is refused:" in refused(damaged)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(RuntimeError, match="is not empty"):
        build_hub.build(wheels, tmp_path / "full")
