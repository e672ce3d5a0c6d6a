"""Environment variables are read when used; a bad value names the accepted ones; older names work with one log line."""

from __future__ import annotations

import ast
import logging
import os
from pathlib import Path

import pytest
import tsmla
from example_variants import PACK
from tsmla.errors import SettingError
from tsmla.loading import jit, resolve, settings


def test_at_most_six_variables_of_our_own() -> None:
    names = [setting.name for setting in settings.SETTINGS]
    assert len(names) <= 6 and len(set(names)) == len(names)
    assert all(name.startswith("TSMLA_") for name in names)


def test_no_other_module_reads_a_tsmla_variable() -> None:
    package = Path(tsmla.__file__).parent
    for file in package.rglob("*.py"):
        if file.name == "settings.py" or file == package / "integrations" / "vllm" / "options.py":  # the plug-in's own
            continue
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and text.startswith("TSMLA_")], file


def test_defaults() -> None:
    assert settings.fmha_binary_so() is None
    assert settings.backend("prefill") == settings.backend("pack") == "auto"
    assert settings.verify() is False
    assert settings.current().keys() == {settings.CACHE.name}


def test_default_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CACHE.name)
    assert settings.cache_dir() == Path.home() / ".cache" / "tsmla"


def test_values_are_read_when_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for value in ("binary", "jit", "auto"):
        monkeypatch.setenv("TSMLA_BACKEND", value)
        assert settings.backend("pack") == value
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TSMLA_VERIFY", "1")
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", "~/library.so")
    assert settings.cache_dir() == tmp_path
    assert settings.verify() is True
    assert settings.fmha_binary_so() == Path.home() / "library.so"


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.setenv(setting.name, "")
    assert settings.backend("prefill") == "auto"
    assert settings.fmha_binary_so() is None
    assert settings.verify() is False
    assert settings.current() == {}


@pytest.mark.parametrize(
    ("name", "value", "accepted", "read"),
    [
        ("TSMLA_BACKEND", "cutedsl", "auto, binary, jit", lambda: settings.backend("pack")),
        ("TSMLA_BACKEND", "AUTO", "auto, binary, jit", lambda: settings.backend("prefill")),
        ("TSMLA_VERIFY", "yes", "0, 1", settings.verify),
        ("TOKENSPEED_MLA_PREFILL_BACKEND", "jit", "cutedsl, binary", lambda: settings.backend("prefill")),
    ],
)
def test_a_bad_value_lists_the_accepted_ones(monkeypatch, name: str, value: str, accepted: str, read) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError) as raised:
        read()
    assert str(raised.value) == f"{name} is {value!r}; accepted: {accepted}"


@pytest.mark.parametrize(("older", "ours"), [("cutedsl", "jit"), ("binary", "binary")])
def test_older_backend_name_speaks_for_prefill_only(monkeypatch, caplog, older: str, ours: str) -> None:
    monkeypatch.setenv("TOKENSPEED_MLA_PREFILL_BACKEND", older)
    assert settings.backend("pack") == "auto"
    assert not caplog.records
    assert [settings.backend("prefill") for _ in range(3)] == [ours] * 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"TOKENSPEED_MLA_PREFILL_BACKEND={older}" in caplog.text and "TSMLA_BACKEND" in caplog.text


def test_older_library_name(monkeypatch, caplog) -> None:
    monkeypatch.setenv("TOKENSPEED_MLA_FMHA_BINARY_SO", "/opt/library.so")
    assert [settings.fmha_binary_so() for _ in range(3)] == [Path("/opt/library.so")] * 3
    assert len(caplog.records) == 1


def test_our_name_beats_the_older_one(monkeypatch, caplog) -> None:
    monkeypatch.setenv("TOKENSPEED_MLA_FMHA_BINARY_SO", "/opt/older.so")
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", "/opt/ours.so")
    monkeypatch.setenv("TOKENSPEED_MLA_PREFILL_BACKEND", "cutedsl")
    monkeypatch.setenv("TSMLA_BACKEND", "binary")
    assert settings.fmha_binary_so() == Path("/opt/ours.so")
    assert settings.backend("prefill") == "binary"
    assert not caplog.records


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user whom no passwd entry names, as in containers that run under an arbitrary id."""
    import pwd

    def unknown(who):
        raise KeyError(f"getpwuid(): uid not found: {who}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_directory_nothing_is_kept(homeless, monkeypatch, caplog) -> None:
    monkeypatch.delenv(settings.CACHE.name)
    assert [settings.cache_dir() for _ in range(3)] == [settings.NOWHERE] * 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "HOME is not set" in caplog.text and "set TSMLA_CACHE_DIR to a directory" in caplog.text
    with pytest.raises(OSError):
        os.makedirs(settings.NOWHERE)  # root can make most directories


def test_without_a_home_directory_kernels_are_compiled_all_the_same(homeless, monkeypatch, nothing_shipped) -> None:
    monkeypatch.delenv(settings.CACHE.name)
    monkeypatch.setattr(jit, "_compile", lambda variant: b"")
    monkeypatch.setattr(jit, "_load_object", lambda file, symbol: repr)
    assert resolve.resolve(PACK) == resolve.Resolved(repr, "jit")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("TSMLA_CACHE_DIR", settings.cache_dir),
        ("TSMLA_FMHA_BINARY_SO", settings.fmha_binary_so),
        ("TOKENSPEED_MLA_FMHA_BINARY_SO", settings.fmha_binary_so),
    ],
)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("~/kernels", "~ has no home directory: HOME is not set and no passwd entry names one"),
        ("~nosuchuser", "~nosuchuser has no home directory: no user is called 'nosuchuser'"),
        ("~nosuchuser/kernels.so", "~nosuchuser has no home directory: no user is called 'nosuchuser'"),
        ("/opt/a\0b", "a path has no NUL character"),
    ],
)
def test_a_path_that_leads_nowhere_names_the_variable(homeless, monkeypatch, name, read, value, why) -> None:
    monkeypatch.setattr(os, "environ", {name: value})
    with pytest.raises(SettingError) as raised:
        read()
    assert str(raised.value).startswith(f"{name} is {value!r}") and why in str(raised.value)
