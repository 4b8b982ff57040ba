"""Step times, utilization, the metrics file, what the console shows."""

import io
import json
import math
import pathlib

import pytest
from tensorboardX.proto.event_pb2 import Event

from overlapfx.chips import TPU_V5P
from overlapfx.train.console import Console, clock_time
from overlapfx.train.metrics import MetricsWriter, StepTimer, Utilization, read_metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_step_is_timed_from_the_end_of_the_one_before() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer.apart("compile") as span:
        clock.work(30)
    assert span.seconds == 30
    timer.start()
    clock.work(2)
    assert timer.lap() == 2  # the first step does not contain compilation
    clock.work(0.5)  # logging and reading after step 1 belong to step 2
    clock.work(2)
    assert timer.lap() == 2.5
    with timer.apart("eval"):
        clock.work(7)
    clock.work(1)
    with timer.apart("checkpoint"):
        clock.work(3)
    clock.work(1)
    with timer.apart("eval"):
        clock.work(1)
    assert timer.lap() == 2
    assert timer.apart_s == {"compile": 30, "eval": 8, "checkpoint": 3}


def test_time_apart_counts_when_the_block_fails() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.start()
    with pytest.raises(ZeroDivisionError), timer.apart("eval"):
        clock.work(4 / bool(clock.work(4)))
    clock.work(1)
    assert timer.lap() == 1


def test_utilization_by_hand() -> None:
    # 8 devices do 8 * 459e12 FLOPs a second at most; 0.5 s at 40 % MFU is 0.4 * 0.5 * 8 * 459e12 = 734.4e12 FLOPs.
    use = Utilization(734.4e12, 734.4e12 * 4 / 3, 8, TPU_V5P)
    rates = use.rates(1, 0.5)
    assert rates.mfu_percent == pytest.approx(40)
    assert rates.hfu_percent == pytest.approx(53.3333, rel=1e-4)
    assert rates.model_tflops_per_device == pytest.approx(183.6)
    assert "459 TFLOP/s per device: TPU v5p" in use.convention()


def test_unknown_chip_has_a_rate_but_no_utilization() -> None:
    use = Utilization(2e12, 3e12, 2, None)
    rates = use.rates(1, 0.1)
    assert (rates.model_tflops_per_device, rates.mfu_percent, rates.hfu_percent) == (pytest.approx(10), None, None)
    assert "n/a" in use.convention()


def test_c24_more_than_the_peak_is_an_error() -> None:
    # Step 1 logged at 0.319 s, which would be 2400 TFLOP/s on a chip that does 459.
    flops = 2400e12 * 0.319
    with pytest.raises(
        ValueError, match=r"^Step 1 took 0\.319 s, which is 2400 TFLOP/s per device or MFU 522\.9 %"
    ) as error:
        Utilization(flops, flops, 1, TPU_V5P).rates(1, 0.319)
    assert "459 TFLOP/s of TPU v5p" in str(error.value)
    # Recomputation alone may push it over: 90 % MFU with a third more is 120 % HFU.
    with pytest.raises(ValueError, match=r"HFU 120\.0 %"):
        Utilization(0.9 * 459e12, 1.2 * 459e12, 1, TPU_V5P).rates(3, 1.0)
    assert Utilization(459e12, 459e12, 1, TPU_V5P).rates(3, 1.0).hfu_percent == pytest.approx(100)


@pytest.mark.parametrize(("model", "hardware", "devices"), [(0.0, 1.0, 1), (2.0, 1.0, 1), (1.0, 1.0, 0)])
def test_impossible_flops_are_refused(model: float, hardware: float, devices: int) -> None:
    with pytest.raises(ValueError, match=r"num_devices is 0|model_flops_per_step is"):
        Utilization(model, hardware, devices, None)


def train_steps(path: pathlib.Path) -> list[tuple[int, int]]:
    return [(record["attempt"], record["step"]) for record in read_metrics(path) if record["kind"] == "train"]


def test_lines_are_on_disk_at_once_and_exact(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, about={"chip": None})
    loss = 0.1 + 0.2
    writer.write("train", 1, loss=loss, mfu_percent=None)
    writer.write("train", 2, loss=math.nan, high=math.inf, low=-math.inf)
    # Not closed: a killed process would leave the same.
    start, first, second = read_metrics(path)
    assert start["kind"] == "start"
    assert start["chip"] is None
    assert (first["loss"], first["mfu_percent"]) == (loss, None)
    assert math.isnan(second["loss"])
    assert (second["high"], second["low"]) == (math.inf, -math.inf)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    writer.close()


