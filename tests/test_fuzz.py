"""Random configs and command lines: they train, or they are refused in one sentence before anything happens."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pathlib
import tempfile

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import launch.train
from configs import gpt
from launch import cli, doctor, plan, session
from overlapfx.config import DataConfig, from_config_dict, to_dict
from overlapfx.fields import Choices, Range, _hints
from overlapfx.train import data, documents
from overlapfx.train.metrics import read_metrics

SMALL = {
    "model.d_model": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 4,
    "model.d_ff": 16,
    "model.seq_len": 8,
    "mesh.y": 4,
    "mesh.x": 2,
    "data.global_batch": 8,
    "optimizer.warmup_steps": 1,
    "train.num_steps": 2,
    "train.eval_batches": 1,
    "sample.num_tokens": 0,
}


class Started(BaseException):
    """Something was begun that should have been refused; no handler of the program may catch it."""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch) -> None:
    """The command runs here, on the devices that are there, with data that needs no preparation."""
    source = documents.TextSource("toy", [{"text": bytes(range(1, 250)) * 3} for _ in range(8)])
    monkeypatch.setattr(data, "make_source", lambda *_: source)
    for module in (launch.train, doctor, plan):
        monkeypatch.setattr(module, "prepare", lambda *_: {}, raising=False)
    monkeypatch.setattr(session, "report", lambda *_: None)


def run(main: object, argv: list[str]) -> tuple[int, str]:
    """Exit code and what was said on standard error."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as left:
            code = left.code
    return code, said.getvalue()


def train(run_dir: pathlib.Path, fields: dict[str, object]) -> tuple[int, str]:
    overrides = [f"--config.{name}={value}" for name, value in (SMALL | fields).items()]
    return run(launch.train.main, ["--config=configs/gpt.py:tiny", f"--run_dir={run_dir}", *overrides])


def is_one_sentence(said: str) -> bool:
    return said.startswith("overlapfx ") and said.count("\n") == 1 and "Traceback" not in said and len(said) < 2000


