"""What the README and docs/measured/performance.md say is what the code and the records say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import readme
import tsmla
from readme import DEPLOYMENT, README, SUPPORT
from tsmla.identity.arch import Arch
from tsmla.loading import jit, records
from tsmla.loading.settings import SETTINGS
from tsmla.tools import emulated

from benchmarks import published, report

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "start" / "tour.md").read_text()
PAGES = [path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)]
FOREIGN = {"compat.md", "CHANGELOG.md"}
"""Pages that also name files of other projects, or of other times."""
OUR_PAGES = [path for path in PAGES if path.name not in FOREIGN and "log" not in path.parts]
FOLDERS = ("python", "kernels", "build_aot", "emulator", "benchmarks", "wheels", "docs", "examples", "tests")
FILES = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def test_support_tables():
    assert readme.support_table() in SUPPORT
    assert readme.short_table() in README


@pytest.mark.parametrize("arch", [Arch.SM100A, Arch.SM103A], ids=str)
def test_what_no_hardware_has_run(arch):
    """Architectures without a selftest record are named, and how to send one."""
    paragraph = next((text for text in README.split("\n\n") if "not yet run on hardware" in text), "")
    assert (arch in paragraph) == (not records.record_file(arch).exists())
    assert records.COMMAND in paragraph


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_environment_table(setting):
    name = f"`{setting.name}`" + (f" (also read: `{setting.alias}`)" if setting.alias else "")
    assert f"| {name} | {setting.accepted} | {setting.default} | {setting.meaning} |" in DEPLOYMENT


def test_the_first_command_brings_the_emulator_and_computes():
    assert "\n```\npip install . ./emulator && tsmla demo\n```\n" in README
    assert (ROOT / "emulator" / "pyproject.toml").exists()
    assert "pip install . ./emulator" in emulated.INSTALL


def test_at_most_six_variables():
    assert len(SETTINGS) <= 6


def test_performance():
    """Written by `python -m benchmarks report`."""
    assert f"{report.BEGIN}\n{report.readme_part()}\n{report.END}" in README
    assert report.PAGE.read_text() == report.performance_page()
    assert not published.superseded()


def test_what_the_tour_says_of_a_gpu_is_on_the_performance_page():
    page = report.PAGE.read_text()
    read, product = re.search(r"read brings ([\d,]+) GB/s and a large matmul computes (\d+) TFLOP/s", TOUR).groups()
    read = read.replace(",", "")
    assert f"A large read reached {read} GB/s in the same run as the decodes, a large matmul {product} TFLOP/s." in page
    assert f"which is {int(product) * 1000 / int(read):.0f} operations a byte" in TOUR


@pytest.mark.parametrize(
    ("example", "calls"),
    [
        (readme.PREFILL, ["tsmla_prefill"]),
        (readme.DECODE, ["tsmla_decode"]),
        (readme.PACK, ["mla_kv_pack_quantize_fp8"]),
        (readme.GRAPH, ["warmup", "tsmla_decode"]),
    ],
)
def test_what_examples_call(example, calls):
    """They are run by tests/emulated and tests/device."""
    assert re.findall(r"tsmla\.(tsmla_prefill|tsmla_decode|mla_\w+|warmup)\(", example) == calls


def test_the_example_of_a_metric_counts_what_is_logged():
    names: dict[str, Any] = {}
    exec(readme.WATCH, names)
    try:
        assert names["steps"].total() == len(tsmla.served())
        message = "compiled %s in %.1f s"
        assert f'"{message}"' in inspect.getsource(jit)
        jit.logger.warning(message, "a kernel", 1.0)
        jit.logger.warning("compiling a kernel, about 6 s")
        assert names["compiles"].count == 1
    finally:
        jit.logger.removeHandler(names["compiles"])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_records(page):
    """Records that a document names exist, here or in git."""
    results = ROOT / "benchmarks" / "results"
    there = {path.name for path in results.glob("*/*.json")} | {*(results / "in_git.txt").read_text().split()}
    assert set(re.findall(r"[\w-]+-\d{8}T\d{6}\.json", page.read_text())) <= there


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(page):
    """Every relative link leads to a file, and to a heading of it where it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if target.startswith(("http", "mailto:")):
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if heading:
            assert heading in anchors(path.read_text()), target


@pytest.mark.parametrize("page", OUR_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names(page):
    """Python files in code spans are files of this repository, by their last parts."""
    spans = re.findall(r"`([\w./]+\.py)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    assert [name for name in spans if not any(f"/{file}".endswith(f"/{name}") for file in FILES)] == []


@pytest.mark.parametrize("page", OUR_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_no_wider_than_code(page):
    """Tables apart, and the page that is written from records, with their commands."""
    lines = [] if page == report.PAGE else page.read_text().splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def anchors(text: str) -> set[str]:
    """What GitHub makes of headings: lower case, spaces to hyphens, punctuation left out."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
