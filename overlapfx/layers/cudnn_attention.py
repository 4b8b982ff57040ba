"""Softmax attention by cuDNN, NVIDIA's own kernels, whose scores never leave the chip."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from overlapfx import compat

# What JAX asks of a GPU for these kernels, with gradients, whichever it is: Ampere is 8.0.
_OLDEST_CAPABILITY = (8, 0)
_MAX_HEAD_DIM = 128
_HEAD_DIM_MULTIPLE = 8
_LENGTH_MULTIPLE = 2


def cudnn_attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    query_segments_BT: Int[Array, "B T"],
    key_segments_BS: Int[Array, "B S"],
    bias_NTS: Float[Array, "N T S"] | None = None,
    *,
    causal: bool,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
    """What `fused_attention.fused_attend` computes, for NVIDIA GPUs.

    Which keys are of a query's segment is told in memory, 2 bytes for each pair, the same for all heads. With a bias,
    which is rounded to the operands' precision, JAX adds the two for every sequence and head, and the kernel writes a
    gradient as large: a third of what plain attention holds, whose scores and weights are of all sequences too. Under
    rematerialisation the backward pass runs the forward kernel again. implementation: "xla" computes the same with
    products and a softmax, anywhere. Nothing is checked: see `cudnn_obstacle`.
    """
    same_BTS = query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        bias=None if bias_NTS is None else bias_NTS[None].astype(q_BTNH.dtype),
        mask=same_BTS[:, None],
        is_causal=causal,
        implementation=implementation,
    )


def cudnn_obstacle(
    num_queries: int, num_keys: int, head_dim: int, dtype: Any, *, causal: bool, biased: bool = False
) -> str | None:
    """Why `cudnn_attend` cannot take operands of these sizes on this process's GPUs, None if it can.

    biased: whether scores get a bias, which no size forbids.
    """
    capability = compat.cuda_capability()
    if capability is None or capability < _OLDEST_CAPABILITY:
        return "cuDNN has it for NVIDIA GPUs from Ampere on only"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN has it in bfloat16 and float16, not {jnp.dtype(dtype)}"
    if causal and num_queries != num_keys:
        return f"causal attention of {num_queries} queries to {num_keys} keys has no diagonal"
    if head_dim % _HEAD_DIM_MULTIPLE or head_dim > _MAX_HEAD_DIM:
        return f"{head_dim} features of a head are no multiple of {_HEAD_DIM_MULTIPLE} up to {_MAX_HEAD_DIM}"
    for size, name in ((num_queries, "queries"), (num_keys, "keys")):
        if size % _LENGTH_MULTIPLE:
            return f"{size} {name} are no multiple of {_LENGTH_MULTIPLE}"
    return None
