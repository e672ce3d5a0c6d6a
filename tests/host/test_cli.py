"""The command `tsmla`: what each command prints and the exit status that scripts rely on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from example_variants import PACK, PREFILL, run_python
from tsmla.identity.arch import Arch
from tsmla.identity.variant import FAMILIES
from tsmla.loading import elf, gpu, image, loader, manifest, settings, toolchain
from tsmla.tools import cli, emulated, kernel_table

from build_aot import link, matrix


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)


def test_show_config_lists_every_setting_and_its_value(monkeypatch, nothing_shipped, capsys) -> None:
    monkeypatch.setenv("TSMLA_BACKEND", "jit")
    assert cli.main(["show-config"]) == 0
    out = capsys.readouterr().out
    for setting in settings.SETTINGS:
        assert re.search(rf"^{setting.name} ", out, re.MULTILINE)
        assert setting.meaning in out and setting.accepted in out
    assert re.search(r"^TSMLA_BACKEND +auto, binary, jit +auto +jit ", out, re.MULTILINE)
    assert "TOKENSPEED_MLA_PREFILL_BACKEND" in out
    assert "no CUDA device" in out and "natural log" in out
    assert toolchain.versions()["nvidia-cutlass-dsl"] in out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--arch", "sm_90a", "--family", "pack"], 0),
        (["--arch", "sm_90a"], 1),
        (["--arch", "sm_100a", "--family", "pack"], 1),
        (["--arch", "sm_90a", "--family", "pack", "decode"], 1),
        (["--family", "pack"], 1),
    ],
)
def test_probe_exit_status(shipped: Path, capsys, arguments: list[str], status: int) -> None:
    assert cli.main(["probe", *arguments]) == status
    assert ("prefill: no: " if "--arch" in arguments else "no precompiled kernels were looked for: ") in (
        capsys.readouterr().out
    )
    assert cli.main(["probe", "--json", *arguments]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0)
    assert set(report["families"]) == {
        "prefill",
        "pack",
        "decode",
        "write_cache",
        "read_cache",
        "quantize_q",
        "key_mask",
    }


def test_probe_of_an_unknown_architecture(capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["probe", "--arch", "sm_80"])
    assert raised.value.code == 2
    assert "sm_90a" in capsys.readouterr().err


def test_list(shipped: Path, capsys) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert [re.split(" {2,}", line) for line in out.splitlines()] == [
        [*kernel_table.HEADER],
        ["pack", "bf16 to e4m3", "nope 128, rope 64, v 128", "-", "-", "sm_90a", "1"],
        ["1 kernels"],
    ]
    assert cli.main(["list", "--resources"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{PACK}  ") and "registers" in out and out.endswith("\n1 kernels\n")
    for more in ([], ["--resources"]):
        assert cli.main(["list", "--json", *more]) == 0
        (kernel,) = json.loads(capsys.readouterr().out)
        assert kernel["symbol"] == PACK.symbol() and kernel["resources"]["registers"]
    assert cli.main(["list", "--family", "prefill"]) == 0
    assert "0 kernels" in capsys.readouterr().out


def test_listed_lines_are_few_and_count_every_kernel_once() -> None:
    header, *lines = kernel_table.rows(matrix.shipped())
    assert header == kernel_table.HEADER and len(lines) < 70 and len(set(lines)) == len(lines)
    assert sum(int(line[-1]) for line in lines) == len({variant.symbol() for variant in matrix.shipped()})
    all_three = "sm_90a, sm_100a, sm_103a"
    prefill = ("prefill", "bf16 to bf16", "qk 192, v 128", "causal, full", "no, yes", all_three, "12")
    masked = ("prefill", "bf16 to bf16", "qk 192, v 128, key mask", "causal or full", "yes", all_three, "3")
    rows = ("decode", "bf16 to bf16", "fp8_ds_mla", "-", "no, yes", all_three, "6")
    gathered = ("decode", "bf16 to bf16", "bf16, chosen keys", "-", "yes", all_three, "3")
    assert prefill in lines and masked in lines and rows in lines and gathered in lines


def test_an_architecture_with_fewer_kernels_has_a_line_of_its_own() -> None:
    fewer = {variant for variant in matrix.shipped(families=["prefill"]) if variant.d_qk == 128 and not variant.masked}
    fewer -= {variant for variant in fewer if variant.arch == "sm_100a" and not variant.lse}
    lines = [line[3:] for line in kernel_table.rows(fewer) if line[1] == "bf16 to bf16"]
    both = "causal, full"
    assert sorted(lines) == [(both, "no, yes", "sm_90a, sm_103a", "8"), (both, "yes", "sm_100a", "2")]


def test_list_without_libraries(nothing_shipped: Path, capsys) -> None:
    assert cli.main(["list"]) == 1
    assert "holds no finished build" in capsys.readouterr().err


def test_inspect(shipped: Path, capsys) -> None:
    library = next(shipped.glob("*.so"))
    assert cli.main(["inspect", str(library)]) == 0
    out = capsys.readouterr().out
    assert PACK.symbol() in out and "H100, H200" in out and "k_nope: Tensor" in out
    assert cli.main(["inspect", str(library), "--json"]) == 0
    said = manifest.LibraryManifest.from_json(capsys.readouterr().out)
    assert said == manifest.read_directory(shipped).libraries[0].manifest


def test_inspect_what_is_not_a_library(tmp_path: Path, capsys) -> None:
    assert cli.main(["inspect", str(tmp_path / "absent.so")]) == 1
    assert "absent.so cannot be read" in capsys.readouterr().err
    assert cli.main(["inspect", str(link.runtime_directories()[1] / "libtvm_ffi.so")]) == 1
    assert "is not a tsmla library" in capsys.readouterr().err


def test_inspect_runs_nothing_of_the_library_and_reads_those_of_other_hosts(make_library, monkeypatch, capsys) -> None:
    monkeypatch.setattr(loader, "_load", lambda *arguments: pytest.fail("the library is loaded"))
    path = make_library("library.so", host="aarch64")
    code = bytearray(path.read_bytes())
    code[18:20] = elf.EM_AARCH64.to_bytes(2, "little")
    path.write_bytes(image.sealed(bytes(code)))
    assert cli.main(["inspect", str(path.rename(path.with_name("named as you like")))]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^host +aarch64$", out, re.MULTILINE) and PREFILL.symbol() in out


def test_verify(shipped: Path, capsys) -> None:
    assert cli.main(["verify"]) == 0
    assert "1 libraries, 0 with a problem" in capsys.readouterr().out
    assert cli.main(["verify", str(shipped)]) == 0


def test_verify_finds_a_changed_byte(broken: Path, capsys) -> None:
    assert cli.main(["verify"]) == 1
    assert "hashes to" in capsys.readouterr().out


def test_verify_compares_signatures(make_library, tmp_path: Path, capsys) -> None:
    library = make_library("library.so", says="Expects 2 parameters")
    said = manifest.LibraryManifest.from_json(loaded_text(library))
    record = manifest.LibraryRecord.of_file(library, said)
    manifest.write_directory(tmp_path, manifest.DirectoryManifest(manifest.SCHEMA, (record,)))
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert "does not take what its manifest says" in capsys.readouterr().out


def test_verify_without_libraries(nothing_shipped: Path, capsys) -> None:
    assert cli.main(["verify"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_warmup_of_the_installed_kernels(shipped: Path, capsys) -> None:
    assert cli.main(["warmup", "--arch", "sm_90a"]) == 0
    assert capsys.readouterr().out == f"{PACK}: shipped\n"


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["--arch", "sm_100a"], "library for sm_100a"),
        (["--arch", "sm_90a", "--family", "decode"], "decode library for sm_90a"),
        (["--arch", "sm_90a", "--family", "decode", "prefill"], "decode or prefill library for sm_90a"),
    ],
)
def test_warmup_of_what_no_library_has(shipped: Path, capsys, arguments: list[str], missing: str) -> None:
    assert cli.main(["warmup", *arguments]) == 1
    said = capsys.readouterr()
    held = next(shipped.glob("*.so")).name
    assert said.out == "" and said.err == f"tsmla: warmup: {shipped} has no {missing}; it holds: {held}\n"


@pytest.mark.parametrize("words", ["", ",pdl=true", ",pdl=false"])
def test_warmup_of_a_variant_in_words(shipped: Path, capsys, words: str) -> None:
    assert cli.main(["warmup", "--variant", WORDS + words]) == 0
    assert capsys.readouterr().out == f"{PACK}: shipped\n"


WORDS = "family=pack,arch=sm_90a,dtype=bf16,out_dtype=e4m3,d_nope=128,d_rope=64,d_v=128"
MALFORMED = {
    "foo": "'foo' is not FIELD=VALUE; accepted:\n  family=prefill,arch=sm_90a|sm_100a|sm_103a|sm_107a,",
    "": "'' is not FIELD=VALUE",
    "family=pick": f"family is 'pick'; known families: {', '.join(FAMILIES)}; accepted:\n  family=prefill,",
    "family=pack": "missing or unknown fields: arch, d_nope,",
    WORDS + ",d_v=128": "d_v is given twice",
    WORDS + ",pdl=0": "field pdl is 0, not a bool; accepted:\n  family=pack,arch=",
    WORDS + ",lse=true": "missing or unknown fields: lse",
    WORDS.replace("=64", "=x"): "field d_rope is 'x', not a int",
    WORDS.replace("=64", "=" + "9" * 5000): "not a int",
    WORDS.replace("=64", "=\u00b2"): "field d_rope is '\u00b2', not a int",
    WORDS.replace("=bf16", "=bf17"): "field dtype is 'bf17', not a Dtype",
    WORDS.replace("=bf16", "=bf16=bf16"): "field dtype is 'bf16=bf16', not a Dtype",
}


@pytest.mark.parametrize("command", ["probe", "warmup"])
@pytest.mark.parametrize(("words", "text"), MALFORMED.items(), ids=range(len(MALFORMED)))
def test_malformed_variants_say_what_is_accepted(shipped: Path, capsys, command: str, words: str, text: str) -> None:
    assert cli.main([command, "--variant", WORDS, "--variant", words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"tsmla: {command}: --variant {words}: ") and text in said.err and said.out == ""
    assert said.err.count("family=") <= words.count("family=") + len(FAMILIES)


@pytest.mark.parametrize("command", ["probe", "warmup"])
def test_a_variant_names_its_own_architecture(shipped: Path, capsys, command: str) -> None:
    assert cli.main([command, "--variant", WORDS, "--arch", "sm_100a"]) == 2
    assert "leave --arch and --family out" in capsys.readouterr().err


def test_probe_of_variants(shipped: Path, capsys, monkeypatch) -> None:
    other = WORDS.replace("d_nope=128", "d_nope=144")
    assert cli.main(["probe", "--variant", WORDS]) == 0
    assert capsys.readouterr().out == f"{PACK}: shipped, {next(shipped.glob('*.so'))}\n"
    assert cli.main(["probe", "--variant", WORDS, "--variant", other]) == 1
    assert "_d144x64x128: no: " in capsys.readouterr().out.splitlines()[1]
    assert cli.main(["probe", "--json", "--variant", WORDS, "--variant", other]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and [v["step"] for v in report["variants"]] == ["shipped", None]
    assert report["variants"][0]["variant"] == PACK.to_dict()
    monkeypatch.setenv("TSMLA_BACKEND", "jit")
    assert cli.main(["probe", "--variant", WORDS]) == 1


def test_verify_finds_libraries_of_other_sources(shipped: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "source_digest", lambda: "0" * 64)
    assert cli.main(["verify"]) == 1
    out = capsys.readouterr().out
    assert "was built from other kernel sources" in out and "install again" in out and "1 with a problem" in out


def test_verify_emulated_takes_no_directory(shipped: Path, capsys) -> None:
    assert cli.main(["verify", str(shipped), "--emulated"]) == 2
    assert f"so {shipped} cannot be verified with it; give DIRECTORY or --emulated" in capsys.readouterr().err


def test_machine_code_is_run_in_the_emulator(shipped: Path, capsys) -> None:
    assert cli.main(["verify", "--machine-code"]) == 2
    assert "--machine-code says what --emulated runs; give both" in capsys.readouterr().err


def test_machine_code_of_a_kernel_that_no_library_has(shipped: Path, capsys) -> None:
    symbol = "tsmla_quantize_q_sm_103a_bf16_d512e4m3s512apartwholex64"
    assert cli.main(["verify", "--emulated", symbol, "--machine-code"]) == 2
    assert f"no library in {shipped} holds {symbol}" in capsys.readouterr().err


@pytest.mark.parametrize("symbol", ["foo", "", "tsmla_pack_sm_90a", "q" * 500, "\udcff"])
def test_verify_emulated_names_few_symbols(capsys, symbol: str) -> None:
    assert cli.main(["verify", "--emulated", symbol]) == 2
    said = capsys.readouterr().err
    assert "can be built" in said and said.count("tsmla_") <= 3 + 1
    assert "close to it" in said or "`tsmla list --resources`" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "name --arch (sm_90a, sm_100a, sm_103a, sm_107a) or --variant"),
        (["--variant", "family=pack"], "missing or unknown fields: arch"),
        (["--variant", "pack"], "--variant pack: "),
    ],
)
def test_warmup_of_nothing_in_particular(shipped: Path, capsys, arguments: list[str], text: str) -> None:
    assert cli.main(["warmup", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["demo"], ["demo", "--emulated", "sm_100a"]])
def test_demo_without_gpu_and_emulator_says_what_to_install(capsys, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.setattr(emulated, "installed", lambda: False)
    assert cli.main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "no CUDA device" in said.err and emulated.INSTALL in said.err


def test_without_numpy_commands_print_no_warning_and_torch_alone_does(shipped: Path) -> None:
    without = "import sys, warnings; sys.modules['numpy'] = None\n"
    verify = (
        "from tsmla.tools import cli; before = [*warnings.filters]\n"
        "assert cli.main(['verify', sys.argv[1]]) == 0 and 'torch' in sys.modules and warnings.filters == before"
    )
    done = run_python(without + verify, shipped)
    assert done.returncode == 0 and done.stderr == ""
    assert "Failed to initialize NumPy" in run_python(without + "import torch").stderr


def test_a_command_that_does_not_exist(capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["prove"])
    assert raised.value.code == 2
    assert "probe" in capsys.readouterr().err


def test_python_m_tsmla_is_the_command() -> None:
    done = run_python("import runpy, sys; sys.argv[1:] = ['prove'];runpy.run_module('tsmla', run_name='__main__')")
    assert done.returncode == 2
    assert "usage: tsmla" in done.stderr and "probe" in done.stderr


def loaded_text(library: Path) -> str:
    from tsmla.loading import loader

    said = loader.open_library(library).manifest
    assert said.arch is Arch.SM90A
    return said.to_json()


def test_emulation_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setattr(emulated, "installed", lambda: False)
    assert cli.main(["verify", "--emulated"]) == 2
    assert emulated.INSTALL in capsys.readouterr().err


def test_show_config_says_what_is_wrong_with_a_setting(monkeypatch, nothing_shipped, capsys) -> None:
    monkeypatch.setenv("TSMLA_CACHE_DIR", "~nosuchuser/cache")
    monkeypatch.setenv("TSMLA_BACKEND", "\udcff")
    assert cli.main(["show-config"]) == 0
    out = capsys.readouterr().out
    assert "TSMLA_CACHE_DIR is '~nosuchuser/cache', but ~nosuchuser has no home directory" in out and r"\udcff" in out
