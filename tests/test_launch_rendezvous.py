"""Case C17 at the start of a job: processes that are missing, gone or different are named, within a bounded time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from launch import identity as identities
from launch.distributed import Peers, same_names, without_sources
from launch.identity import Identity, identify
from launch.local import free_port
from launch.rendezvous import Interrupted, NotTogether, Rendezvous

FACTS = {"config.seed": "0", "version of jax": "1.0"}


class Outcomes(dict[int, Any]):
    """What every process returned or raised."""


def run_processes(
    work: Callable[[Identity], Any], *, count: int, present: list[int] | None = None, timeout_s: float = 10.0
) -> Outcomes:
    """Runs `work` in one thread for each process that is `present`, as if each were a process."""
    port, outcomes = free_port(), Outcomes()

    def one(index: int) -> None:
        try:
            outcomes[index] = work(Identity(index, count, "127.0.0.1", port, count, timeout_s))
        except (ValueError, NotTogether, Interrupted) as error:
            outcomes[index] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in (range(count) if present is None else present)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a wait was not bounded"
    return outcomes


def meet(own: Identity, facts: dict[str, str] | None = None) -> Rendezvous:
    return Rendezvous(own, "tiny", FACTS if facts is None else facts)


def test_all_come_and_are_told_the_same_port() -> None:
    def work(own: Identity) -> int:
        with_all = meet(own)
        told = with_all.told["jax_port"]
        assert with_all.agree("a", {"x": "1"}, tell=7) == 7
        assert with_all.agree("b") is None
        with_all.close()
        return told

    outcomes = run_processes(work, count=4)
    assert len(outcomes) == 4
    assert len(set(outcomes.values())) == 1
    assert isinstance(outcomes[0], int)


def test_the_missing_are_named_everywhere_in_bounded_time() -> None:
    begun = time.monotonic()
    outcomes = run_processes(meet, count=5, present=[0, 2], timeout_s=0.5)
    assert time.monotonic() - begun < 5
    sentence = (
        "of 5 processes, at the start of the job process 1, process 3 and process 4 did not come within 0.5 s; see "
        "their own messages."
    )
    assert [str(outcomes[i]) for i in (0, 2)] == [sentence, sentence]
    assert all(isinstance(error, NotTogether) and error.exit_code == 69 for error in outcomes.values())


def test_without_process_0_the_others_say_so() -> None:
    outcomes = run_processes(meet, count=2, present=[1], timeout_s=0.5)
    assert str(outcomes[1]).startswith("process 1 did not reach process 0 at 127.0.0.1:")
    assert "within 0.5 s" in str(outcomes[1])


def test_slices_and_long_lists_are_named() -> None:
    own = Identity(0, 64, "", 1, 16)
    assert own.name(37) == "process 37 (slice 2, worker 5)"
    outcomes = run_processes(meet, count=20, present=[0], timeout_s=0.2)
    assert "process 7, process 8 and 11 more did not come" in str(outcomes[0])


def test_who_differs_in_what_is_one_sentence() -> None:
    def work(own: Identity) -> Any:
        jax = "2.0" if own.index in (1, 3) else "1.0"
        return meet(own, {**FACTS, "version of jax": jax, **({"extra": "yes"} if own.index == 2 else {})})

    outcomes = run_processes(work, count=4)
    sentence = (
        "the processes differ: version of jax is 1.0 on process 0 and process 2, 2.0 on process 1 and process 3; extra "
        "is absent on process 0, process 1 and process 3, yes on process 2; start all of them alike."
    )
    assert [str(outcomes[i]) for i in range(4)] == [sentence] * 4
    assert all(isinstance(error, ValueError) for error in outcomes.values())


def test_programs_that_differ_are_refused_and_equal_ones_are_not() -> None:
    class Program:
        def __init__(self, text: str) -> None:
            self.text = text

        def lower(self, *_: object) -> Program:
            return self

        def compile(self) -> Program:
            return self

        def as_text(self) -> str:
            return self.text

    def work(own: Identity, odd: int) -> Any:
        peers = Peers(own, meet(own))
        return peers.agreeing(Program("odd" if own.index == odd else "even")).lower(1).compile().text

    assert run_processes(lambda own: work(own, -1), count=3) == {0: "even", 1: "even", 2: "even"}
    outcomes = run_processes(lambda own: work(own, 2), count=3)
    assert all("the compiled program is" in str(error) and "process 2" in str(error) for error in outcomes.values())


def test_where_a_program_comes_from_is_no_difference() -> None:
    """A cached program tells of source lines as they were; another operation, shape or name stays another program."""
    text = """HloModule m

