"""Questions to ask a jaxpr: what it contains, and what becomes of its products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var, jaxprs_in_params

# Operations that pass values on unchanged; a reduction adds them up.
MOVES = frozenset(
    {
        *("slice", "dynamic_slice", "dynamic_update_slice", "reshape", "transpose", "squeeze", "broadcast_in_dim"),
        *("concatenate", "copy", "ppermute", "all_to_all", "all_gather", "pvary", "pcast"),
    }
)
ADDS = frozenset({"add", "add_any", "reduce_sum", "reduce_scatter", "psum", "psum_invariant"})


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, however deeply nested; the body of a loop once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def count(jaxpr: Any, *names: str) -> int:
    """How many equations have one of these primitives."""
    return sum(eqn.primitive.name in names for eqn in equations(jaxpr))


def inside(jaxpr: Any, name: str) -> list[Any]:
    """The jaxprs in the equations of one primitive."""
    return [inner for eqn in equations(jaxpr) if eqn.primitive.name == name for inner in jaxprs_in_params(eqn.params)]


def narrowed_before_addition(jaxpr: Any) -> list[Any]:
    """Additions of values that were rounded to bfloat16 after a product and before the sum was complete.

    Follows values within each jaxpr; products and additions of one ring are always in the same one.
    """
    found = []
    products: set[Any] = set()  # values that are parts of a product
    narrowed: set[Any] = set()  # and that have been rounded
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        read = {v for v in eqn.invars if isinstance(v, Var)}
        from_product, from_narrowed = bool(read & products), bool(read & narrowed)
        if name == "optimization_barrier":  # hands every value on
            for source, handed_on in zip(eqn.invars, eqn.outvars, strict=True):
                for values in (products, narrowed):
                    if isinstance(source, Var) and source in values:
                        values.add(handed_on)
            continue
        if name == "dot_general" or (name in MOVES | ADDS | {"convert_element_type"} and from_product):
            products.update(eqn.outvars)
        rounds = name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16 and from_product
        narrow_product = name == "dot_general" and eqn.outvars[0].aval.dtype == jnp.bfloat16
        if rounds or narrow_product or (name in MOVES | {"convert_element_type"} and from_narrowed):
            narrowed.update(eqn.outvars)
        if name in ADDS and from_narrowed:
            found.append(eqn)
        for inner in jaxprs_in_params(eqn.params):
            found.extend(narrowed_before_addition(inner))
    return found
