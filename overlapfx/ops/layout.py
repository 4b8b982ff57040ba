"""Where activations lie when XLA's own partitioner cuts the program; inside shard_map it has nothing to say."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

_axes_of_label: contextvars.ContextVar[Mapping[str, tuple[str, ...]] | None] = contextvars.ContextVar(
    "overlapfx_layout", default=None
)


def constrain(labels: str, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x`, whose dimensions are called `labels`; told to the partitioner if it is an activation, else as it is.

    Activations are the arrays with a batch label, b; what is not said is left to the partitioner's propagation.
    """
    axes_of_label = _axes_of_label.get()
    if axes_of_label is None or "b" not in labels:
        return x
    return lax.with_sharding_constraint(x, P(*(axes_of_label.get(label) for label in labels)))


def on_each_device(
    fn: Callable[..., Array], operands: Sequence[str], result: str
) -> Callable[..., Shaped[Array, "..."]]:
    """`fn`, of operands whose dimensions are called so, for what XLA's partitioner cannot cut, such as a kernel.

    It may be computed apart for every part of the dimensions that `constrain` lays over mesh axes. Inside shard_map it
    is `fn` itself.
    """
    axes_of_label = _axes_of_label.get()
    if axes_of_label is None:
        return fn
    sizes = jax.sharding.get_abstract_mesh().shape
    *specs, out_spec = ([axes_of_label.get(label, ()) for label in labels] for labels in (*operands, result))
    # What devices share is copied for each of them before. Else shard_map would sum its gradient over the mesh axis, in
    # whose place it would take the vmap of that name in `partitioned_by_xla`.
    shared = [tuple(axis for axis in sum(out_spec, ()) if axis not in sum(spec, ())) for spec in specs]
    in_specs = tuple(P(axes, *spec) for axes, spec in zip(shared, specs, strict=True))
    one = jax.shard_map(lambda *copies: fn(*(x[0] for x in copies)), in_specs=in_specs, out_specs=P(*out_spec))

    def run(*args: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        num_copies = (math.prod(sizes[axis] for axis in axes) for axes in shared)
        return one(*(jnp.broadcast_to(x, (num, *x.shape)) for num, x in zip(num_copies, args, strict=True)))

    return run


def is_cut_by_xla() -> bool:
    """Whether XLA's own partitioner will cut what is traced."""
    return _axes_of_label.get() is not None


def is_whole(axis: str) -> bool:
    """Whether `axis` is bound with size 1: by the vmap of `partitioned_by_xla`, or by a shard_map over one device."""
    try:
        return lax.axis_size(axis) == 1
    except NameError:  # what JAX raises for a name that nothing binds
        return False


@contextlib.contextmanager
def _constrained(axes_of_label: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
    token = _axes_of_label.set(axes_of_label)
    try:
        yield
    finally:
        _axes_of_label.reset(token)


def partitioned_by_xla(
    local: Callable[..., object], mesh: Mesh, axes_of_label: Mapping[str, tuple[str, ...]]
) -> Callable[..., object]:
    """The function of whole arrays that `local`, written for shard_map over `mesh`, computes on a single device.

    Every mesh axis is a vmap of size 1 around it, under which collectives do nothing and places are 0, so the program
    holds plain arrays only and jit leaves their partitioning to XLA. `axes_of_label` says over which mesh axes
    `constrain` lays the dimensions of activations.
    """
    whole = local
    for axis in reversed(mesh.axis_names):
        whole = jax.vmap(whole, in_axes=None, out_axes=None, axis_name=axis, axis_size=1)

    def run(*args: object) -> object:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _constrained(axes_of_label):
            return whole(*args)

    return run
