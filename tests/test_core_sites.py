"""What is recorded about every call, and how one site is set apart."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from core_harness import Case, make_values, place, sharded_program
from core_patterns import ONE_AXIS, mlp_down, mlp_up, query_key_value

from overlapfx.config import Overlap
from overlapfx.plan import decide
from overlapfx.plan.decide import CallSite, Plan, record_sites

pytestmark = pytest.mark.core


def sites_of(case: Case, overlap: Overlap, **options: Any) -> dict[str, CallSite]:
    """Sites of one forward and backward pass, by name."""
    with record_sites() as sites:
        arrays = place(case, make_values(case))
        jax.eval_shape(sharded_program(case, {"mlp": overlap}, **options), *arrays)
    assert len({site.name for site in sites}) == len(sites)
    return {site.name: site for site in sites}


def slots_of(site: CallSite) -> list[tuple[str, str, tuple[str, ...], int, int]]:
    return [(s.kind, s.label, s.axes, s.num_shards, s.wire_bytes) for s in site.slots]


def test_sites_of_two_gathers_by_hand() -> None:
    # Per device x is [1, 3, 2] and w is [4, 2] in float32, 24 and 32 bytes; three shards of x arrive, one of w.
    sites = sites_of(mlp_up(2, 4, 1, 3), Overlap())
    assert list(sites) == ["mlp", "mlp.dlhs", "mlp.drhs"]
    assert sites["mlp"].specs == ("btd,df->btf",)
    assert slots_of(sites["mlp"]) == [("gather", "d", ("x",), 4, 72), ("gather", "d", ("y",), 2, 32)]
    # dx = scatter(dy . gather(w)), dw = scatter(gather(x) . dy): the same shards, the other way for the gradients.
    assert sites["mlp.dlhs"].specs == ("btf,df->btd",)
    assert slots_of(sites["mlp.dlhs"]) == [("gather", "d", ("y",), 2, 32), ("scatter", "d", ("x",), 4, 72)]
    assert sites["mlp.drhs"].specs == ("btd,btf->df",)
    assert slots_of(sites["mlp.drhs"]) == [("gather", "d", ("x",), 4, 72), ("scatter", "d", ("y",), 2, 32)]


def test_one_backward_site_where_both_gradients_need_the_gathered_cotangent() -> None:
    sites = sites_of(mlp_down(2, 4, 1, 3), Overlap())
    assert list(sites) == ["mlp", "mlp.bwd"]
    assert sites["mlp.bwd"].specs == ("btd,fd->btf", "btf,btd->fd")
    # dy [1, 3, 2] is gathered once, and w [2, 4]; dw is scattered.
    assert slots_of(sites["mlp.bwd"]) == [
        ("gather", "d", ("x",), 4, 72),
        ("gather", "d", ("y",), 2, 32),
        ("scatter", "d", ("y",), 2, 32),
    ]


def test_several_weights_share_one_gather() -> None:
    sites = sites_of(query_key_value(1, 4, 1, 3), Overlap())
    assert slots_of(sites["mlp"]) == [("gather", "d", ("x",), 4, 36)]
    assert slots_of(sites["mlp.dlhs"]) == [("scatter", "d", ("x",), 4, 36)]
    assert sites["mlp.dlhs"].specs == ("btnh,dnh->btd",) * 3


def test_bytes_of_sums_follow_the_wire_dtype() -> None:
    case = ONE_AXIS["scatter_lhs_free"](4, 2, 3)
    wide = sites_of(case, Overlap())["mlp"].slots[0].wire_bytes
    assert wide == 3 * (3 * 2 * 3) * 4
    assert sites_of(case, Overlap(accum_dtype="bfloat16"))["mlp"].slots[0].wire_bytes == wide // 2


def test_the_fastest_way_is_taken_when_nothing_is_asked_for() -> None:
    """At these sizes every transfer costs more than all arithmetic: nothing decomposed, unless it must be."""
    for case in (
        ONE_AXIS["gather_lhs_contracting"](4, 2, 3),
        ONE_AXIS["scatter_lhs_free"](2, 2, 3),
        mlp_up(2, 4, 1, 3),
    ):
        site = sites_of(case, Overlap())["mlp"]
        assert (site.plan.slot, site.plan.method) == (None, "blocking")
        decomposed = [way.seconds for way in site.ways if way.slot is not None]
        assert decomposed == sorted(decomposed)
        must = sites_of(case, Overlap(mode="on"))["mlp"]
        assert must.plan.slot is not None
        assert all(way.slot is not None for way in must.ways)
        assert must.ways == tuple(way for way in site.ways if way.slot is not None)
    assert sites_of(ONE_AXIS["scatter_lhs_free"](2, 2, 3), Overlap(mode="on"))["mlp"].plan.interleave == "parity"


def test_results_scattered_alike_are_decomposed_alike() -> None:
    sites = sites_of(query_key_value(1, 4, 2, 3), Overlap(method="ring"))
    plan = sites["mlp.drhs"].plan
    assert plan.twins == () or {s.index for s in (plan.slot, *plan.twins)} == {0, 1, 2}


def test_large_rings_are_loops() -> None:
    assert decide.MAX_STRAIGHT_SHARDS == 16
    assert not sites_of(ONE_AXIS["gather_lhs_free"](8, 2, 3), Overlap())["mlp"].plan.loop


def test_no_prefetch_is_written_out_over_a_large_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_of(overlap: Overlap) -> Plan:
        return sites_of(ONE_AXIS["gather_lhs_free"](4, 2, 3), overlap)["mlp"].plan

    assert plan_of(Overlap(method="prefetch")).method == "prefetch"
    monkeypatch.setattr(decide, "MAX_STRAIGHT_SHARDS", 3)
    asked = plan_of(Overlap(method="prefetch"))
    assert (asked.method, asked.loop) == ("ring", True)
    assert asked.downgrades == ("a prefetch is written out, which 4 shards are too many for (3 at most): ring instead",)
    ways = sites_of(ONE_AXIS["gather_lhs_free"](4, 2, 3), Overlap())["mlp"].ways
    assert ways and "prefetch" not in {way.method for way in ways}


@pytest.mark.parametrize(
    ("overlap", "reason"),
    [(Overlap(mode="off", method="ring"), "mode off"), (Overlap(method="blocking"), "method blocking")],
)
def test_blocking_says_why(overlap: Overlap, reason: str) -> None:
    sites = sites_of(mlp_up(2, 2, 1, 3), overlap)
    assert [(s.plan.slot, s.plan.method, s.plan.reason) for s in sites.values()] == [(None, "blocking", reason)] * 3


def test_one_site_is_set_apart() -> None:
    overlap = Overlap(
        method="blocking",
        sites={
            "mlp": {"method": "ring", "direction": "one"},
            "mlp.drhs": {"method": "prefetch"},
            "other": {"unroll": 1},
        },
    )
    sites = sites_of(mlp_up(2, 4, 2, 3), overlap)
    # An override of the call holds for its backward sites, and theirs on top of it.
    methods = {name: (site.plan.method, site.plan.direction) for name, site in sites.items()}
    assert methods == {"mlp": ("ring", "one"), "mlp.dlhs": ("ring", "one"), "mlp.drhs": ("prefetch", "one")}
    assert all(site.plan.unroll == 2 for site in sites.values())


def test_a_line_for_the_log() -> None:
    sites = sites_of(mlp_up(2, 4, 1, 3), Overlap(method="exchange", direction="two_whole"))
    line = sites["mlp"].line()
    assert line.startswith("mlp: btd,df->btf [gather d over x=4 (72 B), gather d over y=2 (32 B)] -> ring, gather d, ")
    assert re.search(r" \([\d.e-]+ ms predicted, [\d.e-]+ ms whole; exchange needs a scatter: ring instead", line)
    blocking = sites_of(mlp_up(1, 1, 1, 3), Overlap())["mlp"]
    assert blocking.line() == "mlp: btd,df->btf [no collective] -> blocking (nothing to communicate)"
    striped = sites_of(ONE_AXIS["gather_lhs_contracting"](4, 2, 3), Overlap(method="stripe"))["mlp"]
    assert "-> 3 stripes of t, gather b (" in striped.line()


def test_recorders_nest_and_end() -> None:
    case = ONE_AXIS["gather_lhs_free"](2, 2, 2)
    with record_sites() as outer:
        with record_sites() as inner:
            jax.eval_shape(sharded_program(case, {"a": Overlap()}), *place(case, make_values(case)))
        assert [site.name for site in inner] == ["a", "a.dlhs", "a.drhs"]
        assert outer == []
        jax.eval_shape(sharded_program(case, {"b": Overlap()}), *place(case, make_values(case)))
        assert [site.name for site in outer] == ["b", "b.dlhs", "b.drhs"]
    jax.eval_shape(sharded_program(case, {"c": Overlap()}), *place(case, make_values(case)))
    assert len(outer) == 3
