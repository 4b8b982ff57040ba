"""A decoder whose every second layer is a mixture of experts; it reads from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.families import MoEConfig
from overlapfx.layers import param, stack
from overlapfx.layers.attention import Attention
from overlapfx.layers.dropout import add_stripes
from overlapfx.layers.embed import Embedding, cross_entropy
from overlapfx.layers.mlp import MLP
from overlapfx.layers.moe import LOAD, Mixture
from overlapfx.layers.norm import RMSNorm
from overlapfx.plan.flops import mixture_step
from overlapfx.train.objectives import NextToken
from overlapfx.types import Evaluation, PRNGKey, Scalar, TextBatch


def build(model: MoEConfig, overlap: Overlap) -> Callable[[PRNGKey], MoE]:
    """A function that makes the module, its parameters global and float32, from a key."""
    return lambda key: MoE(model, overlap, rngs=nnx.Rngs(params=key))


def objective(model: MoEConfig) -> NextToken:
    """Every token predicts the next one."""
    return NextToken(model.seq_len)


step_flops = mixture_step


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), in which the MLP may be a mixture of experts."""

    def __init__(self, model: MoEConfig, overlap: Overlap, *, mixture: bool, rngs: nnx.Rngs) -> None:
        where = "mixture" if mixture else "dense"
        # Residual branches start small, so that the sum over all layers keeps the scale of one.
        shared: dict[str, Any] = {
            "d_model": model.d_model,
            "out_std": 1 / math.sqrt(2 * model.num_layers),
            "compute_dtype": jnp.dtype(model.compute_dtype),
            "overlap": overlap,
            "rngs": rngs,
        }
        self.attention_norm = RMSNorm(d_model=model.d_model)
        self.attention = Attention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rotary=model.positions == "rotary",
            name=f"{where}.attention",
            **shared,
        )
        self.mlp_norm = RMSNorm(d_model=model.d_model)
        shared |= {"d_ff": model.d_ff, "activation": model.activation}
        self.mlp = None if mixture else MLP(gated=model.gated, name="dense.mlp", **shared)
        self.experts = _experts(model, shared) if mixture else None
        self.dropout_rate = model.dropout

    def __call__(
        self, xs_BTD: Sequence[Array], segments_BT: Sequence[Array], rows_B: Sequence[Array], key: PRNGKey | None
    ) -> tuple[tuple[Array, ...], Float[Array, "B Q"] | None]:
        """Row stripes [y, -, x] of a batch, and the LOAD of a mixture; `key` draws this layer's dropout."""
        keys = (None, None) if key is None else jax.random.split(key)
        added = self.attention.stripes([self.attention_norm(x_BTD) for x_BTD in xs_BTD], segments_BT)
        xs_BTD = add_stripes(xs_BTD, added, self.dropout_rate, keys[0], rows_B)
        normed = [self.mlp_norm(x_BTD) for x_BTD in xs_BTD]
        if self.experts is None:
            assert self.mlp is not None
            return add_stripes(xs_BTD, self.mlp.stripes(normed), self.dropout_rate, keys[1], rows_B), None
        added, loads = self.experts.stripes(normed, segments_BT)
        return add_stripes(xs_BTD, added, self.dropout_rate, keys[1], rows_B), stack.join(loads)


def _experts(model: MoEConfig, shared: dict[str, Any]) -> Mixture:
    return Mixture(
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        capacity_factor=model.capacity_factor,
        gated=model.gated_experts,
        **shared,
    )


