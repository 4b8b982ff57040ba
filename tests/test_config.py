"""Configs are checked from their values alone: every refusal names the field, its value, the remedy (C16)."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import gpt
from overlapfx.config import Config, Overlap, from_config_dict, to_dict, validate
from overlapfx.fields import Choices, Range, check_field

TINY = gpt.get_config("tiny").to_dict()


def tiny(**changes: Any) -> dict[str, Any]:
    """The tiny config as plain dicts with some fields changed, for example `tiny(**{"mesh.x": 4})`."""
    values = copy.deepcopy(TINY)
    for field, value in changes.items():
        *groups, last = field.split(".")
        group = values
        for name in groups:
            group = group[name]
        group[last] = value
    return values


def refusal(values: Any) -> str:
    """The one sentence with which a config is refused."""
    with pytest.raises(ValueError, match=r".") as error:
        from_config_dict(values)
    sentence = str(error.value)
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence, sentence
    return sentence


def test_tiny_reads_into_frozen_dataclasses() -> None:
    config = from_config_dict(gpt.get_config())
    assert (config.name, config.seed) == ("gpt_tiny", 0)
    assert (config.mesh.y, config.mesh.x, config.mesh.replica, config.mesh.num_devices) == (4, 2, 1, 8)
    assert config.overlap == Overlap("on")
    assert hash(config) == hash(from_config_dict(TINY))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mesh.x = 4  # type: ignore[misc]


def test_tiny_has_the_intended_size() -> None:
    model = from_config_dict(TINY).model
    attention = 4 * 128 * 128
    mlp = 3 * 128 * 512
    assert (model.d_model, model.num_heads * model.head_dim, model.d_ff, model.gated) == (128, 128, 512, True)
    assert 500_000 < model.num_layers * (attention + mlp) + 256 * 128 < 3_000_000


# The table "Models" of the paper's specification, by hand: layers, M, F, heads, batch, chips, (y, x), recomputation.
TABLE = {
    "32B": (40, 8192, 32768, 64, 512, 64, (16, 4), "attention"),
    "64B": (51, 10240, 40960, 80, 512, 128, (16, 8), "attention"),
    "128B": (71, 12288, 49152, 96, 1024, 256, (64, 4), "all"),
    "256B": (80, 16384, 65536, 128, 2048, 512, (64, 8), "all"),
    "512B": (102, 20480, 81920, 160, 4096, 1024, (64, 16), "all"),
    "1024B": (142, 24576, 98304, 192, 4096, 2048, (256, 8), "all"),
}


@pytest.mark.parametrize("name", TABLE)
def test_published_sizes(name: str) -> None:
    config = from_config_dict(gpt.get_config(name))
    model, mesh = config.model, config.mesh
    row = (
        model.num_layers,
        model.d_model,
        model.d_ff,
        model.num_heads,
        config.data.global_batch,
        mesh.num_devices,
        (mesh.y, mesh.x),
        model.remat,
    )
    assert row == TABLE[name]
    assert (model.head_dim, model.num_kv_heads, model.vocab_size, model.seq_len) == (128, model.num_heads, 32000, 1024)
    assert (model.activation, model.gated, model.compute_dtype) == ("gelu", False, "bfloat16")


def test_all_names_of_the_file_are_tested() -> None:
    assert set(gpt.PUBLISHED) == set(TABLE)
    names = "tiny, 1B, 32B, 64B, 128B, 256B, 512B, 1024B, meena_500B"
    with pytest.raises(ValueError, match=rf"no config '16B'; choose one of {names}\."):
        gpt.get_config("16B")


@pytest.mark.parametrize("name", ["tiny", *TABLE])
def test_overlap_group_lists_every_field(name: str) -> None:
    # A field that the file does not list could not be set on the command line.
    row_stripes = 8 if name in ("32B", "128B", "256B") else 4
    full = {"row_stripes": row_stripes, "save_gathered": True, "accum_dtype": "bfloat16"}
    own = {"mode": "on"} if name == "tiny" else full
    assert gpt.get_config(name).overlap.to_dict() == to_dict(Overlap()) | own


# (changes, start of the sentence, nearest legal values); all by hand.
NOT_DIVISIBLE = [
    # C16: 2 KV heads over 4-way x; a vocabulary of 50257 over 8.
    (
        {"mesh.x": 4, "model.num_heads": 8, "model.num_kv_heads": 2},
        "model.num_kv_heads is 2, which does not divide over mesh axis x of size 4",
        "4",
    ),
    (
        {"mesh.x": 8, "model.num_heads": 8, "model.num_kv_heads": 8, "model.vocab_size": 50257},
        "model.vocab_size is 50257, which does not divide over mesh axis x of size 8",
        "50256 and 50264",
    ),
    (
        {"model.vocab_size": 257},
        "model.vocab_size is 257, which does not divide over mesh axis x of size 2",
        "256 and 258",
    ),
    ({"model.vocab_size": 255}, "model.vocab_size is 255, which does not divide over mesh axis x of size 2", "256"),
    ({"model.d_model": 126}, "model.d_model is 126, which does not divide over mesh axis y of size 4", "124 and 128"),
    ({"model.d_model": 127}, "model.d_model is 127, which does not divide over mesh axis x of size 2", "124 and 128"),
    ({"model.d_model": 3}, "model.d_model is 3, which does not divide over mesh axis x of size 2", "4"),
    # 100 divides over x = 4 and not over y = 3; legal are the multiples of 12.
    (
        {"mesh.x": 4, "mesh.y": 3, "model.d_model": 100},
        "model.d_model is 100, which does not divide over mesh axis y of size 3",
        "96 and 108",
    ),
    ({"model.d_ff": 511}, "model.d_ff is 511, which does not divide over mesh axis x of size 2", "510 and 512"),
    (
        {"model.num_heads": 3, "model.num_kv_heads": 3},
        "model.num_heads is 3, which does not divide over mesh axis x of size 2",
        "2 and 4",
    ),
    (
        {"mesh.x": 1, "model.num_heads": 12, "model.num_kv_heads": 5},
        "model.num_kv_heads is 5, which does not divide over the 12 query heads",
        "4 and 6",
    ),
    # 4 divides over x = 2 but 6 query heads do not share 4 evenly; 2 and 6 do.
    (
        {"model.num_heads": 6, "model.num_kv_heads": 4},
        "model.num_kv_heads is 4, which does not divide over the 6 query heads",
        "2 and 6",
    ),
    ({"model.num_kv_heads": 8}, "model.num_kv_heads is 8, which does not divide over the 4 query heads", "4"),
    ({"model.head_dim": 33}, "model.head_dim is 33, which does not divide over the two halves", "32 and 34"),
    (
        {"data.global_batch": 30},
        "data.global_batch is 30, which does not divide over mesh.replica * mesh.y * optimizer.grad_accum = 1 * 4 * 1",
        "28 and 32",
    ),
    (
        {"mesh.replica": 2, "optimizer.grad_accum": 3, "data.global_batch": 32},
        "data.global_batch is 32, which does not divide over mesh.replica * mesh.y * optimizer.grad_accum = 2 * 4 * 3",
        "24 and 48",
    ),
    ({"data.global_batch": 2}, "data.global_batch is 2, which does not divide over mesh.replica", "4"),
]


@pytest.mark.parametrize(("changes", "start", "nearest"), NOT_DIVISIBLE)
def test_sizes_that_do_not_divide_are_refused(changes: dict[str, Any], start: str, nearest: str) -> None:
    sentence = refusal(tiny(**changes))
    assert sentence.startswith(start)
    assert sentence.endswith(f"; the nearest legal {'values are' if ' and ' in nearest else 'value is'} {nearest}.")


@given(
    x=st.integers(1, 16),
    y=st.integers(1, 16),
    d_model=st.integers(1, 300),
    d_ff=st.integers(1, 300),
    heads=st.integers(1, 40),
    kv_heads=st.integers(1, 40),
    vocab=st.integers(1, 600),
    batch=st.integers(1, 100),
)
def test_every_suggested_value_is_legal_for_its_field(x: int, y: int, **sizes: int) -> None:
    """Taking one suggestion after another always ends in a legal config, and legal configs divide evenly."""
    names = {
        "d_model": "model.d_model",
        "d_ff": "model.d_ff",
        "heads": "model.num_heads",
        "kv_heads": "model.num_kv_heads",
        "vocab": "model.vocab_size",
        "batch": "data.global_batch",
    }
    values = tiny(**{"mesh.x": x, "mesh.y": y, **{names[name]: size for name, size in sizes.items()}})
    # One sentence per field at most, and the number of query heads may move the number of KV heads once.
    for _ in range(len(names) + 1):
        try:
            config = from_config_dict(values)
            break
        except ValueError as error:
            sentence = str(error)
        group, field = sentence.split(" ")[0].split(".")
        values[group][field] = int(sentence.rstrip(".").split(" ")[-1])
    model = config.model
    over_x = (model.d_model, model.d_ff, model.num_heads, model.num_kv_heads, model.vocab_size)
    assert all(size % x == 0 for size in over_x)
    assert model.d_model % y == 0
    assert model.num_heads % model.num_kv_heads == 0
    assert config.data.global_batch % y == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mesh.x": 0}, "mesh.x is 0; it must be at least 1."),
        ({"mesh.y": -2}, "mesh.y is -2; it must be at least 1."),
        ({"mesh.x": "4"}, "mesh.x is '4'; it must be an integer."),
        ({"mesh.x": 2.0}, "mesh.x is 2.0; it must be an integer."),
        ({"mesh.x": True}, "mesh.x is True; it must be an integer."),
        ({"seed": -1}, "seed is -1; it must be at least 0 and at most 2147483647."),
        ({"name": "a/b"}, "name is 'a/b'; use letters, digits, '.', '_' or '-' only: it names a directory."),
        ({"name": 3}, "name is 3; it must be text."),
        ({"model.gated": 1}, "model.gated is 1; it must be True or False."),
        ({"model.family": "gtp"}, "model.family is 'gtp'; it must be one of gpt, bert, t5, moe, conformer."),
        ({"model.family": 1}, "model.family is 1; it must be text."),
        (
            {"model.target_len": 4},
            "model.target_len is not a field; the fields there are family, vocab_size, num_layers, d_model, d_ff, "
            "num_heads, num_kv_heads, head_dim, seq_len, positions, activation, gated, dropout, remat, compute_dtype.",
        ),
        (
            {"model.family": "bert"},
            "sample.num_tokens is 200, but a model of the family bert does not continue text; use 0.",
        ),
        ({"model.remat": "some"}, "model.remat is 'some'; it must be one of none, all, attention."),
        ({"model.positions": "alibi"}, "model.positions is 'alibi'; it must be one of rotary, learned."),
        ({"model.activation": "tanh"}, "model.activation is 'tanh'; it must be one of gelu, relu, silu."),
        ({"model.compute_dtype": "fp8"}, "model.compute_dtype is 'fp8'; it must be one of bfloat16, float32."),
        ({"model.dropout": 1.0}, "model.dropout is 1.0; it must be at least 0 and below 1."),
        ({"model.dropout": -0.1}, "model.dropout is -0.1; it must be at least 0 and below 1."),
        ({"model.vocab_size": 254}, "model.vocab_size is 254, less than the 256 byte values; use 256."),
        ({"data.num_workers": -1}, "data.num_workers is -1; it must be at least 0."),
        ({"optimizer.learning_rate": 0.0}, "optimizer.learning_rate is 0.0; it must be above 0."),
        ({"optimizer.learning_rate": math.nan}, "optimizer.learning_rate is nan; it must be a finite number."),
        ({"optimizer.clip_norm": math.inf}, "optimizer.clip_norm is inf; it must be a finite number."),
        ({"optimizer.final_lr_ratio": 1.5}, "optimizer.final_lr_ratio is 1.5; it must be at least 0 and at most 1."),
        ({"optimizer.b2": 1}, "optimizer.b2 is 1; it must be at least 0 and below 1."),
        ({"optimizer.grad_accum": 0}, "optimizer.grad_accum is 0; it must be at least 1."),
        (
            {"optimizer.warmup_steps": 301},
            "optimizer.warmup_steps is 301, more than train.num_steps = 300; use at most 300.",
        ),
        ({"train.log_every": 0}, "train.log_every is 0; it must be at least 1."),
        ({"sample.temperature": -1.0}, "sample.temperature is -1.0; it must be at least 0."),
        ({"overlap.mode": "yes"}, "overlap.mode is 'yes'; choose one of auto, on, off."),
        ({"overlap.sites": [1]}, "overlap.sites is [1]; it must be a group of groups of fields."),
        ({"overlap.sites": {"mlp.up": "off"}}, "overlap.sites['mlp.up'] is 'off'; it must be a group of fields."),
        ({"overlap.unroll": 3}, "overlap.unroll is 3; choose one of 1, 2."),
        ({"mesh": 8}, "mesh is 8; it must be a group of fields."),
        ({"mesh.z": 2}, "mesh.z is not a field; the fields there are y, x, replica."),
        (
            {"steps": 2},
            "steps is not a field; "
            "the fields there are name, seed, model, mesh, data, optimizer, train, overlap, sample.",
        ),
    ],
)
def test_illegal_values_are_refused(changes: dict[str, Any], sentence: str) -> None:
    assert refusal(tiny(**changes)) == sentence


@pytest.mark.parametrize(
    "field", ["seed", "model", "model.family", "model.d_ff", "mesh.x", "optimizer.clip_norm", "sample.prompt"]
)
def test_a_missing_field_is_refused(field: str) -> None:
    values = tiny()
    *groups, last = field.split(".")
    group = values
    for name in groups:
        group = group[name]
    del group[last]
    assert refusal(values) == f"{field} is missing; every field of the config must be given."


def test_fields_with_defaults_may_be_left_out() -> None:
    values = tiny()
    del values["mesh"]["replica"]
    values["overlap"] = {"mode": "off"}
    config = from_config_dict(values)
    assert config.mesh.replica == 1
    assert config.overlap == Overlap(mode="off")


def test_not_a_config_at_all() -> None:
    assert refusal(None) == "The config is None; it must be a group of fields."


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh.x": 1, "mesh.y": 1},
        {"mesh.x": 4, "mesh.y": 2, "model.num_kv_heads": 4},
        {"model.num_kv_heads": 2},
        {"model.positions": "learned", "model.head_dim": 33},
        {"optimizer.grad_accum": 4, "mesh.replica": 1},
        {"optimizer.warmup_steps": 300},
        {"optimizer.learning_rate": 1},
        {"sample.temperature": 0},
    ],
)
def test_legal_values_are_accepted(changes: dict[str, Any]) -> None:
    validate(from_config_dict(tiny(**changes)))


@pytest.mark.parametrize("name", ["tiny", *TABLE])
def test_round_trip_through_json(name: str) -> None:
    config = from_config_dict(gpt.get_config(name))
    plain = to_dict(config)
    assert plain == gpt.get_config(name).to_dict()
    assert from_config_dict(json.loads(json.dumps(plain, allow_nan=False))) == config


def test_round_trip_keeps_sites() -> None:
    sites = {"mlp.up": {"mode": "off"}, "attention.out": {"method": "ring", "unroll": 1}}
    config = from_config_dict(tiny(**{"overlap.sites": sites}))
    assert config.overlap.at("mlp.up").mode == "off"
    assert to_dict(config)["overlap"]["sites"] == sites
    assert from_config_dict(to_dict(config)) == config


def test_every_field_of_the_config_is_typed_in_its_group() -> None:
    groups = {f.name for f in dataclasses.fields(Config)} - {"name", "seed"}
    assert groups == {"model", "mesh", "data", "optimizer", "train", "overlap", "sample"}


@pytest.mark.parametrize(
    ("legal", "inside", "outside"),
    [
        (Range(1), [1, 2, 1e9], [0, 0.5, -1]),
        (Range(0, open_low=True), [1e-9, 1], [0, -1]),
        (Range(0, 1, open_high=True), [0, 0.5], [1, 1.5, -0.1]),
        (Range(0, 1), [0, 1], [-0.1, 1.1]),
        (Choices(("a", "b")), ["a", "b"], ["c", ""]),
    ],
)
def test_legal_sets(legal: Any, inside: list[Any], outside: list[Any]) -> None:
    assert all(value in legal for value in inside)
    assert not any(value in legal for value in outside)


def test_check_field_accepts_what_it_should() -> None:
    check_field("a.b", 1, float)
    check_field("a.b", "text", str)
    check_field("a.b", False, bool)
