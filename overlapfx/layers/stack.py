"""A stack of alike blocks, traced and compiled once however deep it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Shaped

from overlapfx import compat
from overlapfx.layers.attention import CONTEXT, OUTPUT
from overlapfx.types import PRNGKey

# What the backward pass finds saved of each layer, besides its input.
REMAT_POLICIES = {
    "all": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(CONTEXT, OUTPUT),
}


def make(block: Callable[[PRNGKey], nnx.Module], num_layers: int, key: PRNGKey) -> Any:
    """One block, made from a key, whose parameters carry a leading layer dimension."""
    return nnx.vmap(block)(jax.random.split(key, num_layers))


def cut(x: Shaped[Array, "B *rest"], num_stripes: int) -> tuple[Array, ...]:
    """Row stripes of an array, as equal as can be; fewer if there are fewer rows."""
    return tuple(jnp.array_split(x, min(num_stripes, x.shape[0])))


def join(stripes: Sequence[Array]) -> Shaped[Array, "B *rest"]:
    """The array that was cut."""
    return stripes[0] if len(stripes) == 1 else jnp.concatenate(stripes)


X = TypeVar("X", Array, tuple[Array, ...])


def recomputed(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`layer`, of which the backward pass recomputes what `remat` says: "none", "all" or "attention"."""
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=False)


def run(
    blocks: Any,
    x_BTD: X,
    call: Callable[[Any, X, PRNGKey | None], X],
    *,
    num_layers: int,
    remat: str,
    key: PRNGKey | None,
) -> X:
    """Applies `num_layers` blocks from `make`, one after the other under scan, to an array or to row stripes of one.

    call: (block, x, key) -> x, where `key` draws the dropout of that layer, None switches it off.
    remat: what the backward pass recomputes, "none", "all" or "attention".
    """
    # Between layers activations differ on every device; scan wants that said before the first one.
    x_BTD = jax.tree.map(lambda x: compat.vary(x, compat.varying_axes(x) | {"y", "x"}), x_BTD)
    template, stacked = nnx.split(blocks)

    def layer(x: X, params_and_index: tuple[Any, Array]) -> tuple[X, None]:
        params, index = params_and_index
        layer_key = None if key is None else jax.random.fold_in(key, index)
        return call(nnx.merge(template, params), x, layer_key), None

    return lax.scan(recomputed(layer, remat), x_BTD, (stacked, jnp.arange(num_layers)))[0]
