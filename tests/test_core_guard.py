"""The guard that fails the suite when the tests of overlap did not run (C02) is tested on suites made up here."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent
CONFTEST = """
from core_guard import CoreGuard
def pytest_configure(config):
    config.pluginmanager.register(CoreGuard(config))
"""
INI = "[pytest]\ntestpaths = suite\nmarkers = core\n"
PLAIN = "def test_plain(): pass\n"
CORE = "import pytest\n@pytest.mark.core\ndef test_core(): pass\n"
SKIPPED = "import pytest\n@pytest.mark.core\n@pytest.mark.skip\ndef test_skipped(): pass\n"
FAILED = "import pytest\n@pytest.mark.core\ndef test_failed(): assert False\n"


def run_suite(folder: pathlib.Path, source: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of pytest over a suite with one file."""
    (folder / "suite").mkdir()
    (folder / "pytest.ini").write_text(INI)
    (folder / "suite" / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{CONFTEST}")
    (folder / "suite" / "test_made_up.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *arguments]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "arguments", "code", "said"),
    [
        (PLAIN + CORE, (), 0, "1 tests of overlap itself ran"),
        (PLAIN + CORE, ("-n", "1"), 0, "1 tests of overlap itself ran"),
        (PLAIN, (), 1, "no test marked core ran"),
        (PLAIN, ("-n", "1"), 1, "no test marked core ran"),
        (PLAIN, ("suite",), 1, "no test marked core ran"),
        (PLAIN + SKIPPED, (), 1, "no test marked core ran"),
        (CORE + SKIPPED, (), 1, "tests marked core were skipped"),
        (FAILED, (), 1, "1 failed"),
        ("", (), 1, "no test marked core ran"),
        # Chosen by hand: not judged.
        (PLAIN, ("-k", "plain"), 0, "1 passed"),
        (PLAIN, ("suite/test_made_up.py",), 0, "1 passed"),
    ],
)
def test_guard(tmp_path: pathlib.Path, source: str, arguments: tuple[str, ...], code: int, said: str) -> None:
    returned, output = run_suite(tmp_path, source, *arguments)
    assert returned == code, output
    assert said in output, output
