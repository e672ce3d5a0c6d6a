"""Contracts between plug-ins and engines: every clause that does not hold is told."""

from __future__ import annotations

import sys

from tsmla.integrations.shared import contract


def newer(backend, class_path, extra=None, *, must): ...


class Older:
    backend: str


def test_a_broken_contract_is_told_clause_by_clause():
    clauses = (
        contract.Function(f"{__name__}:newer", "backend path"),
        contract.Function(f"{__name__}:newer", "backend class_path", exactly=True, also="must"),
        contract.Names(f"{__name__}:Older", "backend mla_prefill_backend"),
        contract.Names(f"{__name__}:gone", "x"),
        contract.Names(f"{__name__}.gone", "x"),
        contract.Names(f"{__name__}:Older", "prefill", beside=f"{__name__}:gone"),
        contract.Names(f"{__name__}:Older", "prefill", beside=f"{__name__}:newer"),
    )
    sys.modules.setdefault(__name__, sys.modules[newer.__module__])
    told = contract.broken(clauses)
    assert told[0] == f"{__name__}:newer takes no path"
    assert told[1] == f"{__name__}:newer takes extra, which the plug-in does not know"
    assert told[2] == f"{__name__}:Older has no mla_prefill_backend"
    assert "gone is not there" in told[3] and "gone is not there" in told[4]
    assert told[5:] == [f"{__name__}:Older has no prefill"]


def test_an_engine_that_cannot_be_imported_is_told_of(tmp_path, monkeypatch):
    """Its modules may raise anything, such as where a file beside them is missing."""
    (tmp_path / "an_engine.py").write_text("raise RuntimeError('no kernels beside it')")
    monkeypatch.syspath_prepend(tmp_path)
    assert contract.broken([contract.Names("an_engine", "x")]) == ["an_engine is not there: no kernels beside it"]
