"""What the command lines of the engine benchmarks ask vLLM for, and how rows of their records are named."""

from __future__ import annotations

import argparse
import json
from typing import ClassVar

import pytest
from tsmla.integrations import vllm

from benchmarks import engine_tables
from benchmarks.engines import engine, model, sglang, start, throughput, tokens
from benchmarks.engines.model import Backend


@pytest.mark.parametrize(
    "text, backend",
    [
        ("FLASHMLA", Backend("FLASHMLA", "auto")),
        ("TSMLA", Backend("TSMLA", "TSMLA")),
        ("TSMLA+FLASH_ATTN", Backend("TSMLA", "FLASH_ATTN")),
        ("TSMLA,A=1,B=2=3", Backend("TSMLA", "TSMLA", ("A=1", "B=2=3"))),
    ],
)
def test_a_backend_is_what_its_name_says(text, backend):
    assert Backend.parse(text) == backend and str(backend) == text


@pytest.mark.parametrize("text", ["TSMLA,A", "TSMLA,=1", "TSMLA,"])
def test_variables_without_a_name_or_a_value_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=VALUE behind commas"):
        Backend.parse(text)


def test_settings_are_variables_or_arguments_of_vllm():
    ranks = "tensor_parallel_size=2,decode_context_parallel_size=2,dcp_comm_backend=a2a"
    backend = Backend.parse(f"TSMLA,A=1,kv_cache_dtype=fp8,{ranks}")
    assert backend.environment == {"A": "1"}
    assert backend.arguments == {
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "dcp_comm_backend": "a2a",
    }
    assert str(backend.on_one_gpu()) == "TSMLA,A=1,kv_cache_dtype=fp8"


def test_a_setting_overrules_the_options_of_all(monkeypatch):
    monkeypatch.setattr(vllm, "selected_names", lambda sparse: ("TSMLA", "TSMLA"))
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    given = parser.parse_args(["TSMLA", "TSMLA,kv_cache_dtype=fp8_ds_mla", "--cache-gib", "1.5"])
    plain, rows = (model.arguments(backend, 0.5, model.forwarded(given)) for backend in given.backends)
    assert plain["kv_cache_dtype"] == "auto" and plain["kv_cache_memory_bytes"] == 3 * 2**29
    assert rows == plain | {"kv_cache_dtype": "fp8_ds_mla"}


def test_a_backend_may_name_that_of_the_layers_that_draft(monkeypatch):
    monkeypatch.setattr(vllm, "selected_names", lambda sparse: ("CUSTOM", "CUSTOM"))
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    given = parser.parse_args(["TSMLA", "TSMLA,drafts=TSMLA", "TSMLA,drafts=FLASHMLA", "--speculate", "mtp:3"])
    options = model.forwarded(given)
    chosen, own, other = (model.arguments(backend, 0.5, options) for backend in given.backends)
    drafted = chosen["speculative_config"]
    assert "attention_backend" not in drafted
    assert own == chosen | {"speculative_config": drafted | {"attention_backend": "CUSTOM"}}
    assert other == chosen | {"speculative_config": drafted | {"attention_backend": "FLASHMLA"}}
    seconds = {str(backend): [1.0] for backend in given.backends}
    rows = engine_tables.rows({"options": options, "results": [{"case": "4x64+2", "seconds": seconds}]})
    assert [row[0] for row in rows][0] == "vLLM 4 x 64 + 2, mtp 3, drafts by TSMLA, 16 heads, 24 layers, bf16 cache"


@pytest.mark.parametrize(
    "given, label",
    [
        (["TSMLA"], "auto-16-heads"),
        (["auto", "TSMLA,tensor_parallel_size=4", "--heads", "8", "--kv", "fp8"], "fp8-8-heads-4-gpus"),
        (["TSMLA", "--sparse", "--speculate", "mtp:3"], "auto-16-heads-sparse-mtp-3"),
    ],
)
def test_records_are_named_after_what_they_are_about(given, label):
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    assert model.label(parser.parse_args(given)) == label


def test_a_backend_on_several_gpus_is_compared_with_itself_on_one():
    several = Backend.parse("TSMLA,tensor_parallel_size=2")
    told = ["FLASHMLA", "FLASHMLA alone", "TSMLA", str(several)]
    assert list(tokens._pairs(several, told)) == [(str(several), "FLASHMLA"), (str(several), "TSMLA")]
    assert list(tokens._pairs(Backend.parse("TSMLA"), told)) == [("TSMLA", "FLASHMLA")]
    assert list(tokens._pairs(Backend.parse("FLASHMLA"), told)) == [("FLASHMLA alone", "FLASHMLA")]
    assert not list(tokens._pairs(Backend.parse("TRITON_MLA"), told))


