"""Transcription of speech without knowing where in time each label is (Graves et al., 2006)."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from overlapfx import compat
from overlapfx.ops import ring

BLANK = 0  # the label of a token that says nothing


def whole_vocabulary(logits_BTV: Float[Array, "B T V"]) -> Float[Array, "B T W"]:
    """The logits of all labels, on every device along x, over which labels are sharded.

    Each device adds its part to zeros elsewhere, which is exact. There are few labels: a gather would save nothing, and
    would not be known to be the same everywhere.
    """
    num_own = logits_BTV.shape[-1]
    zeros_BTW = jnp.zeros((*logits_BTV.shape[:-1], num_own * lax.axis_size("x")), logits_BTV.dtype)
    zeros_BTW = compat.vary(zeros_BTW, compat.varying_axes(logits_BTV))
    first = ring.index(("x",)) * num_own
    return lax.psum(lax.dynamic_update_slice_in_dim(zeros_BTW, logits_BTV, first, axis=-1), "x")


def negative_log_likelihood(
    logits_BTW: Float[Array, "B T W"],
    is_speech_BT: Bool[Array, "B T"],
    labels_BN: Int[Array, "B N"],
    mask_BN: Float[Array, "B N"],
) -> Float[Array, "B"]:
    """Of the labels of each clip, in nats; 0 for a clip without labels.

    is_speech and mask: where tokens and labels are, from the first one on.
    """
    # Optax starts its scan from multiples of this number, which scan wants typed as what becomes of them.
    nothing = compat.vary(jnp.asarray(-1e5, jnp.float32), compat.varying_axes(logits_BTW))
    paddings = (1.0 - is_speech_BT.astype(jnp.float32), 1.0 - mask_BN)
    nll_B = optax.ctc_loss(logits_BTW, paddings[0], labels_BN, paddings[1], blank_id=BLANK, log_epsilon=nothing)
    return jnp.where(mask_BN[:, 0] > 0, nll_B, 0)


def greedy_labels(
    logits_BTW: Float[Array, "B T W"], is_speech_BT: Bool[Array, "B T"]
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The likeliest label of every token, and which of them are the transcript: no blanks, of equal neighbours one."""
    best_BT = jnp.argmax(logits_BTW, axis=-1)
    before_BT = jnp.pad(best_BT[:, :-1], ((0, 0), (1, 0)), constant_values=BLANK)
    return best_BT, is_speech_BT & (best_BT != BLANK) & (best_BT != before_BT)


def edit_distance(
    heard_BT: Int[Array, "B T"],
    is_heard_BT: Bool[Array, "B T"],
    labels_BN: Int[Array, "B N"],
    mask_BN: Float[Array, "B N"],
) -> Int[Array, "B"]:
    """Insertions, deletions and replacements that turn the labels that were heard into the right ones.

    is_heard: which of the T are in the transcript; mask: 1 on the labels that count, from the first one on.

    One row of the usual table for every heard label. Within a row each entry depends on the one before it by
    row[j] = min(above[j], row[j - 1] + 1), so row[j] - j is a running minimum.
    """
    place_N1 = jnp.arange(labels_BN.shape[1] + 1)
    start = jnp.broadcast_to(place_N1, (labels_BN.shape[0], place_N1.shape[0]))
    start = compat.vary(start, compat.varying_axes(heard_BT) | compat.varying_axes(labels_BN))

    def hear(row: Array, heard_and_is: tuple[Array, Array]) -> tuple[Array, None]:
        heard_B, is_heard_B = heard_and_is
        replaced = row[:, :-1] + (labels_BN != heard_B[:, None])
        above = jnp.concatenate([row[:, :1] + 1, jnp.minimum(row[:, 1:] + 1, replaced)], axis=1)
        heard = lax.cummin(above - place_N1, axis=1) + place_N1
        return jnp.where(is_heard_B[:, None], heard, row), None

    row, _ = lax.scan(hear, start, (heard_BT.T, is_heard_BT.T))
    num_labels_B = jnp.sum(mask_BN, axis=1).astype(jnp.int32)
    return jnp.take_along_axis(row, num_labels_B[:, None], axis=1)[:, 0]
