"""The picture of a run shows what the metrics file holds."""

import pathlib

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from overlapfx.train import report
from overlapfx.train.metrics import MetricsWriter


def write_run(path: pathlib.Path, known_chip: bool = True) -> pathlib.Path:
    """Twenty steps in two attempts: the first reached step 12, the second was restored at step 10."""
    for from_step, last in [(0, 12), (10, 20)]:
        writer = MetricsWriter(path, from_step=from_step)
        for step in range(from_step + 1, last + 1):
            mfu = 30 + step / 10 if known_chip else None
            hfu = 40 + step / 10 if known_chip else None
            loss = 5.5 * step**-0.3 + from_step / 100
            writer.write("train", step, loss=loss, model_tflops_per_device=1.5, mfu_percent=mfu, hfu_percent=hfu)
            if step % 5 == 0:
                writer.write("eval", step, loss=5.8 * step**-0.3)
        writer.close()
    return path


def draw(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, known_chip: bool) -> tuple[Figure, np.ndarray]:
    figures = []

    class Recorded(Figure):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            figures.append(self)

    monkeypatch.setattr(report, "Figure", Recorded)
    picture = tmp_path / "report.png"
    report.write_report(
        write_run(tmp_path / "metrics.jsonl", known_chip),
        picture,
        name="tiny",
        num_params=1_234_567,
        mesh={"y": 4, "x": 2},
        chip="CPU (measured)" if known_chip else None,
    )
    return figures[0], matplotlib.image.imread(picture)


def lines(axes: object) -> dict[str, tuple[list, list]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_picture_shows_the_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, pixels = draw(tmp_path, monkeypatch, known_chip=True)
    assert figure.get_suptitle() == "tiny: 1.23M parameters, mesh y=4, x=2, CPU (measured)"
    above, below = figure.axes
    assert above.get_ylabel() == "loss (nats per token)"
    assert below.get_ylabel() == "utilization (% of peak)"
    assert below.get_xlabel() == "step (dotted: resumed)"
    loss = lines(above)
    assert loss["training (last 2.339)"][0] == list(range(1, 21))  # each step once, in order
    assert loss["training (last 2.339)"][1][11] == 5.5 * 12**-0.3 + 0.1  # step 12 is the second attempt's
    assert loss["evaluation (last 2.361)"][0] == [5, 10, 15, 20]
    use = lines(below)
    assert use["MFU (median 31.1 %)"][1][0] == 30.1
    assert use["HFU (median 41.0 %)"][1][-1] == 42.0
    height, width, _ = pixels.shape
    assert (width, height) == (1080, 780)
    assert pixels[..., :3].std() > 0.05  # not a blank page


def test_shares_that_evaluations_found_have_a_part_of_their_own(tmp_path: pathlib.Path, monkeypatch) -> None:
    write = MetricsWriter.write

    def with_share(self: MetricsWriter, kind: str, step: int, **values: float) -> None:
        write(self, kind, step, **(values | ({"label_error": 1 / step, "dropped": 3.0} if kind == "eval" else {})))

    monkeypatch.setattr(MetricsWriter, "write", with_share)
    figure, _ = draw(tmp_path, monkeypatch, known_chip=True)
    above, between, below = figure.axes
    assert [axes.get_ylabel() for axes in (above, below)] == ["loss (nats per token)", "utilization (% of peak)"]
    assert between.get_ylabel() == "evaluation (%)"
    steps, percents = lines(between)["label error (last 5.0 %)"]
    assert steps == [5, 10, 15, 20]
    assert percents == pytest.approx([20, 10, 100 / 15, 5])


def test_unknown_chip_shows_the_rate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _ = draw(tmp_path, monkeypatch, known_chip=False)
    assert figure.get_suptitle().endswith("unknown chip")
    below = figure.axes[1]
    assert "TFLOP/s" in below.get_ylabel()
    ((_, rates), *_) = lines(below).values()
    assert rates == [1.5] * 20


def test_nothing_to_draw_is_said(tmp_path: pathlib.Path) -> None:
    MetricsWriter(tmp_path / "metrics.jsonl").close()
    with pytest.raises(ValueError, match="holds no finished step"):
        report.write_report(
            tmp_path / "metrics.jsonl", tmp_path / "report.png", name="a", num_params=1, mesh={"y": 1}, chip=None
        )
    assert not (tmp_path / "report.png").exists()


def test_count() -> None:
    assert [report.count(n) for n in (7, 1500, 2_345_678, 32_000_000_000, 1_024_000_000_000)] == [
        "7",
        "1.5K",
        "2.35M",
        "32B",
        "1.02T",
    ]
