"""Programs with blocking collectives as other people write them, which know nothing of this project."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Parameters = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Global sizes; layers are alike and stacked, `hidden` is that of an MLP."""

    batch: int
    time: int
    width: int
    heads: int
    head_dim: int
    hidden: int
    experts: int
    layers: int


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A stack of layers over a mesh (y, x), with the loss that trains it.

    layer: (activations [batch, time, width], parameters of the layer) -> activations, inside shard_map.
    tokens: how activations lie. parameters: how those of a layer lie. shapes: of those, globally.
    """

    name: str
    layer: Callable[[jax.Array, Parameters], jax.Array]
    tokens: P
    parameters: Mapping[str, P]
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]]

    def loss(self, mesh: Mesh, check_vma: bool = True) -> Callable[[jax.Array, Parameters], jax.Array]:
        """(activations, stacked parameters) -> mean square of what rematerialized layers make of them; jitted."""
        axes = tuple(axis for axis in ("y", "x") if axis in jax.tree.leaves(tuple(self.tokens)))

        def body(x: jax.Array, p: Parameters) -> jax.Array:
            x, _ = lax.scan(lambda x, p: (jax.checkpoint(self.layer)(x, p), None), x, p)
            shards = math.prod(mesh.shape[axis] for axis in axes)
            return lax.psum(jnp.sum(jnp.square(x.astype(jnp.float32))), axes) / float(x.size * shards)

        specs = (self.tokens, self._stacked())
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma))

    def arguments(
        self, mesh: Mesh, sizes: Sizes, dtype: Any
    ) -> tuple[jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
        """Shapes and shardings of what the loss takes."""

        def abstract(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        shapes = {name: (sizes.layers, *shape) for name, shape in self.shapes(sizes).items()}
        parameters = {name: abstract(shapes[name], spec) for name, spec in self._stacked().items()}
        return abstract((sizes.batch, sizes.time, sizes.width), self.tokens), parameters

    def _stacked(self) -> dict[str, P]:
        return {name: P(None, *spec) for name, spec in self.parameters.items()}


def norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


# ---- a transformer partitioned as Megatron does it, sequence parallelism included ----


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)


def sequence_parallel(x: jax.Array, p: Parameters) -> jax.Array:
    """Batch over y, time over x. Heads and hidden units over x: gather tokens, scatter sums."""
    h = lax.all_gather(norm(x), "x", axis=1, tiled=True)
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in "qkv")
    x = x + lax.psum_scatter(jnp.einsum("btnh,nhd->btd", attend(q, k, v), p["o"]), "x", scatter_dimension=1, tiled=True)
    h = lax.all_gather(norm(x), "x", axis=1, tiled=True)
    hidden = jax.nn.silu(h @ p["gate"]) * (h @ p["up"])
    return x + lax.psum_scatter(hidden @ p["down"], "x", scatter_dimension=1, tiled=True)


def transformer_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Attention, then a gated MLP."""
    heads = (sizes.heads, sizes.head_dim)
    return {
        **dict.fromkeys("qkv", (sizes.width, *heads)),
        "o": (*heads, sizes.width),
        **dict.fromkeys(("gate", "up"), (sizes.width, sizes.hidden)),
        "down": (sizes.hidden, sizes.width),
    }


# ---- the same transformer with weights over both axes and AllReduces of activations ----


def fully_sharded(x: jax.Array, p: Parameters) -> jax.Array:
    """Batch over y. Weights over x and y: gather over y just before use, sum over x."""

    def weight(name: str, axis: int) -> jax.Array:
        return lax.all_gather(p[name], "y", axis=axis, tiled=True)

    h = norm(x)
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, weight(name, 0)) for name in "qkv")
    x = x + lax.psum(jnp.einsum("btnh,nhd->btd", attend(q, k, v), weight("o", 2)), "x")
    h = norm(x)
    hidden = jax.nn.silu(h @ weight("gate", 0)) * (h @ weight("up", 0))
    return x + lax.psum(hidden @ weight("down", 1), "x")


# ---- an MLP with fully sharded data parallelism, in the way of JAX's notebook on shard_map ----


def data_parallel(x: jax.Array, p: Parameters) -> jax.Array:
    """Tokens over all devices, and each weight and bias along its first dimension: gather just before use."""
    for name in ("up", "down"):
        weight, bias = (lax.all_gather(p[part], ("y", "x"), tiled=True) for part in (name, f"{name} bias"))
        x = jax.nn.relu(jnp.dot(x, weight) + bias)
    return x


