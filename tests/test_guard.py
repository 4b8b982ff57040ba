"""Numbers that are not finite never reach the state; too many of them, or a spike, never go unsaid."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from gpt_harness import batch, make_run
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.guard import Guard, split_metrics
from overlapfx.train.replicas import check_replicas
from overlapfx.train.stops import EXIT_DIVERGED, NumericalError

NAMES = ["blocks.mlp.up", "embed.table"]


def bits(tree: object) -> list[np.ndarray]:
    def plain(leaf: jax.Array) -> jax.Array:
        return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return [np.array(plain(leaf)) for leaf in jax.tree.leaves(tree)]


def copy(state: object) -> object:
    """A step may reuse the memory of its argument."""
    return jax.tree.map(jax.numpy.copy, state)


def poisoned(params: dict, value: float) -> dict:
    """Parameters whose final norm makes the loss `value`, or its gradient overflow."""

    def fill(scale: jax.Array) -> jax.Array:
        return jax.device_put(np.full(scale.shape, value, np.float32), scale.sharding)

    return params | {"final_norm": jax.tree.map(fill, params["final_norm"])}


@pytest.fixture(scope="module")
def run():
    return make_run(2, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_broken_step_leaves_the_state_as_it_was(run, value: float) -> None:
    start = dataclasses.replace(run.state, params=poisoned(run.state.params, value))
    before = bits(start)
    after, metrics = run.train_step(copy(start), run.place(batch(0)))
    scalars, finite = split_metrics(metrics)
    assert scalars["skipped"] == 1
    assert not np.isfinite(scalars["loss"]) or not np.isfinite(scalars["grad_norm"])
    assert finite.shape == (len(run.model.names()),) and not finite.all()
    for old, new in zip(before, bits(after), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_good_step_is_applied(run) -> None:
    state = copy(run.state)
    after, metrics = run.train_step(state, run.place(batch(0)))
    scalars, finite = split_metrics(metrics)
    assert scalars["skipped"] == 0 and finite.all()
    assert int(after.step) == 1
    again, _ = run.train_step(after, run.place(batch(1)))
    assert int(again.step) == 2


def values(loss: float, skipped: bool = False, **more: float) -> dict[str, float]:
    return {"loss": loss, "grad_norm": 1.0, "skipped": float(skipped), **more}


def feed(guard: Guard, step: int, found: dict[str, float], finite: list[bool]) -> list[str]:
    notes: list[str] = []
    flagged = found | guard.flags(found["loss"])
    guard.check(step, flagged, np.array(finite), notes.append)
    return notes


def test_skips_are_said_and_bounded() -> None:
    guard = Guard(NAMES, max_skipped=2)
    assert feed(guard, 1, values(3.0), [True, True]) == []
    (note,) = feed(guard, 2, values(np.nan, True), [True, False])
    assert (
        "step 2: batch 1 gives a loss of nan and gradients that are not finite for embed.table; update skipped" in note
    )
    assert feed(guard, 3, values(np.inf, True), [False, False])
    assert feed(guard, 4, values(3.0), [True, True]) == []  # counted in a row only
    feed(guard, 5, values(np.nan, True), [True, False])
    feed(guard, 6, values(np.nan, True), [True, False])
    with pytest.raises(NumericalError) as error:
        feed(guard, 7, values(np.nan, True), [False, True])
    sentence = str(error.value)
    assert error.value.exit_code == EXIT_DIVERGED
    assert (
        sentence.startswith("Step 7: batch 6 gives") and "blocks.mlp.up" in sentence and "embed.table" not in sentence
    )
    assert "train.max_skipped_steps is 2" in sentence and "\n" not in sentence


def test_none_allowed_stops_at_the_first() -> None:
    with pytest.raises(NumericalError, match="number 1 in a row"):
        feed(Guard(NAMES, max_skipped=0), 1, values(np.nan, True), [True, True])


def test_spikes_are_flagged() -> None:
    guard = Guard(NAMES, max_skipped=0)
    chance = np.random.default_rng(0)
    for step in range(1, 60):
        assert feed(guard, step, values(3 - 0.01 * step + 0.02 * chance.normal()), [True, True]) == []
    (note,) = feed(guard, 60, values(5.0), [True, True])
    assert note.startswith("step 60: the loss 5.0000 of batch 59 is a spike")
    assert guard.flags(2.4) == {"loss_spike": 0.0}


def test_the_first_losses_and_plateaus_are_no_spikes() -> None:
    guard = Guard(NAMES, max_skipped=0)
    assert not any(guard.flags(loss)["loss_spike"] for loss in [1.0, 50.0, 2.0])
    guard = Guard(NAMES, max_skipped=0)
    assert not any(guard.flags(loss)["loss_spike"] for loss in [1.0] * 40 + [1.05])


def spread(values: np.ndarray, spec: P) -> jax.Array:
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(values, NamedSharding(mesh, spec))


def with_fault(array: jax.Array, device: int) -> jax.Array:
    """One flipped bit in what one device holds."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[device].view(np.uint8).reshape(-1)[0] ^= 1
    placed = [jax.device_put(data, s.device) for data, s in zip(shards, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


@pytest.mark.parametrize(("spec", "device", "found"), [(P(), 5, True), (P("x"), 6, True), (P(("y", "x")), 3, False)])
def test_replicas_that_differ_are_named(spec: P, device: int, found: bool) -> None:
    good = {"params": {"w": spread(np.arange(16, dtype=np.float32), spec)}, "key": jax.random.key(0)}
    check_replicas(3, good)
    bad = {"params": {"w": with_fault(good["params"]["w"], device)}, "key": good["key"]}
    if not found:  # every device has its own part: there is nothing to compare with
        return check_replicas(3, bad)
    with pytest.raises(
        NumericalError, match=r"^Step 3: .* hold different values of params\.w, which should be"
    ) as error:
        check_replicas(3, bad)
    assert str(jax.devices()[device]) in str(error.value)
    return None


def test_state_of_a_real_run_has_equal_replicas(run) -> None:
    check_replicas(0, run.state)


def test_checkpoint_from_before_the_fault_is_kept(tmp_path, run) -> None:
    """What is saved while updates are skipped is the last good state."""
    state = copy(run.state)
    good, _ = run.train_step(state, run.place(batch(0)))
    want = bits(good)
    nan = {**batch(1), "mask": np.full_like(batch(1)["mask"], np.nan)}
    after, metrics = run.train_step(good, run.place(nan))
    assert float(metrics["skipped"]) == 1
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(2, after, {})
        _, found, _ = checkpointer.restore_newest(after, fall_back=False)
    for old, new in zip(want, bits(found), strict=True):
        np.testing.assert_array_equal(old, new)
