"""Log-mel features of speech, computed from the waveform on the device that uses them."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

FLOOR = 1e-6  # of a band's energy for samples from -1 to 1, so that silence has a logarithm


def log_mel(
    samples_BS: Int[Array, "B S"], *, sample_rate: int, window: int, hop: int, num_mels: int
) -> Float32[Array, "B F M"]:
    """Logarithm of the energy in each mel band, one frame for every `hop` samples of 16 bits.

    Frame f sees `window` samples from f * hop on, zeros after the last one, through a Hann window. S is a multiple of
    hop. The transform is a product with a constant matrix, in full float32: matrix units are faster at that than at
    FFTs, and bfloat16 would drown quiet bands.
    """
    batch, num_samples = samples_BS.shape
    num_frames, per_window = num_samples // hop, -(-window // hop)
    padded_BS = jnp.pad(samples_BS.astype(jnp.float32) / 2**15, ((0, 0), (0, (per_window - 1) * hop)))
    hops_BFH = padded_BS.reshape(batch, num_frames + per_window - 1, hop)
    frames_BFW = jnp.concatenate([hops_BFH[:, i : i + num_frames] for i in range(per_window)], axis=-1)
    cosine_WK, sine_WK = _transform(window, per_window * hop)
    precise = lax.Precision.HIGHEST
    real_BFK = jnp.einsum("bfw,wk->bfk", frames_BFW, cosine_WK, precision=precise)
    imaginary_BFK = jnp.einsum("bfw,wk->bfk", frames_BFW, sine_WK, precision=precise)
    bands_KM = mel_bands(sample_rate, _transform_size(window), num_mels)
    power_BFK = real_BFK**2 + imaginary_BFK**2
    return jnp.log(jnp.einsum("bfk,km->bfm", power_BFK, bands_KM, precision=precise) + FLOOR)


def normalize(features_BFM: Float32[Array, "B F M"], counted_BF: Bool[Array, "B F"]) -> Float32[Array, "B F M"]:
    """Mean 0 and variance 1 of every band over the counted frames of its clip; zeros elsewhere."""
    weight_BF1 = counted_BF[..., None].astype(features_BFM.dtype)
    count_B11 = jnp.maximum(jnp.sum(weight_BF1, axis=1, keepdims=True), 1)
    centred_BFM = (features_BFM - jnp.sum(features_BFM * weight_BF1, axis=1, keepdims=True) / count_B11) * weight_BF1
    variance_B1M = jnp.sum(centred_BFM**2, axis=1, keepdims=True) / count_B11
    return centred_BFM * lax.rsqrt(variance_B1M + 1e-5)


def _transform_size(window: int) -> int:
    """Samples of the Fourier transform: the power of two that holds the window."""
    return 1 << (window - 1).bit_length()


@functools.cache
def _transform(window: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Real and imaginary part of the windowed transform, [num_rows, frequencies]; rows beyond the window are zero."""
    size = _transform_size(window)
    place_W = np.arange(num_rows)
    hann_W = np.where(place_W < window, 0.5 - 0.5 * np.cos(2 * math.pi * place_W / window), 0.0)
    angle_WK = 2 * math.pi / size * (np.outer(place_W, np.arange(size // 2 + 1)) % size)
    return tuple((hann_W[:, None] * wave).astype(np.float32) for wave in (np.cos(angle_WK), -np.sin(angle_WK)))


@functools.cache
def mel_bands(sample_rate: int, transform_size: int, num_mels: int) -> Float32[np.ndarray, "K M"]:
    """Triangles over the frequencies of a transform, evenly spaced in mel (2595 log10(1 + f / 700)) up to the highest.

    Each rises from the centre of the band before to 1 at its own and falls to the centre of the band after.
    """
    highest = 2595 * math.log10(1 + sample_rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, num_mels + 2) / 2595) - 1)
    frequency_K1 = np.arange(transform_size // 2 + 1)[:, None] * (sample_rate / transform_size)
    below, centre, above = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (frequency_K1 - below) / (centre - below), (above - frequency_K1) / (above - centre)
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
