"""Nothing that a file says is run: no pickles, no eval, no shell, in any file of the program."""

from __future__ import annotations

import ast
import pathlib

import pytest

PROJECT = pathlib.Path(__file__).resolve().parent.parent
FILES = sorted(
    file
    for package in ("overlapfx", "models", "configs", "launch", "experiments")
    for file in (PROJECT / package).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NAMES = {"eval", "exec", "compile", "__import__"}
# A config file is a program that the user names on the command line.
MAY_RUN_CODE = {"launch/config_file.py"}


def offences(path: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"imports {name}" for name in names if name.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            found.append(f"calls {node.func.id}")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "exec_module" and path not in MAY_RUN_CODE:
            found.append("calls exec_module")
        if ast.unparse(node.func) in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(f"calls {ast.unparse(node.func)}")
        for keyword in node.keywords:
            if keyword.arg in ("allow_pickle", "shell") and getattr(keyword.value, "value", True):
                found.append(f"sets {keyword.arg}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "yaml.load(text, Loader)",
        "eval(text)",
        "exec(compile(text, 'f', 'exec'))",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "spec.loader.exec_module(module)",
    ],
)
def test_the_rule_sees_what_it_forbids(source: str) -> None:
    assert offences("overlapfx/train/x.py", source)


def test_the_rule_lets_the_rest_pass() -> None:
    assert offences("x.py", "jitted.lower(x).compile()\nre.compile('a')\nnp.load(f, allow_pickle=False)") == []


def test_no_file_of_the_program_runs_what_it_reads() -> None:
    assert len(FILES) > 60
    found = {str(f.relative_to(PROJECT)): offences(f.relative_to(PROJECT).as_posix(), f.read_text()) for f in FILES}
    assert {path: what for path, what in found.items() if what} == {}
