"""The training step of a config, compiled for a slice that is not there, with what it will do."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from overlapfx.aot import slices, variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import CompiledFor, compile_for
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.program import Program
from overlapfx.aot.reorder import Reordered, reorder
from overlapfx.aot.sites import SiteReport, report_sites
from overlapfx.aot.slices import Slice, make_slice_mesh
from overlapfx.aot.timeline import Timeline, walk
from overlapfx.aot.variants import Variant
from overlapfx.config import Config, Overlap
from overlapfx.families import ModelConfig
from overlapfx.plan import cost
from overlapfx.plan.decide import record_sites
from overlapfx.plan.flops import StepFlops
from overlapfx.plan.placement import Placement
from overlapfx.train import optimizer, state, step
from overlapfx.train.objectives import Objective

LINK_FACTORS = (0.8, 1.25)


class Family(Protocol):
    """What a module in models/ offers."""

    def build(self, model: ModelConfig, overlap: Overlap) -> Callable[[Any], Any]:
        """A function from a key to the module."""

    def step_flops(self, model: ModelConfig, num_sequences: int) -> StepFlops:
        """FLOPs of a training step."""

    def objective(self, model: ModelConfig) -> Objective:
        """What it learns to predict, and so what a batch holds."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What one variant of the step will do on one device of the slice; seconds and bytes.

    `sensitivity` holds (factor on the link bandwidth, step seconds). `flops` are those of the whole mesh. `read_s` is
    what reading the compiled program took. `orders` holds the same instructions as schedulers of ours order them.
    """

    variant: Variant
    compiled: CompiledFor
    program: Program
    timeline: Timeline
    sites: tuple[SiteReport, ...]
    flops: StepFlops
    sensitivity: tuple[tuple[float, float], ...]
    read_s: float
    orders: tuple[Reordered, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.timeline.total_s

    @property
    def optimizer_s(self) -> float:
        """Seconds in the optimizer: clipping and Adam."""
        return self.timeline.in_scope(rf"(^|[/(]){step.OPTIMIZER}([/)]|$)")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, 0 to 1."""
        return self._utilization(self.flops.model)

    @property
    def hfu(self) -> float:
        """The same with recomputation counted."""
        return self._utilization(self.flops.hardware)

    def _utilization(self, flops: float) -> float:
        peak = self.timeline.assumptions.peak_flops * self.compiled.topology.num_devices
        return flops / self.step_s / peak

    @property
    def hbm_bytes(self) -> float:
        """Memory of one device."""
        return self.timeline.assumptions.hbm_bytes

    @property
    def fits(self) -> bool:
        """Whether what the compiler reserves is within the device's memory."""
        return self.compiled.memory.total <= self.hbm_bytes


class DoesNotFit(Exception):
    """The compiler gave up since the program needs more memory than the device has; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans the step of `config` on `topology`, one variant after the other, all on the same devices in the same order.

    Raises ValueError for a mesh that does not fill the slice.
    """

    config: Config
    family: Family
    topology: Slice
    assumptions: Assumptions
    mesh: Mesh
    placement: Placement
    objective: Objective

    @classmethod
    def make(cls, config: Config, family: Family, topology: Slice, assumed: Mapping[str, float]) -> Planner:
        """A planner with figures of `topology`'s chip, those in `assumed` replaced."""
        assumptions = Assumptions.for_slice(topology, **assumed)
        axes = {"replica": config.mesh.replica} if config.mesh.replica > 1 else {}
        axes = {**axes, "y": config.mesh.y, "x": config.mesh.x}
        mesh, placement = make_slice_mesh(topology, axes, assumptions.network(topology))
        return cls(config, family, topology, assumptions, mesh, placement, family.objective(config.model))

    @property
    def environment(self) -> cost.Environment:
        """What the gate prices sites for: this chip, these mesh axes on its links."""
        return slices.environment(self.topology, self.placement)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        return state.describe(self.family.build(self.config.model, self.config.overlap)).num_params()

    def plan(self, variant: Variant, given: Mapping[str, str], schedulers: Sequence[str] = ()) -> StepPlan:
        """Compile and read one variant, with the compiler options `given` besides its own.

        schedulers: names in plan.schedulers whose orders of the compiled program are walked as well.

        Raises DoesNotFit, and ValueError for options that the compiler refuses.
        """
        fn, arguments = self._step(variant)
        with record_sites() as calls, cost.pricing(self.environment):
            compiled = self._compile(fn, arguments, variants.options_of(variant, given))
        begin = time.perf_counter()
        module = parse_module(compiled.text)
        program = lower(module)
        timeline = self._walk(program, compiled, self.assumptions)
        # XLA's partitioner sees whole arrays: nothing was decided there.
        decided = variant.partitioning == "shard_map"
        products = {scope: flops / self.mesh.size for scope, flops in compiled.products.items()}
        sites = report_sites(calls, program, timeline, products) if decided else ()
        flops = self.family.step_flops(self.config.model, self.config.data.global_batch)
        sensitivity = tuple(
            (f, self._walk(program, compiled, self.assumptions.with_link_factor(f)).total_s) for f in LINK_FACTORS
        )
        orders = tuple(
            reorder(module, name, self.placement.torus, compiled.coords, self.assumptions) for name in schedulers
        )
        read_s = time.perf_counter() - begin
        return StepPlan(variant, compiled, program, timeline, sites, flops, sensitivity, read_s, orders)

    def _walk(self, program: Program, compiled: CompiledFor, assumptions: Assumptions) -> Timeline:
        return walk(program, self.placement.torus, compiled.coords, assumptions)

    def _step(self, variant: Variant) -> tuple[Any, tuple[Any, Any]]:
        """The jitted step with the shapes and shardings of its arguments."""
        config, overlap = self.config, variant.overlap(self.config.overlap)
        model = state.describe(self.family.build(config.model, overlap))
        adam = optimizer.make_optimizer(config.optimizer, config.train.num_steps)
        fn = step.make_train_step(
            self.mesh,
            model,
            adam,
            optimizer.make_schedule(config.optimizer, config.train.num_steps),
            grad_accum=config.optimizer.grad_accum,
            dropout=config.model.dropout > 0,
            partitioning=variant.partitioning,
            scheduler=overlap.scheduler,
        )
        return fn, (state.abstract_state(self.mesh, model, adam, config.seed), self._batch())

    def _batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows, sharding = self.config.data.global_batch, NamedSharding(self.mesh, step.batch_spec(self.mesh))
        return {
            name: jax.ShapeDtypeStruct((rows, *field.shape), field.dtype, sharding=sharding)
            for name, field in self.objective.fields.items()
        }

    def _compile(self, fn: Any, arguments: tuple[Any, Any], options: Mapping[str, str]) -> CompiledFor:
        try:
            return compile_for(self.topology, fn, arguments, options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFit(
                f"the compiler finds no room in a device's memory on {self.topology} ({_shortage(str(error))}); use a "
                f"larger slice, more recomputation (model.remat) or smaller micro-batches (optimizer.grad_accum)."
            ) from error


def _shortage(message: str) -> str:
    """The figures in the compiler's words about memory, which differ from version to version."""
    used = re.search(r"Used (\S+) of (\S+) hbm", message)
    if used:
        return f"{used[1]} needed, {used[2]} there"
    temporary = re.search(r"temporaries \((\S+)\) exceeds available HBM \((\S+?)\)", message)
    if temporary:
        return f"{temporary[1]} of temporaries, {temporary[2]} there"
    return message.splitlines()[0]
