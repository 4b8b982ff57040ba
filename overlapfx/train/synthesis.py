"""Speech-like clips with their phone strings, made by arithmetic alone."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int16

VERSION = "1.0.0"  # of what is below: another one for every change of what a clip sounds like
SAMPLE_RATE = 8000
MAX_SAMPLES = 8192
NUM_CLIPS: Mapping[str, int] = {"train": 4000, "validation": 256, "test": 256}
_NUM_SPEAKERS: Mapping[str, int] = {"train": 64, "validation": 16, "test": 16}
_LENGTHS = (3, 8)  # phones in a clip, at least and at most
_CLIPS, _SPEAKERS = 0, 1  # what random numbers are for


@dataclasses.dataclass(frozen=True)
class _Voiced:
    """Harmonics of the voice; formants as (Hz, loudness), the same for all but scaled by the speaker's size."""

    formants: tuple[tuple[float, float], ...]
    loudness: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Noise:
    """Noise around `centre` Hz, `width` wide, after a silence of that share of its time."""

    centre: float
    width: float
    loudness: float
    seconds: float
    silence: float = 0.0


# Vowels and nasals, then fricatives and stops. Frequencies are those of textbooks, rounded.
PHONES: Mapping[str, _Voiced | _Noise] = {
    "a": _Voiced(((750, 1.0), (1200, 0.7), (2500, 0.25)), 1.0, 0.10),
    "e": _Voiced(((500, 1.0), (1900, 0.5), (2550, 0.3)), 0.9, 0.10),
    "i": _Voiced(((290, 1.0), (2300, 0.4), (3000, 0.3)), 0.8, 0.10),
    "o": _Voiced(((480, 1.0), (850, 0.7), (2500, 0.15)), 0.9, 0.10),
    "u": _Voiced(((310, 1.0), (700, 0.35), (2250, 0.08)), 0.8, 0.10),
    "m": _Voiced(((250, 1.0), (1050, 0.08)), 0.5, 0.08),
    "s": _Noise(3500, 500, 0.35, 0.09),
    "c": _Noise(2200, 500, 0.4, 0.09),
    "f": _Noise(1800, 3500, 0.15, 0.08),
    "t": _Noise(3000, 900, 0.7, 0.07, silence=0.6),
    "k": _Noise(1400, 400, 0.7, 0.07, silence=0.6),
}
ALPHABET = "".join(PHONES)


@dataclasses.dataclass(frozen=True)
class SpokenClip:
    """Samples of 16 bits at SAMPLE_RATE, at most MAX_SAMPLES of them; one character for every phone."""

    samples: Int16[np.ndarray, " samples"]
    phones: str
    speaker: int


@dataclasses.dataclass(frozen=True)
class _Speaker:
    """pitch in Hz; size: of the vocal tract, by which all frequencies are divided; speed: of speaking."""

    pitch: float
    size: float
    speed: float


def clip(split: str, number: int) -> SpokenClip:
    """Clip `number` of a split, always the same; speakers of different splits are different people."""
    rng = _rng(split, _CLIPS, number)
    speaker_number = int(rng.integers(_NUM_SPEAKERS[split]))
    speaker = _speaker(split, speaker_number)
    phones = _string(rng)
    speed = speaker.speed * rng.uniform(0.9, 1.1)
    parts = [_pause(rng), *(_say(PHONES[phone], speaker, speed, rng) for phone in phones), _pause(rng)]
    wave = _join(parts)[:MAX_SAMPLES]
    wave = wave / np.max(np.abs(wave)) * rng.uniform(0.2, 0.8)
    noise = rng.normal(size=len(wave)) * np.sqrt(np.mean(wave**2)) * 10 ** (-rng.uniform(5, 25) / 20)
    samples = np.clip(np.round((wave + noise) * 2**15), -(2**15), 2**15 - 1).astype(np.int16)
    return SpokenClip(samples, phones, speaker_number)


def _rng(split: str, what: int, number: int) -> np.random.Generator:
    return np.random.default_rng([list(NUM_CLIPS).index(split), what, number])


