"""The example in docs/rewrite.md runs, and prints what the page says."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "rewrite.md"


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    gather, scatter = capsys.readouterr().out.splitlines()
    assert gather.startswith("rewritten: AllGather over x of float32[2, 2, 16] with product, rewrite.md:10: mlp:10:")
    assert scatter.startswith("rewritten: ReduceScatter over x of float32[2, 8, 16] with product, rewrite.md:10: mlp:")