class Started:
    """Stands in for an engine: notes when it is made and when it is up; one whose backend is BAD does not come up."""

    def __init__(self, backend, memory, options, patience):
        self.backend = backend
        NOTED.append(f"makes {backend}")

    def started(self):
        NOTED.append(f"waits for {self.backend}")
        if self.backend == "BAD":
            raise engine.EngineError("BAD: did not start")
        return self

    def close(self, seconds=60.0):
        NOTED.append(f"closes {self.backend}")


NOTED: list[str] = []


@pytest.mark.parametrize(
    "cache, noted",
    [
        (None, ["makes BAD", "waits for BAD", "closes BAD", "makes GOOD", "waits for GOOD"]),
        (2.0, ["makes BAD", "makes GOOD", "waits for BAD", "closes BAD", "waits for GOOD"]),
    ],
)
def test_engines_start_together_when_nothing_is_measured(monkeypatch, cache, noted):
    NOTED.clear()
    monkeypatch.setattr(engine, "Engine", Started)
    bad, good = engine.start_all(["BAD", "GOOD"], 0.5, {"cache_gib": cache}, 1.0)
    assert isinstance(bad, engine.EngineError) and good.backend == "GOOD"
    assert noted == NOTED


def test_speculation_is_a_method_and_a_number():
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    speculate = parser.parse_args(["auto", "--speculate", "mtp:3"]).speculate
    assert speculate == {"method": "mtp", "num_speculative_tokens": 3}
    for text in ("mtp", "mtp:", "mtp:x", "eagle:3"):
        with pytest.raises(SystemExit):
            parser.parse_args(["auto", "--speculate", text])


@pytest.mark.parametrize(
    "sparse, architecture, decode, call",
    [
        (False, "DeepseekV3ForCausalLM", "TSMLA", "vLLM 4 x 64 + 2, 16 heads, 24 layers, bf16 cache"),
        (
            True,
            "DeepseekV32ForCausalLM",
            "TSMLA_SPARSE",
            "vLLM 4 x 64 + 2, chosen keys, 16 heads, 24 layers, bf16 cache",
        ),
    ],
)
def test_a_sparse_model_chooses_its_keys(monkeypatch, sparse, architecture, decode, call):
    monkeypatch.setattr(vllm, "selected_names", lambda sparse: ("TSMLA_SPARSE" if sparse else "TSMLA", "TSMLA"))
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    given = parser.parse_args(["auto", "TSMLA", *["--sparse"] * sparse])
    options = model.forwarded(given)
    shape, attention = model.shape(options), model.attention(given.backends[1], options)
    assert shape["architectures"] == [architecture] and ("index_topk" in shape) == sparse
    assert attention == {"backend": decode, "mla_prefill_backend": "TSMLA", "use_prefill_query_quantization": False}
    assert model.label(given) == "auto-16-heads" + "-sparse" * sparse
    record = {"options": options, "results": [{"case": "4x64+2", "seconds": {"auto": [2.0], "TSMLA": [1.0]}}]}
    assert [row[0] for row in engine_tables.rows(record)] == [call]


def test_a_row_says_which_cache_and_how_many_gpus():
    options = {"heads": 12, "layers": 24, "kv": "auto"}
    ranks = "tensor_parallel_size=2,decode_context_parallel_size=2"
    seconds = {
        "TSMLA": [4.0],
        "TSMLA,kv_cache_dtype=fp8_ds_mla": [2.0],
        f"TSMLA,A=1,{ranks}": [5.0],
        "FLASHMLA": [1.0],
    }
    record = {"options": options, "results": [{"case": "4x64+2", "seconds": seconds}]}
    rows, ranks = engine_tables.rows(record)
    assert rows == [
        "vLLM 4 x 64 + 2, 12 heads, 24 layers, fp8_ds_mla cache", "", "4 tokens/s", "TSMLA, bf16 cache", "0.500", ""
    ]  # fmt: skip
    assert ranks[0] == "vLLM 4 x 64 + 2, 12 heads, 24 layers, bf16 cache, 2 GPUs, which share contexts, A=1"


