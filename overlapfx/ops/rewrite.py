"""Rewrites functions that others wrote: their collectives and products become collective einsums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from overlapfx.config import Overlap
from overlapfx.ops.rewrite_report import NotRewritten, RewriteReport, Rewritten
from overlapfx.ops.rewrite_trace import Rewriter

R = TypeVar("R")


def overlap(f: Callable[..., R], config: Overlap = Overlap()) -> Overlapped[R]:
    """`f` with its blocking AllGathers and ReduceScatters run beside the products that depend on them.

    f: any function that holds a shard_map: over jit, scan, while, cond, remat and custom rules, forward or already
        differentiated. Within each body, `all_gather -> dot_general`, `dot_general -> psum_scatter` and chains of both
        become collective einsums where the gate says so, past conversions, reshapes, transposes and elementwise work
        on what was gathered. Several independent products of one gathered array share one stream of it. `psum` of
    products becomes a ReduceScatter and an AllGather where that is predicted to be faster.
    config: as for `collective_einsum`; sites are named "function:line" after the product.

    Results have the same shapes and dtypes and equal those of `f` up to rounding: partial products are added in
    float32, or as `config.accum_dtype` says, and rounded once. What cannot be proved safe is left as it is. The result
    may be jitted, differentiated in reverse mode and rewritten again; of a custom_jvp the function is rewritten, its
    rule is not. `report(*args)` says what was rewritten, what was not, and why. Like any other transformation it traces
    `f` at every call: put jax.jit around it. Arguments that are not arrays are passed to `f` unchanged.
    """
    return Overlapped(f, config)


class Overlapped(Generic[R]):
    """The function that `overlap` returns."""

    def __init__(self, f: Callable[..., R], config: Overlap) -> None:
        functools.update_wrapper(self, f)
        self._f, self._rewriter = f, Rewriter(config)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """The value of the rewritten function."""
        arrays, rewritten, tree = self._rewrite(args, kwargs)
        if rewritten is None:
            return self._f(*args, **kwargs)
        return jax.tree.unflatten(tree, jaxpr_as_fun(rewritten)(*arrays))

    def report(self, *args: Any, **kwargs: Any) -> RewriteReport:
        """What would become of every collective for these arguments, arrays or jax.ShapeDtypeStruct; runs nothing."""
        with self._rewriter.collecting() as found:
            self._rewrite(args, kwargs)
        return RewriteReport(
            tuple(item for item in found if isinstance(item, Rewritten)),
            tuple(item for item in found if isinstance(item, NotRewritten)),
        )

    def _rewrite(self, args: Any, kwargs: Any) -> tuple[list[Any], Any, Any]:
        """The arguments that are arrays, the rewritten function of them if it changed, the structure of its result."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        trees = []

        def flat(*arrays: Any) -> list[Any]:
            filled = list(leaves)
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            inner_args, inner_kwargs = jax.tree.unflatten(treedef, filled)
            out, tree = jax.tree.flatten(self._f(*inner_args, **inner_kwargs))
            trees.append(tree)
            return out

        arrays = [leaves[i] for i in places]
        traced = jax.make_jaxpr(flat)(*arrays)
        return arrays, self._rewriter.changed(traced), trees[-1]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
