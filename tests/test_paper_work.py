"""What workers find out for the paper's figures, as far as it needs no TPU compiler."""

from __future__ import annotations

import math

import pytest

from experiments.bench_sites import Sizes
from experiments.paper import sites
from experiments.paper.applications import applications, gpt_sizes
from experiments.paper.measurement import count
from experiments.paper.work import count as counting
from experiments.paper.work import einsum, rounding, training
from overlapfx.config import from_config_dict


@pytest.mark.slow
def test_a_bfloat16_accumulator_is_worse_and_the_more_so_in_larger_rings():
    sizes = {"tokens": 32, "hidden": 64, "width": 32}
    errors = {n: rounding.find({"num_devices": n, "sizes": sizes, "seed": 0})["errors"] for n in (2, 8)}
    for by_way in errors.values():
        assert set(by_way) == {f"{way}, {dtype}" for way in rounding.WAYS for dtype in rounding.ACCUMULATORS}
        for way in rounding.WAYS:
            assert by_way[f"{way}, float32"]["rms"] < 1e-6
            assert 1e-4 < by_way[f"{way}, bfloat16"]["rms"] < 1e-2
    assert errors[8]["ring one, bfloat16"]["rms"] > 1.2 * errors[2]["ring one, bfloat16"]["rms"]


@pytest.mark.parametrize("one", gpt_sizes(False)[:1] + gpt_sizes(True), ids=lambda one: one.name)
def test_parameters_are_those_of_the_real_module(one):
    model = one.config().model
    attention = 4 * model.d_model * model.num_heads * model.head_dim
    perceptron = (3 if model.gated else 2) * model.d_model * model.d_ff
    layer = attention + perceptron + 2 * model.d_model
    positions = model.seq_len * model.d_model if model.positions == "learned" else 0
    by_hand = model.num_layers * layer + (model.vocab_size + 1) * model.d_model + positions
    found = counting.find(count(one).task)
    assert found["num_params"] == by_hand
    assert 0 < found["model_flops"] <= found["hardware_flops"]


def test_rings_of_all_sizes_have_the_same_work_and_the_same_bytes():
    work, arrived = set(), set()
    for size in (2, 4, 8, 16, 32, 64):
        task = sites.ring("ring_gather", size, quick=False).task
        found = einsum.ring_sites(Sizes(**task["sizes"]), task["y"])
        for site in found.values():
            work.add(site.flops("forward") / (task["y"] * task["x"]))
        site = found["ring_gather"]
        lhs = math.prod(site.sizes[label] for label in "td") / task["y"]
        arrived.add(lhs)
    assert len(work) == len(arrived) == 1


def test_a_failed_run_says_why():
    with pytest.raises(ValueError, match=r"exit code 2: .*no_such_set"):
        training.find({"config_name": applications(True)[0].tiny, "changes": ["data.name=no_such_set"]})


def test_tasks_are_plain_values():
    for one in applications(True):
        assert from_config_dict(count(one).task["config"]) == one.config()