@contextlib.contextmanager
def nothing_may_start():
    """Neither a mesh is made nor a compiler called; yields a folder that must stay empty."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:

        def started(*_: object, **__: object) -> None:
            raise Started

        patch.setattr(session, "make_mesh", started)
        patch.setattr(jax.stages.Lowered, "compile", started)
        here = pathlib.Path(folder)
        patch.chdir(here)
        yield here
        assert list(here.iterdir()) == []


SIZES = st.fixed_dictionaries(
    {},
    optional={
        "model.d_model": st.sampled_from([8, 16, 24, 20, 7]),
        "model.num_layers": st.integers(1, 2),
        "model.num_heads": st.sampled_from([1, 2, 4, 6]),
        "model.num_kv_heads": st.sampled_from([1, 2, 4]),
        "model.head_dim": st.sampled_from([2, 4, 5]),
        "model.d_ff": st.sampled_from([16, 18, 15]),
        "model.seq_len": st.integers(1, 9),
        "model.vocab_size": st.sampled_from([256, 258, 255, 301]),
        "model.positions": st.sampled_from(["rotary", "learned"]),
        "model.activation": st.sampled_from(["gelu", "relu", "silu"]),
        "model.gated": st.booleans(),
        "model.dropout": st.sampled_from([0.0, 0.3]),
        "model.remat": st.sampled_from(["none", "all", "attention"]),
        "model.compute_dtype": st.sampled_from(["float32", "bfloat16"]),
        "mesh.replica": st.sampled_from([1, 2]),
        "mesh.y": st.sampled_from([1, 2, 4, 8]),
        "mesh.x": st.sampled_from([1, 2, 4, 8]),
        "data.global_batch": st.sampled_from([8, 16, 12]),
        "optimizer.grad_accum": st.sampled_from([1, 2]),
        "optimizer.clip_norm": st.floats(1e-3, 10),
        "optimizer.b1": st.floats(0, 0.99),
        "overlap.mode": st.sampled_from(["auto", "on", "off"]),
        "overlap.method": st.sampled_from(["auto", "ring", "stripe", "prefetch", "exchange", "blocking"]),
        "overlap.direction": st.sampled_from(["auto", "one", "two", "two_whole"]),
        "overlap.unroll": st.sampled_from([1, 2]),
        "overlap.accum_dtype": st.sampled_from(["float32", "bfloat16"]),
        "train.step_timeout_s": st.sampled_from([0.0, 600.0]),
    },
)
FITTING = {"mesh.y": 2, "mesh.x": 4, "model.num_heads": 4, "model.num_kv_heads": 4, "overlap.mode": "on"}


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(SIZES)
@example(FITTING | {"model.compute_dtype": "bfloat16", "model.remat": "all", "model.gated": False})
@example({"mesh.replica": 2, "mesh.y": 2, "optimizer.grad_accum": 2, "model.positions": "learned"})
def test_random_configs_train_two_steps_or_are_refused(fields: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = pathlib.Path(folder) / "run"
        code, said = train(run_dir, fields)
        if code == 2:
            assert is_one_sentence(said), said
            assert not run_dir.exists()
            return
        assert code == 0, said
        records = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "train"]
        assert [r["step"] for r in records] == [1, 2]
        assert all(math.isfinite(r["loss"]) and not r["skipped"] for r in records)


def fields_of(section: object, prefix: str = "") -> dict[str, object]:
    """Dotted name -> type hint of every field of a config."""
    found = {}
    for name, hint in _hints(type(section)):
        value = getattr(section, name)
        if hasattr(value, "__dataclass_fields__") and name != "overlap":
            found |= fields_of(value, f"{prefix}{name}.")
        elif name != "overlap":
            found[f"{prefix}{name}"] = hint
    return found


FIELDS = fields_of(from_config_dict(gpt.get_config("tiny")))
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


def illegal(hint: object) -> st.SearchStrategy[str]:
    """Texts that are no legal value of a field."""
    kind, *legal = (hint.__origin__, *hint.__metadata__) if hasattr(hint, "__metadata__") else (hint,)
    if kind is bool:
        return WORDS.filter(lambda text: text.lower() not in ("true", "false"))
    if kind in (int, float):
        (bounds,) = [rule for rule in legal if isinstance(rule, Range)]
        below = st.integers(-(10**9), math.ceil(bounds.low) - 1).map(str)
        if bounds.high < math.inf:
            below |= st.integers(math.floor(bounds.high) + 1, 10**12).map(str)
        words = WORDS.filter(lambda text: not is_number(text, kind))
        return below | words | st.sampled_from(["nan", "inf", "-inf", "1e999", "", "1,5", "0x10", "None", "[1]"])
    choices = [rule for rule in legal if isinstance(rule, Choices)]
    return WORDS.filter(lambda text: text not in choices[0].values) if choices else st.nothing()


def is_number(text: str, kind: type) -> bool:
    with contextlib.suppress(ValueError):
        kind(text)
        return True
    return False


NAMED = st.sampled_from(sorted(FIELDS)).filter(lambda name: FIELDS[name] is not str)
ILLEGAL = NAMED.flatmap(lambda name: st.tuples(st.just(name), illegal(FIELDS[name])))


@settings(max_examples=150, deadline=None)
@given(ILLEGAL)
@example(("name", "../escape"))
@example(("name", "/etc/passwd"))
@example(("name", ".."))
@example(("data.name", "../../etc/passwd"))
@example(("data.name", "/etc/passwd"))
@example(("data.name", "a/../../b"))
@example(("overlap.mode", "__import__('os').system('true')"))
@example(("overlap.sites", "__import__('os')"))
@example(("overlap.sites", '{"mlp.up": 3}'))
@example(("overlap.sites", '{"mlp.up": {"mode": "never"}}'))
@example(("model.no_such_field", "1"))
@example(("model", "{}"))
@example(("model.d_model.deeper", "1"))
@example(("mesh.x", "3"))
def test_illegal_values_are_refused_before_anything_starts(field_and_value: tuple[str, str]) -> None:
    field, value = field_and_value
    with nothing_may_start() as here:
        code, said = train(here / "run", {field: value})
    assert code == 2, (field, value, said)
    assert is_one_sentence(said) or "\n" in value or not value.isprintable(), (field, value, said)
    assert "Traceback" not in said


ARGUMENTS = st.lists(
    WORDS
    | st.builds("--{}={}".format, st.sampled_from(["config", "run_dir", "devices", "topology", "config.mesh.x"]), WORDS)
    | st.sampled_from(["--config=configs/gpt.py:tiny", "--config", "--devices", "-h", "--check-replicas", "--", "-"]),
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["train", "doctor", "plan", "", "no-such-command"]) | WORDS, ARGUMENTS)
@example("train", ["--config=" + "a" * 5000])
@example("train", ["--config=\x00"])
@example("train", ["--config=configs"])
@example("train", ["--config=/etc/passwd"])
@example("train", ["--config=configs/gpt.py:../tiny"])
@example("plan", ["--config=configs/gpt.py:tiny", "--topology=" + "9" * 400])
def test_random_command_lines_end_without_a_traceback(command: str, argv: list[str]) -> None:
    with nothing_may_start(), pytest.MonkeyPatch.context() as patch:
        # A command line that happens to be right may begin; that is where this test ends.
        patch.setattr(plan, "plan", lambda *_: 0)
        patch.setattr(doctor, "examine", lambda *_: iter(()))
        try:
            code, said = run(cli.main, [command, *argv])
        except Started:
            return
    assert code in (0, 2), said
    assert "Traceback" not in said
    if code == 2:
        assert said.strip(), (command, argv)


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab./:_-~\\ \n"), max_size=10))
def test_names_of_data_sets_stay_below_the_data_directory(name: str) -> None:
    plain = to_dict(from_config_dict(gpt.get_config("tiny")).data) | {"name": name}
    try:
        config = DataConfig(**plain)
    except ValueError:
        return
    below = os.path.normpath(os.path.join("/data", config.name.replace(":", "/")))
    assert below.startswith("/data/") and ".." not in config.name.split("/")


def test_a_config_survives_its_json_form() -> None:
    config = from_config_dict(gpt.get_config("tiny"))
    assert from_config_dict(json.loads(json.dumps(to_dict(config)))) == config
