"""Data sets by name: those that are made here, and whatever TFDS has prepared."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from overlapfx.config import DataConfig
from overlapfx.train import pystdlib, synthesis
from overlapfx.train.directories import cache_dir, make_directory
from overlapfx.train.documents import Shard, Source, SpeechSource, TextSource

_log = logging.getLogger(__name__)

# Where a data set calls its parts otherwise than we do.
_SPLITS: Mapping[str, Mapping[str, str]] = {
    "librispeech": {
        "train": "train_clean100+train_clean360+train_other500",
        "validation": "dev_clean",
        "test": "test_clean",
    }
}


@dataclasses.dataclass(frozen=True)
class _Made:
    """A data set that is made on first use: `examples` yields the (key, example) of a split."""

    name: str
    config: str
    version: str
    features: Mapping[str, Any]
    metadata: Mapping[str, Any]
    splits: tuple[str, ...]
    examples: Callable[[str], Iterable[tuple[str, dict[str, Any]]]]


def make_source(data: DataConfig, split: str, sample_rate: int | None = None) -> Source:
    """The records of `split` of the data set that `data` names: text, or speech at `sample_rate`.

    "pystdlib" (text) and "synthetic_speech" are made on first use, below data.data_dir or else the user's cache
    directory. Any other name ("name", "name/config" or "name/config:version") is a TFDS data set that was prepared
    there in the ArrayRecord format, with a "text" feature and, for speech, a "speech" feature of 16 bits. `split` may
    be any TFDS split expression, such as "train[:1%]".

    Raises:
        ValueError: the data set is unknown or not prepared, has no text, no speech of this rate, no such split, another
            format, or a file that is missing or damaged.
    """
    data_dir = Path(data.data_dir).expanduser() if data.data_dir else cache_dir()
    if data.name in _MADE:
        builder = tfds.builder_from_directory(_prepare(_MADE[data.name](), data_dir))
    else:
        builder = _find_prepared(data.name, data_dir)
    info = builder.info
    features = dict(info.features.items()) if isinstance(info.features, tfds.features.FeaturesDict) else {}
    _check_text(info, features)
    if sample_rate is not None:
        _check_speech(info, features, sample_rate)
    split = _SPLITS.get(builder.name, {}).get(split, split)
    shards = _check_files(builder, split)
    name, records = f"{info.full_name}:{split}", builder.as_data_source(split)
    kept: dict[str, Any] = {"cache": cache_dir() / "lengths", "max_skipped": data.max_skipped_records}
    if sample_rate is None:
        return TextSource(name, records, shards, **kept)
    return SpeechSource(f"{name} (speech)", records, shards, **kept)


def _find_prepared(name: str, data_dir: Path) -> tfds.core.DatasetBuilder:
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        base = name.split("/")[0].split(":")[0]
        if base in tfds.list_builders(with_community_datasets=False):
            remedy = f"prepare it with `tfds build {name} --file_format=array_record --data_dir={data_dir}`"
        else:
            remedy = "TFDS knows no data set of this name, so correct data.name or data.data_dir"
        raise ValueError(f"data.name {name!r} is not prepared below {data_dir}: {remedy}.") from None
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ValueError(
            f"data.name {name!r} has a feature that TFDS reads with TensorFlow only, such as Audio; install tensorflow."
        ) from None


def _check_text(info: tfds.core.DatasetInfo, features: Mapping[str, Any]) -> None:
    if not isinstance(features.get("text"), tfds.features.Text):
        raise ValueError(
            f"{info.full_name} has no text feature named 'text', only {', '.join(features) or 'other features'}; "
            "choose another data.name."
        )


def _check_speech(info: tfds.core.DatasetInfo, features: Mapping[str, Any], sample_rate: int) -> None:
    speech = features.get("speech")
    if not (isinstance(speech, tfds.features.Tensor) and speech.shape == (None,) and speech.np_dtype == np.int16):
        raise ValueError(
            f"{info.full_name} has no feature named 'speech' of samples of 16 bits, only "
            f"{', '.join(sorted(features))}; choose another data.name."
        )
    found = getattr(speech, "sample_rate", None) or (info.metadata or {}).get("sample_rate")
    if found != sample_rate:
        raise ValueError(
            f"{info.full_name} has {found or 'an unknown number of'} samples per second, but model.sample_rate is "
            f"{sample_rate}; set it to the former or choose another data.name."
        )


def _check_files(builder: tfds.core.DatasetBuilder, split: str) -> list[Shard]:
    """The files of a split, all of which exist; refuses what has no random access."""
    info = builder.info
    if tfds.core.FileFormat.ARRAY_RECORD not in info.available_file_formats():
        found = info.file_format.value if info.file_format else "an unknown format"
        raise ValueError(
            f"{info.full_name} in {builder.data_dir} is prepared as {found}, which has no random access; prepare it "
            "again with --file_format=array_record."
        )
    try:
        instructions = info.splits[split].file_instructions
    except (KeyError, ValueError):
        known = ", ".join(info.splits) or "none at all"
        raise ValueError(f"{info.full_name} has no split {split!r}; its splits are {known}.") from None
    if not instructions:
        raise ValueError(f"Split {split!r} of {info.full_name} in {builder.data_dir} is empty; choose another split.")
    for instruction in instructions:
        if not os.path.exists(instruction.filename):
            raise ValueError(
                f"{instruction.filename}, a file of {info.full_name}, is missing; remove its directory and prepare the "
                "data set again."
            )
    return [Shard(instruction.filename, instruction.skip, instruction.take) for instruction in instructions]


def _prepare(made: _Made, data_dir: Path) -> Path:
    """The directory of the prepared data set, written first if it is not there.

    It appears complete or not at all, and of several processes that need it one writes while the others wait.
    """
    directory = data_dir / made.name / made.config / made.version
    if directory.exists():
        return directory
    make_directory(data_dir, "The data directory", "set data.data_dir to a place that can be written")
    with open(data_dir / f"{made.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it even if this process is killed
        if not directory.exists():
            for leftover in directory.parent.glob("incomplete.*"):  # its writer was killed, else it would have the lock
                shutil.rmtree(leftover)
            _log.info("Preparing %s in %s", made.name, directory)
            with _quiet_tfds(), tempfile.TemporaryDirectory() as unused:
                builder = _builder(made)(data_dir=data_dir, file_format="array_record")
                builder.download_and_prepare(download_dir=unused)
    return directory


def _builder(made: _Made) -> type[tfds.core.GeneratorBasedBuilder]:
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """What `made` says."""

        name = made.name
        VERSION = tfds.core.Version(made.version)
        # Nothing is downloaded, and TFDS's own search for a list of addresses imports a package it does not require.
        url_infos = None
        BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=made.config)]

        def _info(self) -> tfds.core.DatasetInfo:
            # dataset_info_from_configs needs TensorFlow
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(dict(made.features)),
                metadata=tfds.core.MetadataDict(made.metadata),
            )

        def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[Any]]:
            return {split: self._generate_examples(split) for split in made.splits}

        def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
            yield from made.examples(split)

    return Builder


def _pystdlib() -> _Made:
    """Source files of the Python standard library; the version is Python's, the config a digest of the files."""
    files = pystdlib.collect()

    def examples(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for file in files:
            if pystdlib.split_of(file.name) == split:
                yield file.name, {"name": file.name, "text": file.text}

    text = tfds.features.Text()
    return _Made(
        name="pystdlib",
        config=f"files_{pystdlib.fingerprint(files)}",
        version=".".join(map(str, sys.version_info[:3])),
        features={"name": text, "text": text},
        metadata={},
        splits=pystdlib.SPLITS,
        examples=examples,
    )


def _synthetic_speech() -> _Made:
    """Clips of `synthesis`, with samples as a plain array: TFDS's own Audio feature needs TensorFlow."""

    def examples(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for number in range(synthesis.NUM_CLIPS[split]):
            clip = synthesis.clip(split, number)
            yield f"{split}-{number:05}", {"speech": clip.samples, "text": clip.phones, "speaker_id": clip.speaker}

    samples = tfds.features.Tensor(shape=(None,), dtype=np.int16)
    return _Made(
        name="synthetic_speech",
        config=f"rate_{synthesis.SAMPLE_RATE}",
        version=synthesis.VERSION,
        features={"speech": samples, "text": tfds.features.Text(), "speaker_id": np.int64},
        metadata={"sample_rate": synthesis.SAMPLE_RATE},
        splits=tuple(synthesis.NUM_CLIPS),
        examples=examples,
    )


_MADE: Mapping[str, Callable[[], _Made]] = {"pystdlib": _pystdlib, "synthetic_speech": _synthetic_speech}


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Without TFDS's announcement of a download of unknown size, and bars for what takes a fraction of a second."""
    tfds.disable_progress_bar()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        tfds.enable_progress_bar()
