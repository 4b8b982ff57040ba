"""The documentation: its example of a new model is one, the site builds without a broken link, no page is left out."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
import types

import pytest

import configs
import models
from overlapfx import families
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.slices import FAMILIES

PROJECT = pathlib.Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs"


def load(package: types.ModuleType, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of one of the project's packages whose file lies elsewhere."""
    name = f"{package.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(package, path.stem, module, raising=False)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_of_a_new_model(tmp_path, monkeypatch):
    blocks = re.findall(r'```python title="(.*?)"\n(.*?)```', (DOCS / "add-a-model.md").read_text(), re.DOTALL)
    files = {}
    for name, code in blocks:
        files[name] = tmp_path / name
        files[name].parent.mkdir(exist_ok=True)
        files[name].write_text(code)
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "parallel": families.GPTConfig})
    load(models, files["models/parallel.py"], monkeypatch)
    load(configs, files["configs/parallel.py"], monkeypatch)
    space = {"__name__": "test_parallel"}
    exec(compile(files["tests/test_parallel.py"].read_text(), "add-a-model.md", "exec"), space)
    space["test_same_losses_on_every_mesh_overlapped_or_not"](4, 2)
    first = space["PARALLEL"].reference.losses[0]
    assert 4 < first < 12, "the nats of a guess among 256 bytes, or a little worse"


def test_the_example_passes_the_checks_of_the_project(tmp_path):
    pages = re.findall(r'```python title="(.*?)"\n(.*?)```', (DOCS / "add-a-model.md").read_text(), re.DOTALL)
    assert [name for name, _ in pages] == ["models/parallel.py", "configs/parallel.py", "tests/test_parallel.py"]
    for name, code in pages:
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(code)
        ruff = [sys.executable, "-m", "ruff", "check", "--config", str(PROJECT / "pyproject.toml"), str(path)]
        done = subprocess.run([*ruff, "--ignore=D103"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([a-z-]+\.md)$", (PROJECT / ".ci" / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.name for path in DOCS.glob("*.md")}


def test_every_picture_exists_and_is_used():
    used = {name for page in (*DOCS.glob("*.md"), PROJECT / "README.md") for name in pictures(page)}
    assert used == {path.name for path in (DOCS / "images").iterdir()}


def pictures(page: pathlib.Path) -> list[str]:
    return re.findall(r"\]\((?:docs/)?images/([^)]+)\)", page.read_text())


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path):
    pytest.importorskip("mkdocs")
    site = build(tmp_path, PROJECT)
    assert site.returncode == 0, site.stderr[-3000:]
    page = (tmp_path / "site" / "assumptions.html").read_text()
    for family in FAMILIES.values():
        assert family.chip.name in page
        assert f"{Assumptions.for_chip(family.chip).clock_hz:.4g}" in page
    api = (tmp_path / "site" / "api.html").read_text()
    for name in ("collective_einsum", "Overlap", "Planner", "make_train_step", "from_config_dict"):
        assert f">{name}<" in api or f".{name}" in api, name
    assert "<!-- table:" not in page


@pytest.mark.slow
def test_a_broken_link_is_an_error(tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / ".ci").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)")
    settings = (PROJECT / ".ci" / "mkdocs.yml").read_text()
    (tmp_path / ".ci" / "mkdocs.yml").write_text(re.sub(r"(?ms)^nav:.*?^validation:", "validation:", settings))
    (tmp_path / ".ci" / "docs_hooks.py").write_text("")
    done = build(tmp_path, tmp_path)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


def build(tmp_path: pathlib.Path, project: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does it, into another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(project / ".ci" / "mkdocs.yml")]
    return subprocess.run(
        [*command, "-d", str(tmp_path / "site")], capture_output=True, text=True, timeout=300, check=False
    )
