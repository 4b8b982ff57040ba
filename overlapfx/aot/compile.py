"""Compile a function for a slice that is not there."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from overlapfx.aot import kept
from overlapfx.aot.products import products
from overlapfx.aot.slices import Slice, device_coord
from overlapfx.plan.torus import Coord

# What a jaxlib says of an instruction that a newer compiler writes otherwise (0.10.2 of libtpu 0.0.52, v6e and tpu7x).
_UNREADABLE = "hlo_instruction.cc"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a program needs on every device; `temporaries` those that live at the moment of its largest need."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Everything that must fit at once; donated arguments share their place with outputs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class CompiledFor:
    """A program compiled for a slice.

    `text` is the scheduled HLO of one slice, `coords[i]` the place of partition i in that slice, `options` the compiler
    options used, `lower_s` and `compile_s` the seconds that tracing with lowering and that compiling took, the latter
    at an earlier time if `is_kept`. `products` are the FLOPs of what was traced, by scope, over all devices.
    """

    topology: Slice
    text: str
    memory: Memory
    coords: tuple[Coord, ...]
    options: Mapping[str, str]
    lower_s: float
    compile_s: float
    products: Mapping[str, float]
    is_kept: bool = False


class Unreadable(ValueError):
    """The installed jaxlib cannot read what the installed compiler writes."""


def compile_for(
    topology: Slice,
    fn: Callable[..., Any],
    abstract_args: Sequence[Any],
    compiler_options: Mapping[str, str | bool | int] | None = None,
) -> CompiledFor:
    """Compile `fn` (plain, or already wrapped in `jax.jit`) for `topology`, whose devices the arguments name.

    `abstract_args` are pytrees of `jax.ShapeDtypeStruct` with NamedShardings over one mesh from `make_slice_mesh`.
    A program that was compiled before is taken from where `kept` has it.

    Raises ValueError for arguments without such shardings, for compiler options that the compiler refuses;
    Unreadable for versions of jaxlib and libtpu that do not go together.
    """
    devices = _mesh_devices(topology, abstract_args)
    options = {name: _option(value) for name, value in (compiler_options or {}).items()}
    begin = time.perf_counter()
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    trace = jitted.trace(*abstract_args)
    lowered = trace.lower()
    flops: Counter[str] = Counter()
    for scope, of_one in products(trace.jaxpr.jaxpr):
        flops[scope] += of_one  # type: ignore[assignment]
    lower_s = time.perf_counter() - begin
    # Every slice runs the same program over its own partitions, so that one slice's places describe them all.
    first = [device for device in devices if not getattr(device, "slice_index", None)]
    coords = tuple(device_coord(device, topology.torus) for device in first)
    name = kept.key(kept.text_of(lowered), options, str(topology), str(coords))
    found = kept.find(name)
    program = found or _compiled(topology, lowered, options)
    if found is None:
        kept.keep(name, program)
    memory, compile_s = Memory(**program.facts["memory"]), program.facts["compile_s"]
    return CompiledFor(
        topology, program.text, memory, coords, options, lower_s, compile_s, flops, is_kept=found is not None
    )


def _memory(stats: Any) -> Memory:
    lasting = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        # Not the size of what is set apart for temporaries: libtpu 0.0.42 states 5 GiB more of it than 0.0.52 for the
        # same program (200B: 15.7 and 11.0), both the same peak (10.2).
        temporaries=max(0, stats.peak_memory_in_bytes - lasting),
        code=stats.generated_code_size_in_bytes,
    )


def _compiled(topology: Slice, lowered: Any, options: dict[str, str]) -> kept.Kept:
    begin = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
        text = compiled.as_text()
        memory = dataclasses.asdict(_memory(compiled.memory_analysis()))
        return kept.Kept(text, {"memory": memory, "compile_s": time.perf_counter() - begin})
    except jax.errors.JaxRuntimeError as error:
        first = str(error).splitlines()[0]
        if "compile option" in first:
            raise ValueError(
                f"the compiler refuses an option for {topology} ({first}); remove it from {options}."
            ) from error
        if _UNREADABLE in first:
            jaxlib, libtpu = (importlib.metadata.version(name) for name in ("jaxlib", "libtpu"))
            raise Unreadable(
                f"jaxlib {jaxlib} cannot read what libtpu {libtpu} compiled for {topology} ({first}); install the pair "
                "that is tested, pip install -c constraints.txt 'overlapfx[plan]'."
            ) from error
        raise


def check_options(topology: Slice, mesh: Mesh, compiler_options: Mapping[str, str | bool | int]) -> None:
    """Raises ValueError for compiler options that the compiler refuses, after a second and not after the whole step."""
    if compiler_options:
        sharding = NamedSharding(mesh, PartitionSpec())
        compile_for(
            topology, lambda x: x + 1, [jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)], compiler_options
        )


def _option(value: str | bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mesh_devices(topology: Slice, abstract_args: Sequence[Any]) -> list[Any]:
    """The devices in partition order, from the one mesh that all arguments are sharded over."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tuple(abstract_args))]
    meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    if len(meshes) != 1 or not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        raise ValueError(
            f"compiling for {topology} needs every argument to be a ShapeDtypeStruct with a NamedSharding over one "
            f"mesh, but {len(meshes)} meshes were found; make them with make_slice_mesh."
        )
    devices = list(meshes.pop().devices.flat)
    if len(devices) != topology.num_devices:
        raise ValueError(
            f"the arguments are sharded over {len(devices)} devices but {topology} has {topology.num_devices}; make "
            f"the mesh with make_slice_mesh({str(topology)!r}, ...)."
        )
    return devices