@functools.cache
def _speaker(split: str, number: int) -> _Speaker:
    rng = _rng(split, _SPEAKERS, number)
    size = rng.uniform(0.85, 1.15)
    # Larger people have lower voices, by and large.
    return _Speaker(pitch=rng.uniform(100, 200) / size**2, size=size, speed=rng.uniform(0.9, 1.3))


def _string(rng: np.random.Generator) -> str:
    """Phones, none twice in a row."""
    phones = [rng.integers(len(ALPHABET))]
    for _ in range(rng.integers(_LENGTHS[0], _LENGTHS[1] + 1) - 1):
        phones.append((phones[-1] + rng.integers(1, len(ALPHABET))) % len(ALPHABET))
    return "".join(ALPHABET[phone] for phone in phones)


def _pause(rng: np.random.Generator) -> Float[np.ndarray, " samples"]:
    return np.zeros(int(rng.uniform(0.01, 0.05) * SAMPLE_RATE))


def _say(
    phone: _Voiced | _Noise, speaker: _Speaker, speed: float, rng: np.random.Generator
) -> Float[np.ndarray, " samples"]:
    """A phone by itself, its ends faded."""
    num_samples = int(phone.seconds / speed * rng.uniform(0.9, 1.1) * SAMPLE_RATE)
    if isinstance(phone, _Voiced):
        wave = _voice(phone, speaker, num_samples, rng)
    else:
        wave = _hiss(phone, speaker, num_samples, rng)
    return wave * phone.loudness * rng.uniform(0.8, 1.2) / np.sqrt(np.mean(wave**2))


def _voice(
    phone: _Voiced, speaker: _Speaker, num_samples: int, rng: np.random.Generator
) -> Float[np.ndarray, " samples"]:
    """Harmonics of a gliding pitch, as loud as the formants make them."""
    first, last = rng.uniform(0.9, 1.1, 2)
    pitch = speaker.pitch * np.linspace(first, last, num_samples)
    phase = 2 * math.pi * np.cumsum(pitch) / SAMPLE_RATE
    harmonics = np.arange(1, int(0.95 * SAMPLE_RATE / 2 / pitch.max()) + 1)
    frequency = harmonics * speaker.pitch
    loudness = np.zeros(len(harmonics))
    for centre, height in phone.formants:
        centre = centre / speaker.size * rng.uniform(0.94, 1.06)
        loudness += height / (1 + ((frequency - centre) / (60 + 0.05 * centre)) ** 2)
    waves = np.sin(np.outer(harmonics, phase) + rng.uniform(0, 2 * math.pi, len(harmonics))[:, None])
    return _fade(loudness @ waves, 0.012)


def _hiss(
    phone: _Noise, speaker: _Speaker, num_samples: int, rng: np.random.Generator
) -> Float[np.ndarray, " samples"]:
    """Noise of a band, with the silence before it."""
    spectrum = np.fft.rfft(rng.normal(size=num_samples))
    frequency = np.fft.rfftfreq(num_samples, 1 / SAMPLE_RATE)
    away = (frequency - phone.centre / speaker.size * rng.uniform(0.94, 1.06)) / phone.width
    wave = np.fft.irfft(spectrum * np.exp(-0.5 * away**2), num_samples)
    wave[: int(phone.silence * num_samples)] = 0
    return _fade(wave, 0.004)


def _fade(wave: Float[np.ndarray, " samples"], seconds: float) -> Float[np.ndarray, " samples"]:
    rise = np.minimum(1, np.arange(1, len(wave) + 1) / (seconds * SAMPLE_RATE))
    return wave * rise * rise[::-1]


def _join(parts: list[np.ndarray]) -> Float[np.ndarray, " samples"]:
    """One after the other, each beginning a little before the one before has ended."""
    overlap = int(0.008 * SAMPLE_RATE)
    wave = parts[0]
    for part in parts[1:]:
        wave = np.concatenate([wave[:-overlap], wave[-overlap:] + part[:overlap], part[overlap:]])
    return wave
