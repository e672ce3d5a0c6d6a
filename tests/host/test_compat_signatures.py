"""Faces take what the libraries' own functions take. tests/peer_signatures.json has those, with version and source."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

RECORDED = json.loads((Path(__file__).parents[1] / "peer_signatures.json").read_text("utf-8"))
KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "any",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
MOVED = {("tokenspeed_mla_decode", "0.1.3"): {"enable_pdl"}}
"""Arguments whose place a library itself has changed since."""
OURS = {("flash_mla_sparse_fwd", "return_max_logits")}
"""Keywords that a face has besides: what the library always gives and takes long here."""
NAMES = [f"{record['function']}-{record['version']}" for record in RECORDED]


def parameters(record: dict[str, Any]) -> list[inspect.Parameter]:
    """The parameters of the face's function, without self."""
    found: Any = importlib.import_module(f"tsmla.compat.{record['face']}")
    for name in record["function"].split("."):
        found = getattr(found, name)
    return [x for x in inspect.signature(found).parameters.values() if x.name != "self"]


def default(text: str | None) -> Any:
    return inspect.Parameter.empty if text is None else eval(text, {"torch": torch})


@pytest.mark.parametrize("record", [r for r in RECORDED if r["newest"]], ids=lambda r: r["function"])
def test_the_newest_signature_is_the_face_s(record):
    more = [x for x in parameters(record) if (record["function"], x.name) in OURS]
    assert all(x.kind is inspect.Parameter.KEYWORD_ONLY and x.default is not inspect.Parameter.empty for x in more)
    ours = [(x.name, KINDS[x.kind], x.default) for x in parameters(record) if x not in more]
    assert ours == [(name, kind, default(text)) for name, kind, text in record["parameters"]]


@pytest.mark.parametrize("record", RECORDED, ids=NAMES)
def test_calls_of_every_version_fit(record):
    """Each argument by name, and those that have a place at that place; what one leaves out, the other may."""
    ours = parameters(record)
    taken = {x.name: x for x in ours}
    any_name = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in ours)
    moved = MOVED.get((record["function"], record["version"]), set())
    for place, (name, kind, text) in enumerate(record["parameters"]):
        if any_name:
            continue
        assert name in taken
        assert kind != "any" or name in moved or ours[place].name == name
        assert text is None or taken[name].default is not inspect.Parameter.empty
    named = {name for name, *_ in record["parameters"]}
    fixed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for x in ours:
        assert x.name in named or x.kind not in fixed or x.default is not inspect.Parameter.empty, x.name


@pytest.mark.parametrize("face", ["tokenspeed_mla", "flash_mla", "flashinfer"])
def test_every_face_offers_what_is_recorded_of_it(face):
    module = importlib.import_module(f"tsmla.compat.{face}")
    wanted = {record["function"].partition(".")[0] for record in RECORDED if record["face"] == face}
    assert wanted <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    assert importlib.util.find_spec(face) is None or "tsmla" not in str(importlib.util.find_spec(face).origin)
