"""Who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tsmla
import tsmla_kernels
from example_variants import run_python

ROOT = Path(__file__).resolve().parents[2]
TSMLA = Path(tsmla.__file__).parent
KERNELS = Path(tsmla_kernels.__file__).parent
EMULATED = TSMLA / "tools" / "emulated.py"
"""The one file of tsmla that may import the emulator, inside functions that run something in it."""
HEAVY = {"torch", "tvm_ffi", "cutlass"}
ROOMS = {
    "identity": set(),
    "errors": set(),
    "loading": {"identity", "errors"},
    "operators": {"identity", "errors", "loading"},
    "torch_ops": {"operators"},
    "": {"identity", "errors", "loading", "operators"},
    "compat": {"identity", "errors", "operators", ""},
    "integrations": {"identity", "errors", "loading", "operators"},
    "problems": {"identity", "operators"},
    "tools": {"identity", "errors", "loading", "operators", "problems", ""},
    "__main__": {"tools"},
}
"""Room of tsmla, or module that stands by itself ("" is `__init__.py`) -> the others that its files may name, besides
each other."""
TENSOR_MODULES = {
    "integrations.shared.decodes",
    "integrations.shared.heads",
    "integrations.shared.padding",
    "integrations.shared.queries",
    "integrations.shared.ready",
    "integrations.transformers",
    "tools.selftest.child",
    "torch_ops",
}
"""Modules of tsmla that handle tensors and so import torch, besides whole rooms of them."""
TENSOR_ROOMS = ("compat.", "operators.", "problems.")
LIGHT = {"operators.prepare", "problems.cases", "problems.kept"}
"""Modules of these rooms that do not."""
PLUG_INS = {
    f"integrations.vllm.{name}"
    for name in (
        "backend",
        "builder",
        "context",
        "decode",
        "layer",
        "masked",
        "mha",
        "prefill",
        "prompts",
        "queries",
        "ready",
        "served",
        "sparse",
        "sparse_backend",
        "sparse_builder",
    )
} | {
    f"integrations.sglang.{name}" for name in ("backend", "extend", "metadata", "models", "ready", "releases", "served")
}
"""Modules that engines import, and which import engines."""


def imports(file: Path) -> Iterator[str]:
    """Every module that a file names in an import statement; relative ones start with a dot per level."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.module:
                yield base
            else:
                yield from (base + alias.name for alias in node.names)


