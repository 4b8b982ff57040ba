"""Compiler flags: which exist, what values they take, which environment variable carries each."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from overlapfx.aot.variants import OURS

XLA = "XLA_FLAGS"  # read by JAX itself: the CPU and GPU compilers, dumps
LIBTPU = "LIBTPU_INIT_ARGS"  # read by libtpu: the TPU compiler and its runtime
VARIABLES = (XLA, LIBTPU)
UNLISTED = "OVERLAPFX_UNLISTED_FLAGS"

_WORDS = {"bool": ("true", "false", "1", "0")}
_FORMS = {"bool": "true or false", "int": "an integer", "text": "text without spaces"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag by its name without dashes; `kind` is "bool", "int" or "text"."""

    name: str
    variable: str
    kind: str


def _flags(variable: str, kind: str, names: str) -> tuple[Flag, ...]:
    return tuple(Flag(name, variable, kind) for name in names.split())


# Where each belongs was tried with jaxlib 0.10.2 and 0.12.0.1, which end the process at a flag that they do not know,
# and looked up in libtpu 0.0.42.1 and 0.0.52.
FLAGS: Mapping[str, Flag] = {
    flag.name: flag
    for flag in (
        *_flags(
            XLA,
            "bool",
            "xla_dump_hlo_as_text xla_dump_hlo_as_proto xla_cpu_enable_fast_math xla_cpu_multi_thread_eigen "
            "xla_cpu_enable_concurrency_optimized_scheduler "
            "xla_hlo_profile xla_gpu_enable_latency_hiding_scheduler",
        ),
        *_flags(
            XLA,
            "int",
            "xla_force_host_platform_device_count xla_backend_optimization_level xla_cpu_collective_timeout_seconds "
            "xla_cpu_collective_call_warn_stuck_timeout_seconds xla_cpu_collective_call_terminate_timeout_seconds "
            "xla_cpu_prefer_vector_width",
        ),
        *_flags(
            XLA,
            "text",
            "xla_dump_to xla_dump_hlo_pass_re xla_dump_hlo_module_re xla_disable_hlo_passes xla_cpu_max_isa "
            "xla_step_marker_location",
        ),
        *_flags(
            LIBTPU,
            "bool",
            "xla_enable_async_all_gather xla_enable_async_all_reduce xla_enable_async_collective_permute "
            "xla_tpu_enable_scheduler_memory_pressure_tracking "
            "xla_tpu_enable_async_all_to_all xla_tpu_enable_latency_hiding_scheduler "
            "xla_tpu_enable_async_collective_fusion xla_tpu_enable_async_collective_fusion_fuse_all_gather "
            "xla_tpu_enable_async_collective_fusion_multiple_steps xla_tpu_overlap_compute_collective_tc "
            "xla_enable_async_reduce_scatter_fusion xla_tpu_enable_data_parallel_all_reduce_opt "
            "xla_tpu_data_parallel_opt_different_sized_ops xla_tpu_megacore_fusion_allow_ags "
            "xla_tpu_enable_ag_backward_pipelining xla_tpu_decompose_all_gather_einsum "
            "xla_tpu_decompose_einsum_reduce_scatter xla_tpu_spmd_rng_bit_generator_unsafe "
            "xla_tpu_use_enhanced_launch_barrier xla_tpu_rwb_fusion xla_tpu_dot_dot_fusion "
            "xla_tpu_prefer_async_allgather_to_allreduce xla_sc_disable_megacore_partitioning "
            "xla_tpu_enable_sparse_core_collective_offload_all_reduce "
            "xla_tpu_enable_all_experimental_scheduler_features megascale_grpc_enable_xor_tracer",
        ),
        *_flags(
            LIBTPU,
            "int",
            "xla_jf_spmd_threshold_for_windowed_einsum_mib xla_tpu_scoped_vmem_limit_kib "
            "xla_latency_hiding_scheduler_rerun xla_max_concurrent_async_all_gathers "
            "xla_max_concurrent_async_collective_permutes xla_tpu_nd_short_transfer_max_chunks "
            "xla_jf_rematerialization_percent_shared_memory_limit megascale_grpc_premap_memory_bytes",
        ),
        *_flags(
            LIBTPU,
            "text",
            "xla_tpu_all_gather_collective_matmul_mode xla_tpu_reduce_scatter_collective_matmul_mode "
            "xla_tpu_memory_bound_loop_optimizer_options",
        ),
    )
}


