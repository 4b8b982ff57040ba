"""Reproduces every table and figure: `python -m experiments.paper --out=DIR`."""

from __future__ import annotations

import sys

from experiments import (
    fig01,
    fig12,
    fig13,
    fig14,
    fig15,
    fig16,
    fig_accuracy,
    fig_batch,
    fig_chips,
    fig_compilation,
    fig_gate,
    fig_goals,
    fig_links,
    fig_methods,
    fig_rewrite,
    fig_training,
    table1,
    table2,
)
from experiments.paper import command

_MODULES = (
    table1,
    table2,
    fig01,
    fig12,
    fig13,
    fig14,
    fig15,
    fig16,
    fig_goals,
    fig_methods,
    fig_gate,
    fig_chips,
    fig_links,
    fig_batch,
    fig_rewrite,
    fig_accuracy,
    fig_compilation,
    fig_training,
)
FIGURES = tuple(module.FIGURE for module in _MODULES)

if __name__ == "__main__":
    sys.exit(command.main("paper", FIGURES))
