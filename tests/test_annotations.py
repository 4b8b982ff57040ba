"""The annotations of our functions are checked while tests run; these calls break them on purpose."""

from __future__ import annotations

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest
from checked_annotations import UNCHECKED
from jaxtyping import TypeCheckError

from overlapfx.layers.attention import rotate
from overlapfx.layers.embed import cross_entropy
from overlapfx.ops import ring

PROJECT = pathlib.Path(__file__).resolve().parent.parent


def test_a_right_call_passes() -> None:
    assert rotate(jnp.ones((1, 2, 3, 4))).shape == (1, 2, 3, 4)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 2, 3, 4, 5)])
def test_a_wrong_rank_is_caught(shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeCheckError):
        rotate(jnp.ones(shape))


def test_a_wrong_dtype_is_caught() -> None:
    with pytest.raises(TypeCheckError):
        rotate(jnp.ones((1, 2, 3, 4), jnp.int32))


def test_dimensions_that_disagree_are_caught_while_tracing() -> None:
    logits, targets = jnp.ones((2, 3, 8)), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(TypeCheckError):
        jax.eval_shape(cross_entropy, logits, targets)
    with pytest.raises(TypeCheckError):
        jax.jit(cross_entropy)(logits, targets)


def test_plain_arguments_are_checked_too() -> None:
    with pytest.raises(TypeCheckError):
        ring.shift(jnp.ones(3), ("x",), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeCheckError):
        ring.size("x")  # type: ignore[arg-type]


def test_the_list_of_unchecked_modules_is_in_use() -> None:
    for name, reason in UNCHECKED.items():
        assert reason
        assert importlib.util.find_spec(name) is not None
