"""Random weights of the engine benchmarks: which tensors a checkpoint has, and that all readers get the same."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from benchmarks.engines import model, weights


def shape(*arguments, **changed):
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    options = model.forwarded(parser.parse_args(["auto", "--heads", "4", "--layers", "2", *arguments]))
    return model.shape(options) | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128} | changed


def test_projections_join_what_attention_has():
    sizes = weights.sizes(shape())
    assert sizes["model.embed_tokens.weight"] == sizes["lm_head.weight"] == (128, 64)
    layer = {name.removeprefix("model.layers.1."): size for name, size in sizes.items() if ".layers.1." in name}
    assert layer["self_attn.q_b_proj.weight"] == (4 * (128 + 64), 1536)
    assert layer["self_attn.kv_a_proj_with_mqa.weight"] == (512 + 64, 64)
    assert layer["self_attn.kv_b_proj.weight"] == (4 * (128 + 128), 512)
    assert layer["self_attn.o_proj.weight"] == (64, 4 * 128)
    assert not any("layers.2." in name or "indexer" in name for name in sizes)


def test_wide_heads_have_the_dims_of_glm_5():
    wide = shape("--dims", "256", "--sparse")
    assert wide["index_n_heads"] == 32
    assert weights.sizes(wide)["model.layers.0.self_attn.kv_b_proj.weight"] == (4 * (192 + 256), 512)


def test_an_indexer_and_a_drafting_layer_have_weights_where_the_model_has_them():
    sizes = weights.sizes(shape("--sparse", "--speculate", "mtp:3"))
    drafting = {name.removeprefix("model.layers.2.") for name in sizes if ".layers.2." in name}
    assert {"eh_proj.weight", "shared_head.head.weight", "self_attn.indexer.wq_b.weight"} <= drafting
    assert sizes["model.layers.0.self_attn.indexer.k_norm.bias"] == (128,)
    assert "model.layers.0.eh_proj.weight" not in sizes


def test_values_depend_on_nothing_but_the_tensor():
    few = dict(weights.drawn(shape(), torch.float32, torch.device("cpu")))
    more = dict(weights.drawn(shape(num_hidden_layers=3), torch.float32, torch.device("cpu")))
    assert few.keys() < more.keys() and all(few[name].equal(more[name]) for name in few)
    assert not few["model.layers.0.self_attn.o_proj.weight"].equal(few["model.layers.1.self_attn.o_proj.weight"])


@pytest.mark.parametrize(
    "name, spread",
    [
        ("model.embed_tokens.weight", 1),
        ("model.layers.0.mlp.down_proj.weight", 1 / math.sqrt(96)),
        ("model.layers.0.self_attn.q_b_proj.weight", 3 / math.sqrt(1536)),
    ],
)
def test_products_keep_their_variance_and_queries_are_larger(name, spread):
    drawn = dict(weights.drawn(shape(), torch.float32, torch.device("cpu")))
    assert drawn[name].std().item() == pytest.approx(spread, rel=0.03)


def test_norms_change_nothing():
    drawn = dict(weights.drawn(shape("--sparse"), torch.bfloat16, torch.device("cpu")))
    flat = {name: set(values.tolist()) for name, values in drawn.items() if values.ndim == 1}
    assert set(map(frozenset, flat.values())) == {frozenset({1.0}), frozenset({0.0})}
    assert all(values == {0.0} for name, values in flat.items() if name.endswith("bias"))


def test_rows_of_the_head_differ_in_size():
    drawn = dict(weights.drawn(shape(), torch.float32, torch.device("cpu")))
    largest = drawn["lm_head.weight"].abs().amax(1)
    assert largest.max() / largest.median() > 3
    others = drawn["model.layers.0.self_attn.o_proj.weight"].abs().amax(1)
    assert others.max() / others.median() < 1.1