class Pair(nnx.Module):
    """A dense layer, then a mixture: what a scan repeats."""

    def __init__(self, model: MoEConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        self.dense = Block(model, overlap, mixture=False, rngs=rngs)
        self.mixture = Block(model, overlap, mixture=True, rngs=rngs)


class MoE(nnx.Module):
    """Embedding, pairs of layers under scan, norm, logits from the embedding table. Called inside shard_map."""

    def __init__(self, model: MoEConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        self.embed = Embedding(
            vocab_size=model.vocab_size,
            d_model=model.d_model,
            compute_dtype=jnp.dtype(model.compute_dtype),
            overlap=overlap,
            rngs=rngs,
        )
        learned = model.positions == "learned"
        table = (model.seq_len, model.d_model)
        self.position_TD = param.normal(rngs.params(), table, 0.02, param.TABLE_TD) if learned else None
        self.num_pairs = model.num_layers // 2
        self.pairs = stack.make(
            lambda key: Pair(model, overlap, rngs=nnx.Rngs(params=key)), self.num_pairs, rngs.params()
        )
        self.final_norm = RMSNorm(d_model=model.d_model)
        self.remat, self.row_stripes = model.remat, overlap.row_stripes
        self.weights = {LOAD[0]: model.balance_weight, LOAD[1]: model.router_z_weight}

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"],
        row_B: Int[Array, "B"],
        key: PRNGKey | None = None,
    ) -> Float[Array, "B T V"]:
        """float32 logits [y, -, x] for tokens [y, -]."""
        return self._logits(tokens_BT, segments_BT, row_B, key)[0]

    def _logits(
        self, tokens_BT: Int[Array, "B T"], segments_BT: Int[Array, "B T"], row_B: Int[Array, "B"], key: PRNGKey | None
    ) -> tuple[Float[Array, "B T V"], dict[str, Float[Array, "B"]]]:
        """Logits, and the LOAD by name: for every sequence the mean over the mixtures."""
        x_BTD = self.embed.encode(tokens_BT)
        if self.position_TD is not None:
            x_BTD = x_BTD + self.position_TD[: x_BTD.shape[1]].astype(x_BTD.dtype)
        segments, rows = stack.cut(segments_BT, self.row_stripes), stack.cut(row_B, self.row_stripes)

        def layers(pair: Pair, carry: tuple[Array, ...], pair_key: PRNGKey | None) -> tuple[Array, ...]:
            *xs_BTD, load_BQ = carry
            keys = (None, None) if pair_key is None else jax.random.split(pair_key)
            # Each layer is recomputed apart: the last product of neither is needed again.
            xs_BTD, _ = stack.recomputed(pair.dense, self.remat)(xs_BTD, segments, rows, keys[0])
            xs_BTD, more_BQ = stack.recomputed(pair.mixture, self.remat)(xs_BTD, segments, rows, keys[1])
            return (*xs_BTD, load_BQ + more_BQ / self.num_pairs)

        none_BQ = compat.vary(jnp.zeros((len(row_B), len(LOAD))), compat.varying_axes(x_BTD))
        start = (*stack.cut(x_BTD, self.row_stripes), none_BQ)
        *xs_BTD, load_BQ = stack.run(self.pairs, start, layers, num_layers=self.num_pairs, remat="none", key=key)
        load_BQ = lax.pmean(load_BQ, "x")  # the same on all of x, which only this tells the types
        return self.embed.logits(self.final_norm(stack.join(xs_BTD))), dict(zip(LOAD, load_BQ.T, strict=True))

    def loss(
        self, batch: TextBatch, row_B: Int[Array, "B"], key: PRNGKey | None = None
    ) -> tuple[Scalar, Scalar, Evaluation]:
        """Sum of the negative log likelihood over this device's counted tokens, in nats, their number, and the LOAD.

        The gradient is that of the sum with the auxiliary losses, by their weights, which the value leaves out so that
        it compares with any other model's. A sequence counts in them with its number of counted tokens.
        """
        logits_BTV, load = self._logits(batch["inputs"], batch["segments"], row_B, key)
        nll_sum = jnp.sum(cross_entropy(logits_BTV, batch["targets"]) * batch["mask"])
        tokens_B = jnp.sum(batch["mask"], axis=1)
        found = {name: (jnp.sum(value_B * tokens_B), jnp.sum(tokens_B)) for name, value_B in load.items()}
        auxiliary = sum(self.num_pairs * weight * found[name][0] for name, weight in self.weights.items())
        return nll_sum + (auxiliary - lax.stop_gradient(auxiliary)), jnp.sum(tokens_B), found

    def evaluate(self, batch: TextBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, without dropout, and the share of choices without a place."""
        nll_sum, count, found = self.loss(batch, row_B)
        return {"loss": (nll_sum, count), "dropped_tokens": found["dropped_tokens"]}
