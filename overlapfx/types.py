"""Array types shared by all files, with the legend of dimension letters.

B batch, T time (tokens of a sequence), S time of the sequence that is attended to, D model width, F hidden width, N
query heads, K key and value heads, H head size, V vocabulary, L layers. A name such as `x_BTD` spells its dimensions in
order; inside shard_map each is the size of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int16, Int32, Key

if TYPE_CHECKING:
    # A batch enters a jitted function as NumPy and is seen inside as JAX, which no static checker can tell.
    AnyArray: TypeAlias = Any
else:
    AnyArray = jax.Array | np.ndarray
Scalar: TypeAlias = Float[Array, ""]
PRNGKey: TypeAlias = Key[Array, ""]
# Parameters: nested dicts whose leaves are arrays (or, in planning, their shapes).
Params: TypeAlias = dict[str, Any]
# Scalars, which are logged under their names, with `finite_leaves`; see `train.step.make_train_step`.
Metrics: TypeAlias = dict[str, Array]
# What an evaluation finds: name -> (sum over what was counted, how much was counted), whose quotient it reports.
Evaluation: TypeAlias = dict[str, tuple[Scalar, Scalar]]
# One step's sequences, rows first: on the host this process's share of the global batch, inside shard_map this
# device's. What else they hold is up to the objective of the model; see train/objectives.py.
Batch: TypeAlias = Mapping[str, Any]


class TextBatch(TypedDict):
    """Tokens, each with a target."""

    inputs: Int32[AnyArray, "B T"]
    targets: Int32[AnyArray, "B T"]
    # 1 where the target counts in the loss, 0 where it does not.
    mask: Float32[AnyArray, "B T"]
    # 1, 2, ... per packed document, 0 for padding: attention does not cross documents.
    segments: Int32[AnyArray, "B T"]


class SpanBatch(TypedDict):
    """Sequences of S tokens that each ask for a sequence of T."""

    inputs: Int32[AnyArray, "B S"]
    targets: Int32[AnyArray, "B T"]
    # 1 where the target counts in the loss, 0 where it does not.
    mask: Float32[AnyArray, "B T"]
    # 1 for text, 0 for padding of the inputs.
    segments: Int32[AnyArray, "B S"]


class SpeechBatch(TypedDict):
    """Clips of speech, zeros after their end."""

    samples: Int16[AnyArray, "B S"]
    # Samples before the end.
    length: Int32[AnyArray, "B"]


class TranscribedBatch(SpeechBatch):
    """Clips with what is said in them."""

    labels: Int32[AnyArray, "B N"]
    # 1 on labels, from the first one on, 0 after the last one.
    mask: Float32[AnyArray, "B N"]


class HiddenSpeechBatch(SpeechBatch):
    """Clips of which some tokens are to be hidden."""

    # 1 where a token is hidden and counts in the loss.
    mask: Float32[AnyArray, "B T"]
