"""Reads a config from a file, with fields set on the command line."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

# Config files named relative to the project are found from any folder.
PROJECT = Path(__file__).resolve().parent.parent


def load_config(path_with_name: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The ConfigDict that `get_config` of a file returns, for example "configs/gpt.py:tiny", with fields replaced.

    overrides: "mesh.x=4", one per field; a value is read as the type that the field already has, and a group without
    fields of its own (`overlap.sites`) is read as a JSON object.
    Raises a one-sentence ValueError with the legal values for an unknown file, name or field, or a value of another
    type.
    """
    path, _, name = path_with_name.partition(":")
    module = _load_module(path)
    if not hasattr(module, "get_config"):
        raise ValueError(
            f"{path} has no function get_config; a config file must define get_config(name) -> ConfigDict."
        )
    config = module.get_config(name) if name else module.get_config()
    for override in overrides:
        field, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--config.{field} has no value; write --config.{field}=VALUE.")
        _set(config, field, text)
    return config


def _load_module(path: str) -> ModuleType:
    """Runs a config file, looked for from the working directory first, then from the project."""
    # os.path.isfile, since Path.is_file raises for a name that no file can have.
    found = next((f for f in (Path(path), PROJECT / path) if os.path.isfile(f) and f.suffix == ".py"), None)
    if found is None:
        known = sorted(f"configs/{file.name}" for file in (PROJECT / "configs").glob("[!_]*.py"))
        raise ValueError(f"There is no config file {path!r}; the project has {', '.join(known)}.")
    spec = importlib.util.spec_from_file_location(f"config_file_{found.stem}", found)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _set(config: ConfigDict, field: str, text: str) -> None:
    """Sets the dotted `field` from its text."""
    *groups, last = field.split(".")
    group, where = config, ""
    for name in [*groups, last]:
        if not isinstance(group, ConfigDict):
            raise ValueError(f"--config.{field} is not a field; {where.rstrip('.')} has no fields of its own.")
        if name not in group:
            inside = f"the fields of {where.rstrip('.')}" if where else "the fields"
            raise ValueError(f"--config.{where}{name} is not a field; {inside} are {', '.join(group)}.")
        parent, group, where = group, group[name], f"{where}{name}."
    parent[last] = _parse(field, text, group)


def _parse(field: str, text: str, old: Any) -> Any:
    """`text` as a value of the type of `old`."""
    if isinstance(old, str):
        return text
    if isinstance(old, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"--config.{field} is {text!r}; it must be true or false.")
    if isinstance(old, ConfigDict):
        return _parse_group(field, text, old)
    kind = type(old)
    try:
        return kind(text)
    except ValueError as error:
        wanted = {int: "an integer", float: "a number"}.get(kind, kind.__name__)
        raise ValueError(f"--config.{field} is {text!r}; it must be {wanted}.") from error


def _parse_group(field: str, text: str, old: ConfigDict) -> ConfigDict:
    """A group with keys of the user's choice, such as site names, from JSON."""
    if len(old):
        raise ValueError(
            f"--config.{field} is a group; set one of its fields: {', '.join(f'{field}.{k}' for k in old)}."
        )
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--config.{field} is {text!r}, which is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"--config.{field} is {text!r}; it must be a JSON object, for example {{}}.")
    return ConfigDict(value, allow_dotted_keys=True)
