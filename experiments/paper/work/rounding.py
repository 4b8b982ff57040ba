"""The error of products that are summed and scattered over simulated devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Float

from overlapfx.config import Overlap
from overlapfx.ops.collective_einsum import collective_einsum

WAYS = {
    "blocking": Overlap(mode="off"),
    "ring one": Overlap(mode="on", method="ring", direction="one", unroll=1),
    "ring two": Overlap(mode="on", method="ring", direction="two", unroll=1),
    "ring two, 2 chains": Overlap(mode="on", method="ring", direction="two", unroll=2),
}
ACCUMULATORS = ("float32", "bfloat16")


def find(task: Mapping[str, Any]) -> dict[str, Any]:
    """Errors by way and dtype of the accumulator: the largest and the root mean square, over that of the exact result.

    Operands are bfloat16, results float32, so that what is seen is the accumulator. The exact result is summed in
    float64 from the same operands.
    """
    num_devices, sizes = task["num_devices"], task["sizes"]
    rng = np.random.default_rng(task["seed"])
    x_TF = jnp.asarray(rng.standard_normal((sizes["tokens"], sizes["hidden"] * num_devices)), jnp.bfloat16)
    w_FD = jnp.asarray(rng.standard_normal((x_TF.shape[1], sizes["width"])), jnp.bfloat16)
    exact_TD = np.asarray(x_TF, np.float64) @ np.asarray(w_FD, np.float64)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("x",), axis_types=(AxisType.Auto,))
    errors = {}
    for way, overlap in WAYS.items():
        for dtype in ACCUMULATORS:
            wanted = Overlap(**{**vars(overlap), "accum_dtype": dtype})
            error_TD = np.asarray(_product(mesh, x_TF, w_FD, wanted), np.float64) - exact_TD
            scale = np.sqrt(np.mean(exact_TD**2))
            errors[f"{way}, {dtype}"] = {
                "max": float(np.max(np.abs(error_TD)) / scale),
                "rms": float(np.sqrt(np.mean(error_TD**2)) / scale),
            }
    return {"errors": errors}


def _product(
    mesh: Mesh, x_TF: BFloat16[Array, "T F"], w_FD: BFloat16[Array, "F D"], overlap: Overlap
) -> Float[Array, "T D"]:
    def local(x_TF: BFloat16[Array, "T f"], w_FD: BFloat16[Array, "f D"]) -> Float[Array, "T d"]:
        return collective_einsum("tf,fd->td", x_TF, w_FD, out_scatter={"d": "x"}, overlap=overlap, out_dtype="float32")

    scattered = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(None, "x"))
    return jax.jit(scattered)(x_TF, w_FD)
