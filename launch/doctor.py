"""Examines this installation, this machine and the first step of a config, and says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launch.arguments import config_parser, one_sentence, parse
from launch.environment import prepare
from launch.finding import FAIL, OK, WARN, Finding
from overlapfx.config import Config

FOUND_PROBLEMS = 1  # exit code
_REASON_CHARS = 500


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a report; 0 if nothing failed, 1 if something did, 2 for an error of the user's."""
    parser = config_parser("doctor", "Examine the installation, the devices, and the first step of a config.")
    parser.add_argument("--run_dir", metavar="DIR", help="where the run will write (default: runs/NAME)")
    with one_sentence(parser.prog):
        arguments, config = parse(parser, sys.argv[1:] if argv is None else argv)
        prepare(config.mesh.num_devices, arguments.devices)
    print(f"overlapfx doctor: {config.name}, mesh y={config.mesh.y}, x={config.mesh.x}", flush=True)
    found = []
    for finding in examine(config, Path(arguments.run_dir or f"runs/{config.name}")):
        found.append(finding)
        print(finding, flush=True)
    counts = {status: sum(finding.status == status for finding in found) for status in (OK, WARN, FAIL)}
    print(f"{counts[OK]} fine, {counts[WARN]} to look at, {counts[FAIL]} failed.", flush=True)
    return FOUND_PROBLEMS if counts[FAIL] else 0


def examine(config: Config, run_path: Path) -> Iterator[Finding]:
    """All findings, from the ground up; what cannot be examined without something that failed is left out."""
    # JAX starts here, after the environment is set.
    from launch import doctor_machine as machine
    from launch import doctor_step as steps

    yield from _examined("versions", machine.versions)
    yield from _examined("TPU compiler", machine.tpu_compiler)
    devices = list(_examined("devices", lambda: machine.devices(config)))
    yield from devices
    yield from _examined("disk", lambda: machine.disk(config, run_path))
    if any(finding.status == FAIL for finding in devices):
        return
    yield from _examined("physical rings", lambda: steps.physical_rings(config))
    rings = list(_examined("ring self-test", lambda: steps.ring_self_test(config)))
    yield from rings
    if any(finding.status == FAIL for finding in rings):
        return  # gradients would be wrong for that reason alone
    yield from _examined("first step", lambda: steps.first_step(config))


def _examined(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; one that breaks down is a finding, too, and the others go on."""
    try:
        yield from check()
    except Exception as error:  # the very thing that a doctor has to survive and to report
        reason = str(error)[:_REASON_CHARS] or "no reason given"
        yield Finding(FAIL, name, f"{type(error).__name__}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
