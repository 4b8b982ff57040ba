"""What a collective einsum means, in blocking collectives: everything else is tested against this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from overlapfx.plan.pattern import AxisNames, canonical_axes, parse_spec


def collective_einsum(
    spec: str,
    lhs: Shaped[Array, "..."],
    rhs: Shaped[Array, "..."],
    *,
    lhs_gather: Mapping[str, AxisNames],
    rhs_gather: Mapping[str, AxisNames],
    out_scatter: Mapping[str, AxisNames],
    accum_dtype: Any = jnp.float32,
    compute_dtype: Any = None,
    out_dtype: Any = None,
    bias: Shaped[Array, "..."] | None = None,
    bias_labels: str = "",
    activation: Callable[[Array], Array] | None = None,
) -> Shaped[Array, "..."]:
    """Gather both operands, multiply once, sum and scatter the product, add the bias, activate, round once."""
    lhs_labels, rhs_labels, out_labels = parse_spec(spec, "reference")
    compute = compute_dtype or jnp.result_type(lhs, rhs)
    lhs, rhs = lhs.astype(compute), rhs.astype(compute)
    for label, axes in lhs_gather.items():
        lhs = lax.all_gather(lhs, canonical_axes(axes), axis=lhs_labels.index(label), tiled=True)
    for label, axes in rhs_gather.items():
        rhs = lax.all_gather(rhs, canonical_axes(axes), axis=rhs_labels.index(label), tiled=True)
    out = jnp.einsum(spec, lhs, rhs, preferred_element_type=accum_dtype)
    for label, axes in out_scatter.items():
        out = lax.psum_scatter(out, canonical_axes(axes), scatter_dimension=out_labels.index(label), tiled=True)
    if bias is not None:
        labels = bias_labels or out_labels[len(out_labels) - bias.ndim :]
        out = out + jnp.einsum(f"{labels},{out_labels}->{out_labels}", bias.astype(out.dtype), jnp.ones_like(out))
    if activation is not None:
        out = activation(out)
    return out.astype(out_dtype or compute)