def perceptron_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Two weights with biases."""
    return {
        "up": (sizes.width, sizes.hidden),
        "up bias": (sizes.hidden,),
        "down": (sizes.hidden, sizes.width),
        "down bias": (sizes.width,),
    }


# ---- a mixture of experts with one-hot dispatch, each token to one expert of limited capacity ----


def mixture(x: jax.Array, p: Parameters) -> jax.Array:
    """Batch over y, time over x. Experts over y, their hidden units over x: gather the slots, scatter sums."""
    tokens = norm(x).reshape(-1, x.shape[-1])
    num_experts = p["router"].shape[-1]
    capacity = -(-5 * len(tokens) // (4 * num_experts))
    shares = jax.nn.softmax(tokens @ p["router"])
    chosen = jax.nn.one_hot(jnp.argmax(shares, axis=-1), num_experts, dtype=jnp.int32)
    # Counts from one within each expert, so that zero, which is no slot, stands for every other expert.
    place = jnp.cumsum(chosen, axis=0) * chosen
    dispatch = jax.nn.one_hot(place - 1, capacity, dtype=x.dtype)
    slots = jnp.einsum("tec,td->ecd", dispatch, tokens)
    slots = lax.all_to_all(slots, "y", split_axis=0, concat_axis=1, tiled=True)
    slots = lax.all_gather(slots, "x", axis=1, tiled=True)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", slots, p["up"]))
    out = lax.psum_scatter(jnp.einsum("ecf,efd->ecd", hidden, p["down"]), "x", scatter_dimension=1, tiled=True)
    out = lax.all_to_all(out, "y", split_axis=1, concat_axis=0, tiled=True)
    return x + jnp.einsum("tec,te,ecd->td", dispatch, shares, out).reshape(x.shape)


def mixture_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """A router, then one MLP per expert."""
    return {
        "router": (sizes.width, sizes.experts),
        "up": (sizes.experts, sizes.width, sizes.hidden),
        "down": (sizes.experts, sizes.hidden, sizes.width),
    }


# ---- a Flax module with tensor parallelism over features ----


class Perceptron(nn.Module):
    """An MLP whose parameters are one device's part: hidden units over x, features outside it too."""

    hidden: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [batch, time, features of this device]."""
        h = nn.RMSNorm(axis_name="x", name="norm")(x)
        h = lax.all_gather(h, "x", axis=2, tiled=True)
        h = nn.gelu(nn.Dense(self.hidden, name="up")(h))
        return x + lax.psum_scatter(
            nn.Dense(self.width, use_bias=False, name="down")(h), "x", scatter_dimension=2, tiled=True
        )


def flax_perceptron(x: jax.Array, p: Parameters) -> jax.Array:
    """Batch over y, features and hidden units over x: gather features, scatter sums."""
    hidden, width = p["down"].shape
    parts = {
        "norm": {"scale": p["norm"]},
        "up": {"kernel": p["up"], "bias": p["up bias"]},
        "down": {"kernel": p["down"]},
    }
    out: Any = Perceptron(hidden, width).apply({"params": parts}, x)
    return out


def flax_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Those of the MLP, and of the norm before it."""
    return {"norm": (sizes.width,), **{n: s for n, s in perceptron_shapes(sizes).items() if n != "down bias"}}


_COLUMNS, _EVERYWHERE = P(None, "x"), P(("y", "x"))
# To add one: a layer with its shapes above, a row here.
_PROGRAMS = (
    Foreign(
        "sequence parallel",
        sequence_parallel,
        P("y", "x"),
        {**dict.fromkeys(("q", "k", "v", "gate", "up"), _COLUMNS), "o": P("x"), "down": P("x")},
        transformer_shapes,
    ),
    Foreign(
        "fully sharded",
        fully_sharded,
        P("y"),
        {**dict.fromkeys(("q", "k", "v", "gate", "up"), P("y", "x")), "o": P("x", None, "y"), "down": P("x", "y")},
        transformer_shapes,
    ),
    Foreign(
        "data parallel",
        data_parallel,
        P("y", "x"),
        dict.fromkeys(("up", "up bias", "down", "down bias"), _EVERYWHERE),
        perceptron_shapes,
    ),
    Foreign(
        "mixture of experts",
        mixture,
        P("y", "x"),
        {"router": P(), "up": P("y", None, "x"), "down": P("y", "x")},
        mixture_shapes,
    ),
    Foreign(
        "flax",
        flax_perceptron,
        P("y", None, "x"),
        {"norm": P("x"), "up": _COLUMNS, "up bias": P("x"), "down": P("x")},
        flax_shapes,
    ),
)
PROGRAMS = {program.name: program for program in _PROGRAMS}
