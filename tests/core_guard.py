"""Fails a run of the whole suite in which the tests of overlap itself did not run."""

from __future__ import annotations

import pathlib

import pytest


class CoreGuard:
    """A pytest plugin that counts the tests marked `core`.

    A test that is not collected, is skipped or never starts looks like success. Selecting tests by name, mark or file
    is taken as intended and not judged. Under xdist the controller counts, since all reports reach it.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ran: set[str] = set()
        self.skipped: set[str] = set()
        self.verdict = ""

    def is_whole_suite(self) -> bool:
        """Whether nothing was left out on the command line."""
        option = self.config.option
        if hasattr(self.config, "workerinput"):
            return False
        left_out = ("keyword", "markexpr", "lf", "stepwise", "deselect", "ignore", "ignore_glob", "collectonly")
        if any(getattr(option, name, None) for name in left_out):
            return False
        if self.config.args_source is not pytest.Config.ArgsSource.ARGS:
            return True
        root = self.config.rootpath
        named = {pathlib.Path(self.config.invocation_params.dir, arg).resolve() for arg in self.config.args}
        return {root / path for path in self.config.getini("testpaths")} <= named or root in named

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "core" not in report.keywords:
            return
        if report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.ran.add(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self.is_whole_suite() or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        if not self.ran:
            self.verdict = "no test marked core ran, so overlap itself is untested; the suite fails"
        elif self.skipped:
            self.verdict = f"tests marked core were skipped, so the suite fails: {', '.join(sorted(self.skipped))}"
        if self.verdict:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.verdict:
            terminalreporter.write_sep("=", self.verdict, red=True, bold=True)
        elif self.ran:
            terminalreporter.write_line(f"core guard: {len(self.ran)} tests of overlap itself ran")
