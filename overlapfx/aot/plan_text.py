"""Plans of a step as aligned text for a terminal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from overlapfx.aot.render import assumptions_table, duration, text_table
from overlapfx.aot.sites import NOT_PLANNED, SiteReport, describe_slot
from overlapfx.aot.step_plan import DoesNotFit, Planner, StepPlan
from overlapfx.aot.variants import Variant

Outcome = StepPlan | DoesNotFit
GIB, MIB = 2**30, 2**20


def heading(planner: Planner) -> str:
    """What is planned, where it runs, how the mesh lies on the torus."""
    config, topology = planner.config, planner.topology
    axes = ", ".join(f"{name}={size}" for name, size in planner.mesh.shape.items())
    chips = f"{topology.num_chips} x {topology.chip.name}"
    if topology.num_devices != topology.num_chips:
        chips += f" ({topology.num_devices} devices)"
    lines = [
        f"{config.name} on {topology}: {chips}, mesh {axes}, global batch {config.data.global_batch} x "
        f"{config.model.seq_len} tokens, recomputation {config.model.remat}, overlap {config.overlap.mode}"
    ]
    if config.overlap.scheduler != "compiler":
        lines[0] += f", in the order of {config.overlap.scheduler}"
    where = "  in every slice, mesh axis" if topology.num_slices > 1 else "  mesh axis"
    return "\n".join(lines + [f"{where} {report}" for report in planner.placement.reports if report.size > 1])


def plan_text(plan: StepPlan) -> str:
    """Everything about one plan but the assumptions."""
    sections = (_step(plan), memory_line(plan), text_table(plan.timeline), sites_table(plan.sites), orders_table(plan))
    return "\n\n".join(section for section in sections if section)


def _step(plan: StepPlan) -> str:
    shorthand = ""
    if plan.flops.hardware > plan.flops.model:
        shorthand = f" ({8 / 6 * plan.mfu:.1%} by the shorthand 8/6 of MFU for whole layers)"
    timeline, compiled = plan.timeline, plan.compiled
    scaled = ", ".join(f"{duration(step_s)} at {factor:g}x" for factor, step_s in plan.sensitivity)
    compiling = "compiling (in an earlier run)" if compiled.is_kept else "compiling"
    stages = (("tracing", compiled.lower_s), (compiling, compiled.compile_s), ("reading", plan.read_s))
    rows = [
        ("step", duration(plan.step_s)),
        ("MFU", f"{plan.mfu:.1%}"),
        ("HFU", f"{plan.hfu:.1%}{shorthand}"),
        ("computation", f"{1 - timeline.communication_share:.1%} of the step (the paper's figure 1)"),
        ("communication", f"{timeline.communication_share:.1%}, exposed or blocking"),
        ("optimizer", f"{_part(plan.optimizer_s, plan)}, part of the times below"),
        ("link bandwidth", f"the step takes {scaled}"),
        ("planned in", ", ".join(f"{seconds:.1f} s {what}" for what, seconds in stages)),
    ]
    if timeline.repeated_s:
        repeated = _part(timeline.repeated_s, plan)
        rows.append(("repeated", f"{repeated}, done again by the compiler where memory is short"))
    return "\n".join(f"{label:16s} {value}" for label, value in rows)


def _part(seconds: float, plan: StepPlan) -> str:
    return f"{duration(seconds)}, {seconds / plan.step_s:.1%}"


def memory_line(plan: StepPlan) -> str:
    """Bytes against the memory, with a verdict."""
    memory = plan.compiled.memory
    parts = ", ".join(
        f"{name} {size / GIB:.2f}"
        for name, size in (
            ("state and batch", memory.arguments),
            ("temporary", memory.temporaries),
            ("new outputs", memory.outputs - memory.aliased),
            ("program", memory.code),
        )
    )
    spare = (plan.hbm_bytes - memory.total) / GIB
    verdict = f"fits, {spare:.2f} GiB to spare" if plan.fits else f"DOES NOT FIT, {-spare:.2f} GiB too much"
    devices = plan.compiled.topology.chip.devices_per_chip
    of = "chip" if devices == 1 else f"device ({devices} to a chip)"
    return f"memory per {of}: {memory.total / GIB:.2f} of {plan.hbm_bytes / GIB:.0f} GiB ({parts}): {verdict}"


def sites_table(sites: Sequence[SiteReport]) -> str:
    """Two lines per einsum site: what happens there, then the collectives it could have decomposed, with the reason."""
    if not sites:
        return ""
    names = max(len(site.name) for site in sites)
    decisions = max(len(site.decision) for site in sites)
    columns = f"{'compute':>9s} {'exposed':>9s} {'blocking':>9s} {'predicted':>9s} {'error':>6s}"
    lines = [f"{'einsum site':{names}s}  {'decision':{decisions}s}  {columns}  state"]
    for site in sites:
        times = " ".join(f"{duration(s):>9s}" for s in (site.compute_s, site.exposed_s, site.blocking_s))
        times += f" {_or_dash(site.predicted_s, duration):>9s} {_or_dash(site.error, '{:+.0%}'.format):>6s}"
        state = site.state
        if state != NOT_PLANNED:
            state += f" ({site.hidden} of {site.transfers} transfers have work beside them)"
        lines.append(f"{site.name:{names}s}  {site.decision:{decisions}s}  {times}  {state}")
        alike = Counter(map(describe_slot, site.slots))
        collectives = "; ".join(f"{count} x {what}" if count > 1 else what for what, count in alike.items())
        lines.append(f"{'':{names}s}    {collectives or 'no collective'}: {', '.join(site.reasons)}")
    errors = sorted(abs(site.error) for site in sites if site.error is not None)
    if errors:
        lines.append(
            "predicted: what the gate expected of the three together; the error is within "
            f"{statistics.median(errors):.0%} at half of the {len(errors)} sites that it decided, within "
            f"{errors[-1]:.0%} at all of them"
        )
    return "\n".join(lines)


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def orders_table(plan: StepPlan) -> str:
    """The compiler's own order beside other orders of the same instructions; empty if none was asked for."""
    if not plan.orders:
        return ""
    columns = ("step", "compute", "exposed", "blocking", "GiB", "on chip", "in flight")
    lines = [f"{'order':14s}" + "".join(f"{c:>10s}" for c in columns) + "   gain over the compiler's own"]
    for found in plan.orders:
        name = "compiler" if found.scheduler == "as_written" else found.scheduler
        t = found.timeline
        times = "".join(f"{duration(s):>10s}" for s in (t.total_s, t.compute_s, t.exposed_s, t.blocking_s))
        memory = f"{found.peak_bytes / GIB:10.2f}{found.chip_bytes / MIB:6.0f} MiB{found.most_in_flight:10d}"
        lines.append(f"{name:14s}{times}{memory}   {plan.step_s / t.total_s:.3f}x")
    lines.append(
        "estimates of what another order of the same instructions would give; GiB: temporary values as counted here; "
        "an order that needs more memory on the chip than the compiler's own could not be compiled as it stands"
    )
    return "\n".join(lines)