def named_in_strings(file: Path) -> Iterator[str]:
    """Every module of tsmla, without the package's name, that a string of a file is the name of: `import_module` or a
    process may import it."""
    tree = ast.parse(file.read_text("utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            name = node.value.removeprefix("tsmla.").strip(".")
            if "." in node.value and name and name in MODULES:
                yield name


def within_tsmla(file: Path) -> Iterator[str]:
    """Every module or name of tsmla that a file imports or names in a string, without the package's name."""
    package = file.relative_to(TSMLA).parent.parts if TSMLA in file.parents else ()
    for found in imports(file):
        level = len(found) - len(found.lstrip("."))
        if level:
            yield ".".join((*package[: len(package) - level + 1], *filter(None, found[level:].split("."))))
        elif top(found) == "tsmla":
            yield found.removeprefix("tsmla").lstrip(".")
    yield from named_in_strings(file)


def room_of(name: str) -> str:
    """The room of a module; "" where it is a name of the package itself."""
    return top(name) if top(name) in ROOMS else ""


def sources(directory: Path) -> list[Path]:
    found = sorted(directory.rglob("*.py"))
    assert found or not directory.exists(), f"{directory} has no Python files"
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def modules() -> set[str]:
    """Every module of tsmla, without the package's name; packages by their own."""
    files = (file.relative_to(TSMLA) for file in sources(TSMLA))
    return {".".join(file.with_suffix("").parts).removesuffix("__init__").rstrip(".") for file in files}


MODULES = modules()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_name_only_those_below_them(room: str) -> None:
    files = [file for file in sources(TSMLA) if room_of(file.relative_to(TSMLA).with_suffix("").parts[0]) == room]
    assert files
    for file in files:
        found = {room_of(name) for name in within_tsmla(file)} - {room}
        assert found <= ROOMS[room], f"{file}: {sorted(found - ROOMS[room])}"


def test_rooms_have_no_circles() -> None:
    """Even between two modules of one."""
    arrows = {
        name: {x for x in within_tsmla(file) if x in MODULES and x != name}
        for file in sources(TSMLA)
        if (name := ".".join(file.relative_to(TSMLA).with_suffix("").parts)) and not name.endswith("__init__")
    }
    assert not circles(arrows)


def circles(arrows: Mapping[str, set[str]]) -> Mapping[str, set[str]]:
    """What is left of arrows where whoever needs nobody that is left is taken away, again and again."""
    while leaves := {name for name, behind in arrows.items() if not behind & arrows.keys()}:
        arrows = {name: behind for name, behind in arrows.items() if name not in leaves}
    return arrows


def test_arrows_between_kernels_point_one_way_in_each_folder() -> None:
    """What lies in a folder, files and folders with all that is in them, needs one another in one order."""
    arrows: dict[tuple[str, ...], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sources(KERNELS):
        own = file.relative_to(KERNELS).with_suffix("").parts
        for found in imports(file):
            if level := len(found) - len(found.lstrip(".")):
                other = (*own[: len(own) - level], *found[level:].split("."))
                depth = next(i for i, pair in enumerate(zip(own, other, strict=False)) if len({*pair}) > 1)
                arrows[own[:depth]][own[depth]].add(other[depth])
    assert {(), ("parts",), ("sm90", "decode"), ("sm90", "decode", "row64")} <= arrows.keys()
    for folder, among in arrows.items():
        assert not circles(among), f"{'/'.join(folder)}: {circles(among)}"


def test_the_bottom_imports_only_the_standard_library_and_itself() -> None:
    for file in sources(TSMLA / "identity"):
        for found in imports(file):
            assert found.startswith(".") or top(found) in sys.stdlib_module_names, f"{file}: {found}"


def test_kernels_import_no_torch_and_only_the_bottom_of_tsmla() -> None:
    for file in sources(KERNELS):
        for found in imports(file):
            if found.startswith("."):
                continue
            allowed = top(found) in {"cutlass", "cuda"} | (sys.stdlib_module_names - {"os", "io", "pathlib"})
            assert allowed or found.startswith("tsmla.identity."), f"{file}: {found}"


def test_kernels_open_no_file_and_read_no_environment() -> None:
    for file in sources(KERNELS):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Name):
                assert node.id not in ("open", "environ", "getenv"), f"{file}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("environ", "getenv", "read_text", "write_text"), f"{file}:{node.lineno}"


def test_assembly_is_written_in_one_place() -> None:
    """Each instruction once, under its own name."""
    users = [file for file in sources(KERNELS) if "inline_asm" in file.read_text("utf-8")]
    assert users == [KERNELS / "parts" / "ptx.py"]


@pytest.mark.parametrize(
    ("directory", "forbidden"),
    [
        (TSMLA, {"build_aot", "tsmla_emulator", "benchmarks", "tests"}),
        (KERNELS, {"build_aot", "tsmla_emulator", "benchmarks", "tests"}),
        (ROOT / "build_aot", {"tsmla_emulator", "benchmarks", "tests", "torch"}),
        (ROOT / "emulator", {"build_aot", "benchmarks", "tests"}),
        (ROOT / "benchmarks", {"build_aot", "tests"}),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_arrows_point_one_way(directory: Path, forbidden: set[str]) -> None:
    for file in sources(directory):
        if file != EMULATED:
            assert not {top(found) for found in imports(file)} & forbidden, file


def test_only_the_command_line_reaches_the_emulator() -> None:
    assert "tsmla_emulator" in {top(found) for found in imports(EMULATED)}
    for node in ast.parse(EMULATED.read_text("utf-8")).body:
        assert not (isinstance(node, ast.Import | ast.ImportFrom) and "tsmla_emulator" in ast.unparse(node))
    users = {file.name for file in sources(TSMLA) if "tools.emulated" in within_tsmla(file)}
    assert users == {"cli.py", "demo.py", "command.py", "child.py"}


def test_the_emulator_does_without_the_tools() -> None:
    """They run it, so that it would run itself."""
    for file in sources(ROOT / "emulator" / "tsmla_emulator"):
        assert not [name for name in within_tsmla(file) if room_of(name) in ("tools", "__main__")], file


@pytest.mark.parametrize(("room", "does_without"), [("run", ("prove", "time")), ("prove", ("time",))])
def test_rooms_of_the_emulator(room: str, does_without: tuple[str, ...]) -> None:
    """What runs a kernel needs neither proofs nor times, what proves needs no times; imports inside functions count."""
    package = ROOT / "emulator" / "tsmla_emulator"
    for file in sources(package / room):
        depth = len(file.relative_to(package).parts)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == depth:
                names = [node.module or "", *(alias.name for alias in node.names if not node.module)]
                assert not {top(name) for name in names} & set(does_without), f"{file}:{node.lineno}"


def test_only_the_jit_imports_the_kernels() -> None:
    for file in sources(TSMLA):
        if file.name != "jit.py":
            assert "tsmla_kernels" not in {top(found) for found in imports(file)}, file


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda file: file.stem)
def test_benchmarks_can_be_imported(file: Path) -> None:
    """Without a GPU and without any peer."""
    importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def test_files_have_names() -> None:
    for directory in (TSMLA, KERNELS, ROOT / "build_aot", ROOT / "benchmarks", ROOT / "tests"):
        assert not [file for file in sources(directory) if file.stem in ("utils", "helpers", "common")]


def test_importing_tsmla_costs_nothing() -> None:
    """Under 30 ms of a core over bare Python, and none of the heavy packages. The best of a few, since machines are
    busy."""
    script = """
import sys, time
started = time.process_time()
import tsmla
print(time.process_time() - started)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    runs = [run_python(script).stdout.splitlines() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.030
    assert not HEAVY & set(runs[0][1].split())


def handles_tensors(name: str) -> bool:
    return name in TENSOR_MODULES or (name.startswith(TENSOR_ROOMS) and name not in LIGHT)


@pytest.mark.parametrize(
    "name", sorted(name for name in MODULES - PLUG_INS - {"__main__"} if not handles_tensors(name))
)
def test_modules_that_handle_no_tensors_import_nothing_heavy(name: str) -> None:
    module = f"tsmla.{name}".rstrip(".")
    done = run_python(f"import sys, {module}; print(*sorted({{n.partition('.')[0] for n in sys.modules}}))")
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())


def test_asking_about_binaries_imports_neither_torch_nor_the_compiler(tmp_path: Path) -> None:
    script = (
        "import sys, tsmla; print(tsmla.has_binary_prefill(arch='sm_90a'), {'torch', 'cutlass'} & set(sys.modules))"
    )
    done = run_python(script, TSMLA_FMHA_BINARY_SO=str(tmp_path / "absent.so"))
    assert done.stdout.split() == ["False", "set()"], done.stderr


def test_every_public_name_is_there() -> None:
    for name in tsmla.__all__:
        if name != "__version__":
            assert getattr(tsmla, name) is not None
    assert set(dir(tsmla)) == set(tsmla.__all__)


def test_the_version_is_the_distribution_s(monkeypatch) -> None:
    """Sources on a path, without an installed distribution, say that it is unknown; all names can be imported."""
    installed = [types.SimpleNamespace(version="1.2", metadata={"Version": "1.2"})]
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **where: iter(installed))
    assert tsmla.__version__ == "1.2"
    installed.clear()
    assert tsmla.__version__ == "unknown"
    names: dict[str, object] = {}
    exec("from tsmla import *", names)
    assert set(tsmla.__all__) <= set(names)


def test_the_stub_names_what_the_package_offers() -> None:
    stub = ast.parse((TSMLA / "__init__.pyi").read_text("utf-8"))
    named = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert named == tsmla._MODULE_OF


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prefil'; it has: .*tsmla_prefill"):
        tsmla.prefil  # noqa: B018