def test_lost_work_of_an_earlier_attempt_is_not_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for from_step, last in [(0, 7), (5, 6), (5, 8)]:
        writer = MetricsWriter(path, from_step=from_step)
        for step in range(from_step + 1, last + 1):
            writer.write("train", step, loss=0.0)
        writer.close()
    assert train_steps(path) == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (3, 6), (3, 7), (3, 8)]
    assert len(path.read_text().splitlines()) == 3 + 7 + 1 + 3  # yet nothing is deleted
    # An attempt that starts over, since no checkpoint was left, leaves nothing of those before.
    MetricsWriter(path, from_step=0).close()
    assert train_steps(path) == []


def test_torn_line_of_a_killed_writer_is_left_out(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write("train", 1, loss=1.0)
    writer.write("train", 2, loss=2.0)
    writer.close()
    path.write_text(path.read_text()[:-9])
    assert train_steps(path) == [(1, 1)]
    writer = MetricsWriter(path, from_step=1)
    writer.write("train", 2, loss=2.0)
    writer.close()
    assert train_steps(path) == [(1, 1), (2, 2)]


@pytest.mark.parametrize("damage", ["{", "[1]", '{"step": 3}'])
def test_any_other_damage_is_an_error(tmp_path: pathlib.Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write("train", 1, loss=1.0)
    writer.close()
    path.write_text(path.read_text().replace("\n", f"\n{damage}\n", 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not a metrics record"):
        read_metrics(path)


def tensorboard_scalars(directory: pathlib.Path) -> list[tuple[str, int, float]]:
    """The scalars of all event files: each record is an 8-byte length, a 4-byte checksum, the event, a checksum."""
    scalars = []
    for file in sorted(directory.glob("events.*")):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            scalars += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return scalars


def test_tensorboard_gets_the_numbers(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tb")
    writer.write("train", 1, loss=2.5, mfu_percent=None, note="text", tokens=64)
    writer.write("eval", 1, loss=3.5)
    writer.close()
    want = [("train/loss", 1, 2.5), ("train/tokens", 1, 64.0), ("eval/loss", 1, 3.5)]
    assert tensorboard_scalars(tmp_path / "tb") == want


def test_other_processes_write_nothing(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tb", primary=False)
    writer.write("train", 1, loss=1.0)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def step_values(loss: float = 2.0) -> dict:
    return {
        "loss": loss,
        "grad_norm": 0.5,
        "learning_rate": 3e-4,
        "step_s": 0.25,
        "tokens_per_s": 65536.0,
        "model_tflops_per_device": 0.0123,
        "mfu_percent": 12.34,
        "hfu_percent": None,
    }


def test_plain_lines_when_not_a_terminal() -> None:
    out = io.StringIO()
    with Console(10, log_every=4, file=out) as console:
        console.note("starting")
        for step in range(1, 11):
            console.step(step, step_values(step))
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting"
    # The first step, every fourth, the last; time left is 0.25 s for each remaining step.
    assert [line.split()[1] for line in lines[1:]] == ["1/10", "4/10", "8/10", "10/10"]
    assert lines[1].split("  ") == [
        "step",
        "1/10",
        "loss 1.0000",
        "grad norm 0.5",
        "lr 3.00e-04",
        "250.0 ms",
        "65,536 tokens/s",
        "0.0123 TFLOP/s/device",
        "MFU 12.3 %",
        "HFU n/a",
        "ETA 0:02",
    ]
    assert "\x1b" not in out.getvalue()


def test_live_bar_on_a_terminal() -> None:
    out = io.StringIO()
    with Console(3, file=out, live=True) as console:
        console.note("a [note] of 12 words")
        for step in range(1, 4):
            console.step(step, step_values())
    text = out.getvalue()
    assert "\x1b[" in text  # a bar is drawn with control sequences
    assert "a [note] of 12 words" in text  # what looks like markup is not swallowed
    assert "3/3" in text
    assert "loss 2.0000  ETA 0:00" in text
    assert "step 2/3  loss 2.0000" in text


def test_other_processes_show_nothing(capsys: pytest.CaptureFixture) -> None:
    for live in (True, False, None):
        with Console(3, live=live, primary=False) as console:
            console.note("x")
            console.step(1, step_values())
    assert capsys.readouterr().out == ""


def test_clock_time() -> None:
    assert [clock_time(s) for s in (0, 6.6, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]
