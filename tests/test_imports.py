"""Imports point down only, a few packages have one importer, files and functions stay short."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from import_rules import check_source, check_tree

PROJECT = pathlib.Path(__file__).resolve().parent.parent


def test_the_tree_keeps_every_rule() -> None:
    paths, violations = check_tree(PROJECT)
    expected = {
        "overlapfx/__init__.py",
        "overlapfx/ops/ring.py",
        "models/__init__.py",
        "configs/gpt.py",
        "launch/cli.py",
    }
    assert expected <= set(paths)
    assert not violations, "\n" + "\n".join(map(str, violations))


# Made-up sources, each breaking one rule: (path, source, part of the one complaint).
BROKEN = [
    ("overlapfx/types.py", "from overlapfx.plan import pattern", "imports point down only"),
    ("overlapfx/mesh.py", "from overlapfx.ops import ring", "imports point down only"),
    ("overlapfx/mesh.py", "from .ops import ring", "imports point down only"),
    ("overlapfx/mesh.py", "def f():\n    import overlapfx.ops.ring", "imports point down only"),
    ("overlapfx/plan/cost.py", "from ..ops import ring", "imports point down only"),
    ("overlapfx/plan/cost.py", "import overlapfx.train.loop as loop", "imports point down only"),
    ("overlapfx/ops/ring.py", "from overlapfx.layers.mlp import MLP", "imports point down only"),
    ("overlapfx/layers/mlp.py", "from overlapfx.train import step", "imports point down only"),
    ("overlapfx/train/step.py", "from models import gpt", "imports point down only"),
    ("overlapfx/aot/read.py", "from launch.train import main", "imports point down only"),
    ("models/gpt.py", "from launch import cli", "imports point down only"),
    ("models/gpt.py", "import importlib\nimportlib.import_module('experiments.table')", "imports point down only"),
    ("models/gpt.py", "import orbax.checkpoint", "only overlapfx/train/checkpoint.py may import orbax"),
    ("overlapfx/train/loop.py", "from orbax import checkpoint", "only overlapfx/train/checkpoint.py may import orbax"),
    ("overlapfx/train/loop.py", "import tensorflow_datasets as tfds", "only overlapfx/train/sources.py"),
    ("overlapfx/train/loop.py", "import grain.python", "only overlapfx/train/data.py"),
    ("overlapfx/ops/ring.py", "from jax._src import core", "only overlapfx/ops/order.py may import jax._src"),
    ("overlapfx/ops/ring.py", "from jax import _src", "only overlapfx/ops/order.py may import jax._src"),
    ("overlapfx/ops/looped.py", "from jax import lax\nlax.ppermute(1, 'x', [])", "uses ppermute"),
    ("overlapfx/ops/looped.py", "from jax.lax import ppermute", "uses ppermute"),
    ("launch/plan.py", "import jax\nshift = jax.lax.ppermute", "uses ppermute"),
    ("configs/gpt.py", "import math", "configs/ imports only ml_collections"),
    ("configs/gpt.py", "from overlapfx.config import Overlap", "configs/ imports only ml_collections"),
    ("overlapfx/plan/cost.py", "import jax.numpy as jnp", "plain Python without arrays"),
    ("overlapfx/plan/cost.py", "import numpy", "plain Python without arrays"),
    ("overlapfx/layers/mlp.py", "from overlapfx.config import ModelConfig", "never the config"),
    ("overlapfx/layers/mlp.py", "from overlapfx import config", "never the config"),
    ("overlapfx/layers/mlp.py", "from overlapfx.families import GPTConfig", "never the config"),
    ("overlapfx/ops/ring.py", "from overlapfx import Overlap", "front door"),
    ("overlapfx/extra.py", "import math", "belongs to no level"),
    ("overlapfx/train/long.py", "x = 1\n" * 400, "the file has 400 lines"),
    ("launch/long.py", "def f():\n" + "    x = 1\n" * 59, "f has 60 lines"),
    ("launch/long.py", "class C:\n    async def g(self):\n" + "        x = 1\n" * 59, "g has 60 lines"),
]

# Made-up sources that keep every rule.
KEPT = [
    ("overlapfx/mesh.py", "import jax\nfrom overlapfx.config import MeshConfig"),
    ("overlapfx/ops/ring.py", "from jax import lax\nfrom overlapfx.plan import pattern\nlax.ppermute(1, 'x', [])"),
    ("overlapfx/ops/looped.py", "from . import ring\nfrom overlapfx import compat\nring.shift(1, ('x',), 1)"),
    ("overlapfx/ops/order.py", "from jax._src import core"),
    ("overlapfx/ops/rewrite.py", "NAME = 'ppermute'  # the name of a primitive is not a use of the function"),
    ("overlapfx/layers/mlp.py", "from overlapfx.config import Overlap\nfrom flax import nnx"),
    ("overlapfx/plan/cost.py", "import dataclasses\nimport math\nfrom overlapfx.chips import Chip"),
    ("overlapfx/train/checkpoint.py", "import orbax.checkpoint as ocp\nfrom overlapfx.train import rundir"),
    ("overlapfx/train/data.py", "import grain"),
    ("overlapfx/train/sources.py", "import tensorflow_datasets as tfds"),
    ("overlapfx/aot/read.py", "import grainger_unrelated"),
    ("configs/gpt.py", "from __future__ import annotations\nfrom ml_collections import ConfigDict"),
    ("models/gpt.py", "from overlapfx import Overlap\nfrom overlapfx.layers.mlp import MLP"),
    ("launch/train.py", "from models import gpt\nfrom launch import cli\nimport configs.gpt"),
    ("launch/short.py", "x = 1\n" * 399),
    ("launch/short.py", "def f():\n" + "    x = 1\n" * 58),
]


@pytest.mark.parametrize(("path", "source", "complaint"), BROKEN)
def test_a_broken_rule_is_found(path: str, source: str, complaint: str) -> None:
    (violation,) = check_source(path, source)
    assert complaint in str(violation)
    assert str(violation).startswith(f"{path}:")


@pytest.mark.parametrize(("path", "source"), KEPT)
def test_a_kept_rule_is_not_reported(path: str, source: str) -> None:
    assert check_source(path, source) == []


def test_importing_the_package_does_not_import_jax() -> None:
    code = "import sys, overlapfx, launch.train, launch.plan, launch.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, timeout=60, check=False).returncode == 0