def assumptions_text(planner: Planner) -> str:
    """Every assumed figure with its source."""
    return f"assumed (replace with --assume NAME=VALUE):\n{assumptions_table(planner.assumptions)}"


def compare_table(outcomes: Mapping[Variant, Outcome]) -> str:
    """One line per variant with its gain over the first and over the best of XLA, then the options of each."""
    plans = {variant: plan for variant, plan in outcomes.items() if isinstance(plan, StepPlan)}
    first = next(iter(plans.values()), None)
    best = best_of(plans, "xla")
    columns = ("step", "compute", "exposed", "blocking", "repeated", "comm.", "MFU", "HFU", "GiB", "temp.")
    head = f"{'':14s}" + "".join(f"{c:>10s}" for c in columns)
    if first is not None:
        head += f"   gain over {first.variant.name}" + ("" if best is None else f", over {best.variant.name}")
    lines = [head]
    for variant, outcome in outcomes.items():
        mark = "*" if outcome is best else ""
        if isinstance(outcome, DoesNotFit):
            lines.append(f"{variant.name:14s}  does not fit: {outcome}")
            continue
        gains = "" if first is None else f"   {first.step_s / outcome.step_s:.3f}x"
        gains += "" if best is None else f", {best.step_s / outcome.step_s:.3f}x"
        lines.append(f"{variant.name + mark:14s}{_cells(outcome)}{gains}")
    if best is not None:
        lines.append("* the best of XLA")
    lines.append("repeated: done again by the compiler where memory is short, part of compute and blocking")
    for variant in outcomes:
        plan = plans.get(variant)
        options = variant.options if plan is None else plan.compiled.options
        shown = " ".join(f"{name}={value}" for name, value in options.items()) or "default options"
        lines.append(f"{variant.name}: {variant.what}; {shown}")
    return "\n".join(lines)


def _cells(plan: StepPlan) -> str:
    t, memory = plan.timeline, plan.compiled.memory
    times = "".join(f"{duration(s):>10s}" for s in (t.total_s, t.compute_s, t.exposed_s, t.blocking_s, t.repeated_s))
    shares = "".join(f"{share:10.1%}" for share in (t.communication_share, plan.mfu, plan.hfu))
    return f"{times}{shares}{memory.total / GIB:10.2f}{memory.temporaries / GIB:10.2f}"


def best_of(plans: Mapping[Variant, StepPlan], group: str) -> StepPlan | None:
    """The quickest plan of a group of variants; None if there is none."""
    return min((p for v, p in plans.items() if v.group == group), key=lambda plan: plan.step_s, default=None)
