"""Names of the leaves of a tree, such as `params.blocks.mlp.w_DF`."""

from __future__ import annotations

from typing import Any

import jax


def leaf_names(tree: Any) -> list[str]:
    """The names in flattening order, keys joined by dots."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths_and_leaves]
