"""Parameters that know how they are laid out over the mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlapfx.types import Params, PRNGKey

# The layouts of ../shared/paper.md, in the order of the dimensions: x is the model axis, y the data axis.
W_DF = P("y", "x")
W_FD = P("x", "y")
W_DNH = P("y", "x", None)
W_NHD = P("x", None, "y")
W_VD = P("x", "y")
SCALE_D = P("x")
TABLE_TD = P(None, "x")
TABLE_RN = P(None, "x")
TAPS_KC = P(None, "x")
TAPS_KMC = P(None, None, "x")
TAPS_KCD = P(None, "y", "x")
# Of experts, which are cut over y; the router is small.
W_EDF = P("y", None, "x")
W_EFD = P("y", "x", None)
ROUTER_DE = P("x", None)


def normal(key: PRNGKey, shape: tuple[int, ...], std: float, layout: P) -> nnx.Param:
    """A float32 parameter of global `shape`, normal with standard deviation `std` cut at two deviations.

    Values depend on the key and the shape alone, never on the mesh. Inside shard_map the parameter is the local shard.
    """
    value = std * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value, layout=layout)


def ones(shape: tuple[int, ...], layout: P) -> nnx.Param:
    """A float32 parameter of ones."""
    return nnx.Param(jnp.ones(shape, jnp.float32), layout=layout)


def layouts(module: nnx.Module) -> Params:
    """PartitionSpec of every parameter, as nested dicts like `nnx.to_pure_dict` makes; stacked ones lead with None."""

    def spec(variable: nnx.Variable) -> P:
        layout = variable.get_metadata("layout")
        return P(*(None,) * (variable.get_value().ndim - len(layout)), *layout)

    state = nnx.state(module, nnx.Param)
    specs: Any = jax.tree.map(spec, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return nnx.to_pure_dict(specs)