def check(environ: Mapping[str, str]) -> dict[str, str]:
    """The final strings of both variables, all flags in them known, well placed, well typed and not in conflict.

    Raises ValueError with one sentence otherwise. A flag that the table lacks is passed on unchecked if its name is
    among those in the variable OVERLAPFX_UNLISTED_FLAGS, separated by commas.
    """
    unlisted = {name.strip().lstrip("-") for name in environ.get(UNLISTED, "").split(",")}
    for variable in VARIABLES:
        for name, value in parse(variable, environ.get(variable, "")).items():
            if name not in unlisted:
                _check_one(name, value, variable)
            _check_conflict(name, value, variable)
    return {variable: environ[variable] for variable in VARIABLES if environ.get(variable)}


def place(settings: Mapping[str, str], unlisted: str = "") -> dict[str, str]:
    """The variables that carry flags given by name and value, each flag in its own variable.

    Raises ValueError as `check` does.
    """
    found: dict[str, list[str]] = {}
    for name, value in settings.items():
        bare = name.lstrip("-")
        _check_one(bare, value, _known(bare).variable)
        _check_conflict(bare, value, FLAGS[bare].variable)
        found.setdefault(FLAGS[bare].variable, []).append(f"--{bare}={value}")
    return {variable: " ".join(found[variable]) for variable in VARIABLES if variable in found}


def parse(variable: str, text: str) -> dict[str, str]:
    """Flags by name of the text of a variable; one without a value is "true".

    Like JAX, reads the file that XLA_FLAGS names if it does not begin with a dash. Raises ValueError for a word that is
    no flag, and for a flag given twice with different values.
    """
    if variable == XLA and text.strip() and not text.strip().startswith("-"):
        path = Path(text.strip())
        if not path.is_file():
            raise ValueError(f"{XLA} is {text!r}, neither flags that begin with -- nor a file; correct it.")
        text = path.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for word in _split(variable, text):
        match = re.fullmatch(r"--([A-Za-z0-9_]+)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            raise ValueError(f"{variable} holds {word!r}, which is no flag; write --NAME=VALUE.")
        name, value = match[1], "true" if match[2] is None else match[2]
        if found.setdefault(name, value) != value:
            raise ValueError(f"{variable} sets --{name} to {found[name]} and to {value}; leave one of them out.")
    return found


def _split(variable: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{variable} is {text!r}, in which a quotation mark is not closed; close it.") from error


def _known(name: str) -> Flag:
    if name in FLAGS:
        return FLAGS[name]
    near = difflib.get_close_matches(name, FLAGS, n=1)
    hint = f"did you mean --{near[0]}? " if near else ""
    raise ValueError(
        f"--{name} is not a compiler flag that OverlapFX knows; {hint}if it exists, name it in {UNLISTED}, which "
        f"passes flags of {XLA} or {LIBTPU} on unchecked."
    )


def _check_one(name: str, value: str, variable: str) -> None:
    flag = _known(name)
    if flag.variable != variable:
        raise ValueError(f"--{name} is in {variable}, where it is not read; move it to {flag.variable}.")
    legal = {
        "bool": value in _WORDS["bool"],
        "int": re.fullmatch(r"-?\d+", value) is not None,
        "text": value != "" and not re.search(r"\s", value),
    }
    if not legal[flag.kind]:
        raise ValueError(f"--{name} in {variable} is {value!r}; it must be {_FORMS[flag.kind]}.")


def _check_conflict(name: str, value: str, variable: str) -> None:
    """A flag against the options that the training step is compiled with on a TPU, which would silently win."""
    ours = OURS.options.get(name)
    if ours is not None and {"1": "true", "0": "false"}.get(value, value) != ours:
        raise ValueError(
            f"--{name}={value} in {variable} contradicts {name}={ours}, with which the training step is compiled; "
            "leave it out."
        )


def final(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What both variables hold, for the log of a run."""
    return {variable: environ.get(variable, "") for variable in VARIABLES}