def test_a_row_is_beside_the_backend_that_shares_work_among_gpus_as_it_does():
    tensors, contexts = "tensor_parallel_size=2", "tensor_parallel_size=2,decode_context_parallel_size=2"
    seconds = {
        f"FLASHMLA,{contexts}": [8.0],
        f"TSMLA,{contexts}": [4.0],
        f"FLASHMLA,{tensors}": [5.0],
        f"TSMLA,{tensors}": [4.0],
        f"TSMLA,{tensors},kv_cache_dtype=fp8": [2.0],
    }
    options = {"heads": 64, "layers": 24, "kv": "auto", "cached": True}
    record = {"options": options, "results": [{"case": "4x65+2", "seconds": seconds}]}
    shares, divides, quantises = engine_tables.rows(record)
    model_of = "vLLM 4 x 65 + 2, prompts cached, 64 heads, 24 layers, bf16 cache, 2 GPUs"
    assert shares == [f"{model_of}, which share contexts", "", "2 tokens/s", "FLASHMLA", "0.500", ""]
    assert divides == [model_of, "", "2 tokens/s", "FLASHMLA", "0.800", ""]
    assert quantises[3:] == ["FLASHMLA, bf16 cache", "0.250", ""]


def test_the_time_to_a_first_token_is_beside_the_fastest_backend_with_this_cache():
    rows_of = "kv_cache_dtype=fp8_ds_mla"
    seconds = {"SLOW": [4.0], "FAST": [2.0], f"FASTEST,{rows_of}": [0.5], "TSMLA": [1.0], f"TSMLA,{rows_of}": [1.5]}
    options = {"heads": 64, "layers": 12, "kv": "auto", "sparse": True, "dims": 256}
    bf16, rows = engine_tables.rows({"options": options, "results": [{"case": "1x65536+1", "seconds": seconds}]})
    call = "vLLM 1 x 65536, first token, chosen keys, 64 heads of 256 columns, 12 layers"
    assert bf16 == [f"{call}, bf16 cache", "1,000 ms", "", "FAST", "0.500", ""]
    assert rows == [f"{call}, fp8_ds_mla cache", "1,500 ms", "", "FASTEST", "3.000", ""]


@pytest.mark.parametrize(
    "backends, cache",
    [
        (["FLASHMLA", "TSMLA"], "auto"),
        (["FLASHMLA,kv_cache_dtype=fp8", "TSMLA,kv_cache_dtype=fp8"], "fp8"),
        (["TSMLA", "TSMLA,kv_cache_dtype=fp8"], "auto"),
    ],
)
def test_a_record_is_named_by_the_cache_that_all_backends_have(backends, cache):
    parser = argparse.ArgumentParser()
    throughput.add_arguments(parser)
    options = parser.parse_args([*backends, "--heads", "64", "--case", "1x64+1"])
    assert throughput._name(options) == f"vllm-first-token-{cache}-64-heads"


def test_a_row_is_of_the_last_record_that_has_it():
    options = {"heads": 64, "layers": 24, "kv": "fp8"}
    older, newer = (
        {
            "options": options,
            "results": [{"case": case, "seconds": {"FLASHMLA": [8.0], "TSMLA": [own]}} for case in cases],
        }
        for cases, own in ((("1x64+2", "4x64+2"), 8.0), (("4x64+2",), 4.0))
    )
    assert [row[4] for row in engine_tables.newest_rows([older, newer])] == ["1.000, tie", "0.500"]


class Asked:
    """Stands in for an engine: notes how many prompts it is given, and their seed."""

    def __init__(self, backend):
        self.backend = backend

    def generate(self, lengths, new, seed):
        NOTED.append(f"{self.backend}: {len(lengths)} of seed {seed}")
        return 1.0


@pytest.mark.parametrize(
    "cached, first, seeds", [(False, "2 of seed 0", (1, 2)), (True, "5 of seed 0", (0, 0))], ids=("new", "cached")
)
def test_rounds_have_new_prompts_unless_these_are_cached(cached, first, seeds):
    NOTED.clear()
    case = throughput.Case("5x64+2")
    assert throughput._case([Asked("A"), Asked("B")], case, rounds=2, cached=cached) == {
        "case": "5x64+2",
        "seconds": {"A": [1.0, 1.0], "B": [1.0, 1.0]},
    }
    assert NOTED[:2] == [f"A: {first}", f"B: {first}"]
    turns = [{f"{name}: 5 of seed {seed}" for name in "AB"} for seed in seeds]
    assert [set(NOTED[2:4]), set(NOTED[4:])] == turns


def test_a_model_keeps_prompts_in_its_cache_when_asked(monkeypatch):
    monkeypatch.setattr(vllm, "selected_names", lambda sparse: ("TSMLA", "TSMLA"))
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    for flags, kept in ([], False), (["--cached"], True):
        given = parser.parse_args(["TSMLA", *flags])
        assert model.arguments(given.backends[0], 0.5, model.forwarded(given))["enable_prefix_caching"] is kept