FileNames
1 "a.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}


ENTRY %main (x: f32[2]) -> f32[2] {
  ROOT %y = f32[2] add(%x, %x), metadata={op_name="jit(f)/add" stack_frame_id=1}, backend_config={"a":"{b}"}
}
"""
    moved = (
        text.replace("a.py", "b.py").replace("stack_frame_id=1", "stack_frame_id=2").replace("parent_frame_id=1", "")
    )
    assert without_sources(text) == without_sources(moved) != text
    for what in ("add(", "f32[2] add", "%y", "{b}", "HloModule m"):
        assert without_sources(text.replace(what, f"{what}2")) != without_sources(text)


def test_an_error_of_one_process_is_everybodys() -> None:
    def work(own: Identity) -> Any:
        peers = Peers(own, meet(own))
        with peers.together("opening the run"):
            if own.index == 1:
                raise ValueError("the run directory is full.")
        return "went on"

    outcomes = run_processes(work, count=3)
    assert str(outcomes[1]) == "the run directory is full."
    assert str(outcomes[0]) == str(outcomes[2]) == "process 1: the run directory is full."


def test_a_process_that_leaves_is_named() -> None:
    def work(own: Identity) -> Any:
        rendezvous = meet(own)
        if own.index == 2:
            rendezvous.close()
            return "left"
        return rendezvous.agree("the end of compilation")

    outcomes = run_processes(work, count=3)
    for index in (0, 1):
        assert str(outcomes[index]) == (
            "of 3 processes, at the end of compilation process 2 ended before that; see their own messages."
        )


def test_a_directory_that_is_not_shared_is_refused(tmp_path: Any) -> None:
    def work(own: Identity, shared: bool) -> Any:
        directory = tmp_path / ("run" if shared else f"run{own.index}")
        directory.mkdir(exist_ok=True)
        Peers(own, meet(own)).check_shared(directory)
        return sorted(path.name for path in directory.iterdir())

    outcomes = run_processes(lambda own: work(own, True), count=2)
    assert all(isinstance(entries, list) for entries in outcomes.values()), outcomes
    outcomes = run_processes(lambda own: work(own, False), count=2)
    assert str(outcomes[1]).endswith("put it on a file system that all processes share.")
    assert str(outcomes[0]) == f"process 1: {outcomes[1]}"
    assert not list((tmp_path / "run0").iterdir()), "the token was left behind"
    assert not list((tmp_path / "run").iterdir()), "the token was left behind"


def test_an_interruption_ends_the_wait_but_no_later_one() -> None:
    signalled = threading.Event()

    def work(own: Identity) -> Any:
        threading.Timer(0.3, signalled.set).start()
        return Rendezvous(own, "tiny", FACTS, signalled.is_set)

    begun = time.monotonic()
    for present in ([0], [1]):
        signalled.clear()
        outcomes = run_processes(work, count=2, present=present, timeout_s=60)
        assert isinstance(outcomes[present[0]], Interrupted)
        assert outcomes[present[0]].exit_code == 75
    assert time.monotonic() - begun < 20

    def later(own: Identity) -> Any:
        signals: list[int] = []
        rendezvous = Rendezvous(own, "tiny", FACTS, lambda: bool(signals))
        signals.append(15)
        return rendezvous.agree("a", tell=1)

    assert run_processes(later, count=2) == {0: 1, 1: 1}


def test_strangers_and_other_jobs_do_no_harm() -> None:
    def stranger(port: int, words: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(words)
            connection.recv(100)

    def work(own: Identity) -> Any:
        if own.index == 0:
            return meet(own).told
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", b'{"process": 0, "count": 2, "job": "tiny"}\n'):
            while True:
                try:
                    stranger(own.port, words)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
        with pytest.raises(ValueError, match="a job 'tiny' of 2 processes uses this port"):
            Rendezvous(own, "another", FACTS)
        return meet(own).told

    outcomes = run_processes(work, count=2)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["jax_port"] > 0


def test_alone_nothing_is_waited_for(tmp_path: Any) -> None:
    peers = Peers(identities.ALONE, None)
    with peers.together("x"):
        pass
    peers.check_shared(tmp_path / "missing")
    step = object()
    assert peers.agreeing(step) is step


# ---- which process this is ----


def test_a_process_alone_needs_no_variables() -> None:
    assert identify({}) == identities.ALONE


def test_processes_are_numbered_slice_by_slice() -> None:
    shared = identities.variables(host="job-slice-0-0.job", slices=2, workers=16, timeout_s=900)
    own = identify({**shared, "OVERLAPFX_SLICE": "1", "JOB_COMPLETION_INDEX": "3"})
    assert own == Identity(19, 32, "job-slice-0-0.job", identities.PORT, 16, 900.0)
    assert identify({**shared, "OVERLAPFX_WORKER": "5"}).index == 5


@pytest.mark.parametrize(
    "extra", [{"OVERLAPFX_SLICE": "2"}, {"OVERLAPFX_WORKER": "16"}, {"OVERLAPFX_COORDINATOR": "host"}]
)
def test_variables_that_contradict_each_other_are_refused(extra: dict[str, str]) -> None:
    shared = identities.variables(host="h", slices=2, workers=16, timeout_s=900)
    with pytest.raises(ValueError, match="is not possible; start the process with overlapfx launch"):
        identify({**shared, **extra})
    with pytest.raises(ValueError, match="OVERLAPFX_SLICE is 'x'; it must be a number"):
        identify({**shared, "OVERLAPFX_SLICE": "x"})


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"agent-worker-number": "2", "worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3"},
            Identity(2, 3, "10.0.0.1", identities.PORT, 3, 600.0),
        ),
        (
            {
                "agent-worker-number": "1",
                "worker-network-endpoints": "host-a,host-b",
                "tpu-env": "ZONE: 'z'\nMEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9:8080'\nMEGASCALE_NUM_SLICES: '2'\n"
                "MEGASCALE_SLICE_ID: '1'\n",
            },
            Identity(3, 4, "10.9.9.9", identities.PORT, 2, 600.0),
        ),
    ],
)
def test_a_tpu_vm_says_which_worker_it_is(metadata: dict[str, str], expected: Identity) -> None:
    slices = 2 if "tpu-env" in metadata else 1
    shared = identities.cloud_tpu_variables(slices=slices, timeout_s=600)
    assert identify(shared, lambda key: metadata.get(key, "")) == expected
    with pytest.raises(ValueError, match=f"belongs to {slices} slices but the job was launched for 4"):
        identify({**shared, "OVERLAPFX_NUM_SLICES": "4"}, lambda key: metadata.get(key, ""))


def test_how_instructions_are_numbered_is_no_difference() -> None:
    """A cached program may have other numbers in its names; what is connected to what must be the same."""
    text = """%add.1 (a.5: f32[2], b.6: f32[2]) -> f32[2] {
  ROOT %sum.7 = f32[2] add(%a.5, %b.6)
}

ENTRY %main.9 (x: f32[2], y: f32[2]) -> f32[2] {
  %u.3 = f32[2] negate(%x)
  %v.4 = f32[2] negate(%y)
  ROOT %w = f32[2] fusion(%u.3, %v.4), calls=%add.1, backend_config={"a":"b"}
}
"""
    renamed = text
    for name, other in (("u.3", "u.30"), ("v.4", "u.3"), ("add.1", "add.2"), ("a.5", "p"), ("main.9", "main")):
        renamed = renamed.replace(f"%{name}", f"%{other}").replace(f"({name}:", f"({other}:")
    assert same_names(renamed) == same_names(text)
    others = (("(%u.3, %v.4)", "(%v.4, %u.3)"), ("negate(%y)", "negate(%x)"), ("add(", "subtract("), ('"b"', '"c"'))
    for old, new in others:
        assert same_names(text.replace(old, new)) != same_names(text)
