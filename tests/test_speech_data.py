"""Synthetic speech is made once and always alike; clips become examples; what cannot be read as speech is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tensorflow_datasets as tfds

from overlapfx.config import DataConfig
from overlapfx.train import sources, synthesis
from overlapfx.train.data import BatchStream, eval_batches, make_source
from overlapfx.train.documents import Clip, Shard, SpeechSource, TextSource
from overlapfx.train.objectives import NextToken
from overlapfx.train.speech import HiddenSpeech, Transcription
from overlapfx.train.stops import DataError

RATE = synthesis.SAMPLE_RATE
PINNED = (
    "eso",
    37,
    2127,
    [400, 900, 1500],
    [-3628, 1682, 1601],
)  # phones, speaker, length, some places, the samples there
SPEECH = Transcription(RATE, synthesis.MAX_SAMPLES, 32, synthesis.ALPHABET, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "overlapfx"


@pytest.fixture
def few_clips(monkeypatch) -> None:
    monkeypatch.setattr(synthesis, "NUM_CLIPS", {"train": 20, "validation": 6, "test": 4})


def config(name: str = "synthetic_speech", data_dir: object = "", **others: int) -> DataConfig:
    return DataConfig(name=name, data_dir=str(data_dir), global_batch=4, num_workers=0, seed=0, **others)


# What a clip is.


def test_clips_are_always_the_same():
    """Another sound is another version: change both together."""
    clip = synthesis.clip("train", 17)
    assert synthesis.VERSION == "1.0.0"
    assert (clip.phones, clip.speaker, len(clip.samples)) == PINNED[:3]
    np.testing.assert_allclose(clip.samples[PINNED[3]], PINNED[4], atol=2)  # sines may differ in the last bit


def test_clips_differ_and_speakers_of_splits_are_different_people():
    clips = [synthesis.clip(split, n) for split in synthesis.NUM_CLIPS for n in range(40)]
    assert len({clip.samples.tobytes() for clip in clips}) == len(clips)
    assert {len(clip.phones) for clip in clips} == set(range(3, 9))
    assert set("".join(clip.phones for clip in clips)) == set(synthesis.ALPHABET)
    assert all(a != b for clip in clips for a, b in zip(clip.phones, clip.phones[1:], strict=False))
    assert all(clip.samples.dtype == np.int16 and 1000 < len(clip.samples) < synthesis.MAX_SAMPLES for clip in clips)
    people = [synthesis._speaker(split, n) for split in synthesis.NUM_CLIPS for n in range(16)]
    assert len(set(people)) == len(people)


def peak(samples: np.ndarray) -> float:
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


def test_phones_sound_as_their_table_says():
    speaker = synthesis._Speaker(pitch=110, size=1.0, speed=1.0)
    for phone, low, high in (("i", 200, 450), ("a", 600, 1000), ("s", 2800, 4000), ("c", 1500, 2900), ("m", 150, 400)):
        wave = synthesis._say(synthesis.PHONES[phone], speaker, 1.0, np.random.default_rng(0))
        assert low < peak(wave) < high, phone
    stop = synthesis._say(synthesis.PHONES["t"], speaker, 1.0, np.random.default_rng(0))
    assert not stop[: len(stop) // 2].any() and stop[len(stop) // 2 :].any()


# Clips as examples.


def clip_row(num_samples: int, text: str) -> dict[str, np.ndarray]:
    return {"samples": np.arange(num_samples, dtype=np.int16), "text": np.frombuffer(text.encode(), np.uint8)}


@pytest.mark.parametrize(
    ("num_samples", "text", "labels"),
    [
        (100, "abca", [1, 2, 3, 1]),
        (100, "", []),
        (100, "abcab", []),  # more than target_len
        (24, "aba", [1, 2, 1]),  # 3 tokens
        (17, "aba", [1, 2, 1]),
        (16, "aba", []),  # 2 tokens
        (24, "aab", []),  # 3 tokens, but a blank is needed between the two a
        (25, "aab", [1, 1, 2]),
    ],
)
def test_transcription_by_hand(num_samples, text, labels):
    objective = Transcription(RATE, 128, 16, "abc", 4)  # 8 samples are a token
    example = objective.example(clip_row(num_samples, text), np.random.default_rng(0))
    assert example["labels"].tolist() == labels + [0] * (4 - len(labels))
    assert example["mask"].tolist() == [1] * len(labels) + [0] * (4 - len(labels))
    assert example["length"] == num_samples
    assert example["samples"].tolist() == list(range(num_samples)) + [0] * (128 - num_samples)
    for name, field in objective.fields.items():
        assert (example[name].shape, example[name].dtype) == (field.shape, field.dtype), name


def test_transcription_refuses_unknown_characters():
    with pytest.raises(DataError, match=r"^The transcript 'abx' has 'x', which is not in model.alphabet 'abc'; add it"):
        Transcription(RATE, 128, 16, "abc", 4).example(clip_row(100, "abx"), np.random.default_rng(0))


@pytest.mark.parametrize(("num_samples", "num_spans", "span"), [(2048, 10, 10), (200, 1, 10), (80, 1, 5), (1, 1, 1)])
def test_hidden_speech_hides_spans_within_the_clip(num_samples, num_spans, span):
    objective = HiddenSpeech(RATE, 2048, 256)
    num_tokens = -(-num_samples // 8)
    masks = [objective.example(clip_row(num_samples, ""), np.random.default_rng(seed))["mask"] for seed in range(50)]
    for mask in masks:
        assert not mask[num_tokens:].any()
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        runs = edges[1::2] - edges[::2]
        assert len(runs) <= num_spans and runs.min() >= span and span <= mask.sum() <= num_spans * span
    if num_tokens > 20:
        assert len({mask.tobytes() for mask in masks}) > 10


# Sources.


def test_synthetic_speech_is_prepared_once(few_clips, cache, monkeypatch):
    found = {split: make_source(config(), split, RATE) for split in ("train", "validation", "test")}
    monkeypatch.setattr(synthesis, "clip", lambda *_: pytest.fail("made again"))
    again = make_source(config(), "train", RATE)
    monkeypatch.undo()
    assert len(list(cache.glob(f"synthetic_speech/rate_{RATE}/1.0.0"))) == 1
    assert [len(source) for source in found.values()] == [20, 6, 4]
    assert (again.name, again.lengths.tolist()) == (found["train"].name, found["train"].lengths.tolist())
    read = {
        source[i].samples.tobytes(): source[i].text.decode() for source in found.values() for i in range(len(source))
    }
    made = [
        synthesis.clip(split, n)
        for split, count in (("train", 20), ("validation", 6), ("test", 4))
        for n in range(count)
    ]
    assert read == {clip.samples.tobytes(): clip.phones for clip in made}


def test_batches_of_speech_resume_and_are_cut_over_processes(few_clips):  # C21
    source = make_source(config(), "train", RATE)
    settings = {"objective": SPEECH, "global_batch": 4, "seed": 3}
    with BatchStream(source, **settings) as stream:
        whole = [next(stream) for _ in range(8)]  # more than an epoch
    assert whole[0]["samples"].shape == (4, 8192) and whole[0]["length"].shape == (4,)
    for process in range(2):
        with BatchStream(source, process_index=process, process_count=2, **settings) as stream:
            for _ in range(3):
                next(stream)
            position = stream.get_state()
        with BatchStream(source, process_index=process, process_count=2, **settings) as stream:
            stream.set_state(position)
            for batch in whole[3:]:
                for name, array in next(stream).items():
                    np.testing.assert_array_equal(array, batch[name][2 * process : 2 * process + 2])
    other = dataclasses.replace(SPEECH, target_len=7)
    with (
        BatchStream(source, objective=other, global_batch=4, seed=3) as stream,
        pytest.raises(ValueError, match="The saved position belongs to other batches .objective was"),
    ):
        stream.set_state(position)


def test_the_last_evaluation_batch_is_filled_with_clips_that_count_nothing(few_clips):
    batches = list(eval_batches(make_source(config(), "validation", RATE), objective=SPEECH, global_batch=4))
    assert [batch["length"].astype(bool).tolist() for batch in batches] == [[True] * 4, [True, True, False, False]]
    assert not batches[1]["mask"][2:].any() and batches[1]["mask"][:2].any(axis=1).all()


def test_text_is_read_of_the_same_data_set(few_clips):
    source = make_source(config(), "test")
    assert isinstance(source, TextSource)
    assert sorted(source[i].tobytes() for i in range(4)) == sorted(
        synthesis.clip("test", n).phones.encode() for n in range(4)
    )
    assert source.name != make_source(config(), "test", RATE).name


class Records:
    """Six clips of one file, one without speech, one with another kind of it."""

    broken: ClassVar = {
        1: {"speech": None, "text": b"a"},
        4: {"speech": np.zeros((9, 2), np.int16), "text": b"a"},
    }

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> object:
        return self.broken.get(index, {"speech": np.full(10 + index, index, np.int16), "text": b"a"})


def test_broken_clips_are_named_counted_and_passed_over():
    shards = (Shard("a.array_record", 0, 6),)
    with pytest.raises(DataError, match=r"^Record 1 of a.array_record cannot be read \(its speech is no .*\(2 such"):
        SpeechSource("toy", Records(), shards, max_skipped=1)
    source = SpeechSource("toy", Records(), shards, max_skipped=2)
    assert len(source.skipped) == 2
    clips = SPEECH.rows(source)
    assert [int(clips[i]["samples"][0]) for i in range(len(clips))] == [0, 2, 3, 5]
    with pytest.raises(IndexError):
        clips[4]


def test_clips_that_are_too_long_are_passed_over():
    source = SpeechSource("toy", Records(), max_skipped=2)
    assert len(HiddenSpeech(RATE, 13, 1).rows(source)) == 3
    with pytest.raises(ValueError, match=r"^None of the 6 clips of toy has 1 to 9 samples, .*; raise model.seq_len or"):
        HiddenSpeech(RATE, 9, 1).rows(source)


def prepare(data_dir: Path, name: str, splits: tuple[str, ...], features: dict, metadata: dict) -> None:
    """A data set as somebody else would have prepared it."""

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("2.1.1")
        BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name="default")]
        url_infos = None

        def _info(self):
            found = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=found, metadata=tfds.core.MetadataDict(metadata))

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(i) for i, split in enumerate(splits)}

        def _generate_examples(self, number):
            dtype = features.get("speech", SAMPLES).np_dtype
            example = {"speech": np.full(50, number, dtype), "text": f"TEXT {number}"}
            yield 0, {name: example[name] for name in features}

    Builder.name = name
    Builder(data_dir=data_dir, file_format="array_record").download_and_prepare()


SAMPLES, TEXT = tfds.features.Tensor(shape=(None,), dtype=np.int16), tfds.features.Text()
PARTS = ("train_clean100", "train_clean360", "train_other500", "dev_clean", "test_clean")


def test_librispeech_is_known_by_name_and_by_its_splits(tmp_path):
    with pytest.raises(ValueError, match=r"^data.name 'librispeech' is not prepared below .*`tfds build librispeech"):
        make_source(config("librispeech", tmp_path), "train", 16000)
    prepare(tmp_path, "librispeech", PARTS, {"speech": SAMPLES, "text": TEXT}, {"sample_rate": 16000})
    training, validation = (
        make_source(config("librispeech", tmp_path), split, 16000) for split in ("train", "validation")
    )
    assert [training[i].text for i in range(len(training))] == [b"TEXT 0", b"TEXT 1", b"TEXT 2"]
    assert (len(validation), validation[0].text) == (1, b"TEXT 3")
    assert len(make_source(config("librispeech", tmp_path), "dev_clean[:1]", 16000)) == 1


def test_splits_of_librispeech_are_those_of_tfds():
    from tensorflow_datasets.datasets.librispeech import librispeech_dataset_builder

    named = {part for split in sources._SPLITS["librispeech"].values() for part in split.split("+")}
    assert named == set(PARTS) <= set(librispeech_dataset_builder._DL_URLS)


def test_a_feature_that_needs_tensorflow_is_refused(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

    monkeypatch.setattr(tfds.core.read_only_builder, "builder_from_files", missing)
    with pytest.raises(ValueError, match=r"^data.name 'librispeech' has a feature that .*; install tensorflow\.$"):
        make_source(config("librispeech", tmp_path), "train", 16000)


@pytest.mark.parametrize(
    ("features", "metadata", "sentence"),
    [
        (
            {"text": TEXT},
            {},
            "other/default/2.1.1 has no feature named 'speech' of samples of 16 bits, only text; choose",
        ),
        (
            {"speech": tfds.features.Tensor(shape=(None,), dtype=np.float32), "text": TEXT},
            {"sample_rate": 8000},
            "other/default/2.1.1 has no feature named 'speech' of samples of 16 bits, only speech, text; choose",
        ),
        (
            {"speech": SAMPLES, "text": TEXT},
            {"sample_rate": 16000},
            "other/default/2.1.1 has 16000 samples per second, but model.sample_rate is 8000; set it to the",
        ),
        (
            {"speech": SAMPLES, "text": TEXT},
            {},
            "other/default/2.1.1 has an unknown number of samples per second, but model.sample_rate is 8000; set it",
        ),
    ],
)
def test_refuses_what_is_no_speech(tmp_path, features, metadata, sentence):
    prepare(tmp_path, "other", ("train",), features, metadata)
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*\.$"):
        make_source(config("other", tmp_path), "train", 8000)


def test_text_objectives_do_not_read_speech():
    assert NextToken(8).sample_rate is None and SPEECH.sample_rate == RATE
    assert len(Clip(np.zeros(7, np.int16), b"abc")) == 7