class _Started:
    """An engine whose first answer takes longer the first time that its caches are named."""

    known: ClassVar[set[str]] = set()
    ended = 0

    def __init__(self, backend: Backend, memory: float, options: dict, patience: float) -> None:
        folders = [backend.environment[name] for name in start.CACHES]
        self._cold = not self.known.issuperset(folders)
        self.known.update(folders)
        self.start_seconds = 3.0

    def started(self) -> _Started:
        return self

    def generate(self, lengths: list[int], new: int, seed: int) -> float:
        assert (lengths, new) == ([8], 1)
        return 2.0 if self._cold and seed == 0 else 0.5

    def close(self) -> None:
        type(self).ended += 1


def test_each_start_is_cold_and_then_warm(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "Engine", _Started)
    monkeypatch.setattr(start.runner, "certificate", lambda commit: {"device": "GPU", "date": "2026-11-28T00:00:00"})
    parser = argparse.ArgumentParser()
    start.add_arguments(parser)
    start.run(
        parser.parse_args(["FLASHMLA", "TSMLA,A=1", "--rounds", "2", "--prompt", "8", "--results", str(tmp_path)])
    )
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    assert list(results) == ["FLASHMLA", "TSMLA,A=1"] and _Started.ended == 8
    for states in results.values():
        assert [[once["first"] for once in states[state]] for state in start.STATES] == [[2.0, 2.0], [0.5, 0.5]]
        assert all(once["second"] == 0.5 and once["vllm"] == 3.0 for state in start.STATES for once in states[state])


def test_starts_that_were_cut_are_recorded(monkeypatch, tmp_path):
    """A later engine that does not start costs no earlier figures."""
    answers = iter([dict.fromkeys(start.STAGES, 1.0)])
    monkeypatch.setattr(start, "_started", lambda backend, options: next(answers))
    monkeypatch.setattr(start.runner, "certificate", lambda commit: {"device": "GPU", "date": "2026-11-28T00:00:00"})
    parser = argparse.ArgumentParser()
    start.add_arguments(parser)
    with pytest.raises(StopIteration):
        start.run(parser.parse_args(["TSMLA", "--results", str(tmp_path)]))
    (path,) = tmp_path.iterdir()
    assert [len(starts) for starts in json.loads(path.read_text())["results"]["TSMLA"].values()] == [1, 0]


class _Runner(sglang._Process):
    """A backend whose tokens part from the others' after three, and which is asked in turns."""

    asked: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, backend: Backend, memory: float, options: dict, patience: float) -> None:
        self.backend, self.start_seconds, self._ours = backend, 1.0, backend.name == "tsmla"

    def started(self) -> _Runner:
        if self.backend.name == "absent":
            raise engine.EngineError("absent: no such backend")
        return self

    def cut_tokens(self, lengths: list[int], cut: int, new: int) -> list[dict[str, list]]:
        own = [1, 2, 3, 9 if self._ours else 4][:new]
        return [{"tokens": own, "logprobs": [-1.0] * len(own)} for _ in lengths]

    def batch(self, case: throughput.Case, seed: int) -> tuple[float, float]:
        self.asked.append((self.backend.name, str(case), seed))
        return 9.0 if seed == 0 else 1.0, 2.0

    def close(self, seconds: float = 60.0) -> None: ...


def test_sglangs_backends_are_compared_with_the_first_and_take_turns(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sglang, "_Process", _Runner)
    monkeypatch.setattr(sglang.runner, "certificate", lambda commit: {"device": "GPU", "date": "2026-11-28T00:00:00"})
    parser = argparse.ArgumentParser()
    sglang.add_arguments(parser)
    flags = "fa3 tsmla absent --lengths 5 7 --new 4 --case 2x8+4 --rounds 2 --results"
    with pytest.raises(SystemExit):
        sglang.run(parser.parse_args([*flags.split(), str(tmp_path)]))
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["failed"] == {"absent": "absent: no such backend"}
    assert record["tokens"] == {"tsmla against fa3": [{"alike": 3, "within": 0.0}] * 2}
    assert record["results"] == [{"case": "2x8+4", "seconds": {name: [[1.0, 2.0]] * 2 for name in ("fa3", "tsmla")}}]
    assert sorted(_Runner.asked) == sorted((name, "2x8+4", turn) for turn in range(3) for name in ("fa3", "tsmla"))
    assert "6 of 8 tokens alike" in capsys.readouterr().out


def test_rows_of_sglang_count_prompts_and_steps():
    seconds = {"fa3": [[0.25, 0.75]], "tsmla": [[0.25, 0.25]]}
    options = {"kv": "auto", "heads": 16, "layers": 24}
    (row,) = engine_tables.rows({"options": options, "results": [{"case": "8x100+10", "seconds": seconds}]})
    assert row[0] == "SGLang 8 x 100 + 10, 16 heads, 24 layers, bf16 cache"
    assert row[2:5] == ["160 tokens/s", "fa3", "0.500"]
