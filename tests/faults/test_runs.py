"""Real runs, made tiny, under faults; each of the commands can be run by hand, and for longer."""

from __future__ import annotations

import re

import pytest

from tests.faults import tiny_run


@pytest.mark.slow
def test_c19_c20_c22_struck_runs_end_as_if_nothing_had_happened() -> None:
    done = tiny_run.command("kill_runs", "--short", "--seed=0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    summary = done.stdout.rstrip().rpartition("\n")[2]
    struck = int(re.search(r"struck (\d+) times", summary)[1])
    assert struck >= 8, done.stdout  # a signal may come after the end of a short run, but not as a rule


@pytest.mark.slow
def test_faults_of_one_run() -> None:
    done = tiny_run.command("scenarios")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "FAILED" not in done.stdout


@pytest.mark.slow
def test_the_long_run_measures() -> None:
    """A short version, whose first steps are still warm-up: that it runs and reports is what counts here."""
    done = tiny_run.command("long_run", "--steps=160")
    assert "160 steps, 3 resumes, " in done.stdout, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("attempt ") == 4, done.stdout
