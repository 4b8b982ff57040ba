"""Checkpoints survive another mesh, a failing writer or a killed one."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.stops import StorageError

NO_DATA: dict = {}


class Moments(NamedTuple):
    count: jax.Array
    mu: dict


def make_mesh(y: int, x: int) -> Mesh:
    return jax.make_mesh((y, x), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: y * x])


def specs() -> dict:
    return {
        "step": P(),
        "key": P(),
        "keys": P("x"),
        "params": {"w_DF": P("y", "x"), "scale": P("x"), "half": P("x", "y")},
        "opt": Moments(P(), {"w_DF": P("y", "x"), "none": None}),
    }


def values(offset: float = 0.0) -> dict:
    """A state with every kind of leaf a trainer has; no two of its numbers are equal within a leaf."""
    w = np.arange(16 * 8, dtype=np.float32).reshape(16, 8) / 7 + offset
    return {
        "step": jnp.int32(3),
        "key": jax.random.key(5),
        "keys": jax.random.split(jax.random.key(6, impl="rbg"), 8),
        "params": {"w_DF": w, "scale": w[0] * 3, "half": jnp.asarray(w[:8], jnp.bfloat16)},
        "opt": Moments(jnp.int32(9), {"w_DF": w * w, "none": None}),
    }


def place(tree: dict, mesh: Mesh) -> dict:
    return jax.tree.map(lambda spec, leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), specs(), tree)


def abstract(tree: dict, mesh: Mesh) -> dict:
    def one(spec: P, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, specs(), tree)


def bits(leaf: jax.Array) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(got: dict, want: dict) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(path))


def test_c18_restores_bit_equal_on_any_mesh(tmp_path: pathlib.Path) -> None:
    want = values()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.save(3, place(want, make_mesh(2, 4)), {"next": 17, "shards": [1, 2]})
        for y, x in [(8, 1), (4, 2), (1, 1), (2, 4)]:
            target = abstract(want, make_mesh(y, x))
            got, data_state = checkpointer.restore(target)
            assert data_state == {"next": 17, "shards": [1, 2]}
            assert_same(got, want)
            for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
                assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    # A restored key is a key: it draws the numbers that the original would have drawn.
    np.testing.assert_array_equal(jax.random.normal(got["keys"][2], (3,)), jax.random.normal(want["keys"][2], (3,)))
    assert str(jax.random.key_impl(got["keys"])) == "rbg"


def test_state_may_be_donated_right_after_save(tmp_path: pathlib.Path) -> None:
    mesh = make_mesh(2, 4)
    sharding = NamedSharding(mesh, P("y", "x"))
    w = jax.device_put(np.zeros((512, 512), np.float32), sharding)
    step = jax.jit(lambda w: w + 1, donate_argnums=0)
    target = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)}
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for k in range(3):
            checkpointer.save(k, {"w": w}, NO_DATA)
            w = jax.block_until_ready(step(w))
        for k in range(3):
            np.testing.assert_array_equal(checkpointer.restore(target, k)[0]["w"], np.full(w.shape, float(k)))


def test_keeps_the_newest_and_leaves_an_existing_step_alone(tmp_path: pathlib.Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        for step in (2, 4, 10):
            assert checkpointer.save(step, {"a": np.full(2, step)}, {"k": step})
        assert not checkpointer.save(10, {"a": np.zeros(2, int)}, NO_DATA)
        assert checkpointer.steps() == [4, 10]
    with Checkpointer(tmp_path, keep=2) as again:
        assert again.skipped == ()
        assert again.latest_step() == 10
        state, data_state = again.restore({"a": jax.ShapeDtypeStruct((2,), np.int64)})
        assert state["a"].tolist() == [10, 10]
        assert data_state == {"k": 10}
        assert again.restore({"a": jax.ShapeDtypeStruct((2,), np.int64)}, 4)[1] == {"k": 4}


def fail_commit(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The disk is full at the moment when the checkpoint of `step` is committed."""
    rename = os.rename

    def full(source: str, target: str) -> None:
        if os.path.basename(target) == step:
            raise OSError(28, "no space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full)


def check_until_it_raises(checkpointer: Checkpointer) -> None:
    """What a loop with very short steps does."""
    for _ in range(2000):
        checkpointer.check_for_errors()
        time.sleep(0.005)


def test_c19_background_error_is_raised_by_the_next_check(tmp_path: pathlib.Path, monkeypatch) -> None:
    fail_commit(monkeypatch, "2")
    checkpointer = Checkpointer(tmp_path, keep=2)
    checkpointer.save(1, {"a": np.arange(3)}, NO_DATA)
    checkpointer.wait()
    checkpointer.check_for_errors()
    checkpointer.save(2, {"a": np.arange(3)}, NO_DATA)  # returns: the failure comes later, in the background
    with pytest.raises(
        StorageError, match=r"step 2 in .* \(no space left on device\); the newest one is that of step 1"
    ):
        check_until_it_raises(checkpointer)
    monkeypatch.undo()
    assert checkpointer.latest_step() == 1  # the failed step does not count, and saving goes on
    assert checkpointer.save(3, {"a": np.arange(3)}, NO_DATA)
    checkpointer.close()
    with Checkpointer(tmp_path, keep=2) as again:
        assert again.skipped == ("Skipped step 2: 2.orbax-checkpoint-tmp is not committed.",)
        assert again.steps() == [1, 3]


def test_c19_killed_between_write_and_commit(tmp_path: pathlib.Path) -> None:
    script = """
        import os, signal, sys
        import numpy as np
        from overlapfx.train.checkpoint import Checkpointer
        rename = os.rename
        def kill(source, target):
            if os.path.basename(target) == "2":
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)
        os.rename = kill
        checkpointer = Checkpointer(sys.argv[1], keep=2)
        for step in (1, 2):
            checkpointer.save(step, {"a": np.arange(3) + step}, {"k": step})
        checkpointer.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        (sentence,) = checkpointer.skipped
        assert "step 2" in sentence
        assert "not committed" in sentence
        state, data_state = checkpointer.restore({"a": jax.ShapeDtypeStruct((3,), np.int64)})
        assert state["a"].tolist() == [1, 2, 3]
        assert data_state == {"k": 1}
        assert checkpointer.save(2, {"a": np.arange(3)}, NO_DATA)  # the leftover does not block the step
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("read_only", [False, True])
def test_step_directory_without_its_items_is_set_aside(tmp_path: pathlib.Path, read_only: bool) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"a": np.arange(3)}, {"k": 1})
    (tmp_path / "7" / "state").mkdir(parents=True)  # for Orbax alone this is the newest checkpoint
    (tmp_path / "7.incomplete").mkdir()
    with Checkpointer(tmp_path, keep=1, read_only=read_only) as checkpointer:
        (sentence,) = checkpointer.skipped
        assert "step 7" in sentence
        assert "state and manifest" in sentence
        assert (tmp_path / "7").exists() == read_only
        assert (tmp_path / "7.incomplete-1").exists() != read_only
        assert checkpointer.restore({"a": jax.ShapeDtypeStruct((3,), np.int64)})[1] == {"k": 1}
        if not read_only:
            for step in (2, 7):
                assert checkpointer.save(step, {"a": np.arange(3)}, NO_DATA)
                assert checkpointer.steps() == [step]


def test_reader_leaves_the_directory_of_a_running_writer_alone(tmp_path: pathlib.Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"a": np.arange(3)}, {"k": 1})
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with Checkpointer(tmp_path, keep=1, read_only=True) as reader:
        assert reader.restore({"a": jax.ShapeDtypeStruct((3,), np.int64)})[1] == {"k": 1}
    assert (tmp_path / "2.orbax-checkpoint-tmp").exists()


def struct(shape: tuple[int, ...], dtype: object = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"a": {"w": struct((4, 3))}, "n": struct((), np.int32)}, ["leaf a.w", "float32[4, 2]", "float32[4, 3]"]),
        ({"a": {"w": struct((4, 2))}, "n": struct((), np.float32)}, ["leaf n", "int32[]", "float32[]"]),
        (
            {"a": {"w": struct((4, 2)), "b": struct((1,))}, "n": struct((), np.int32)},
            ["lacks the leaf a.b", "1 missing"],
        ),
        ({"a": {"w": struct((4, 2))}}, ["has the leaf n", "1 unknown"]),
    ],
)
def test_mismatch_is_one_sentence_that_names_the_leaf(tmp_path: pathlib.Path, target: dict, words: list[str]) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"a": {"w": np.zeros((4, 2), np.float32)}, "n": np.int32(1)}, NO_DATA)
        with pytest.raises(ValueError, match=f"^The checkpoint {tmp_path}/1 ") as error:
            checkpointer.restore(target)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert message.endswith(".")
    assert "\n" not in message


def test_key_of_another_implementation_is_refused(tmp_path: pathlib.Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"key": jax.random.key(0)}, NO_DATA)
        with pytest.raises(ValueError, match=r"leaf key as key<fry>\[\] where key<rbg>\[\]"):
            checkpointer.restore({"key": jax.random.key(0, impl="rbg")})


def test_missing_checkpoint_and_bad_arguments(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"train\.checkpoint_keep is 0"):
        Checkpointer(tmp_path, keep=0)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        with pytest.raises(FileNotFoundError, match="the steps found are: none"):
            checkpointer.restore({})
        checkpointer.save(4, {"a": np.zeros(1)}, NO_DATA)
        with pytest.raises(FileNotFoundError, match="step 3; the steps found are: 4"):
            checkpointer.restore({}, 3)
        with pytest.raises(ValueError, match=r"share the name 'a\.b'"):
            checkpointer.save(5, {"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}, NO_DATA)
