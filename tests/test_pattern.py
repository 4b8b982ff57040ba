"""The algebra of collective einsums: parsing, checks in one sentence, duals."""

from __future__ import annotations

import pytest

from overlapfx.plan import pattern
from overlapfx.plan.pattern import Operand, Problem, Result, Term

pytestmark = pytest.mark.core

MESH = {"y": 2, "x": 4, "one": 1}
UP = pattern.forward(
    Operand("btd", (("d", ("x",)),)), Operand("df", (("d", ("y",)),)), Result("btf"), num_rhs=1
)  # fmt: skip
DOWN = pattern.forward(Operand("btf"), Operand("fd", (("d", ("y",)),)), Result("btd", (("d", ("x",)),)), num_rhs=1)


def test_parse_spec() -> None:
    assert pattern.parse_spec("btd,df->btf", "site") == ("btd", "df", "btf")
    assert pattern.parse_spec(" b t d, df -> bt f ", "site") == ("btd", "df", "btf")
    assert pattern.parse_spec("a,a->", "site") == ("a", "a", "")
    assert pattern.parse_spec(",->", "site") == ("", "", "")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ab,bc", "'ab,bc' does not have the form 'ab,bc->ac'"),
        ("ab->ab", "does not have the form"),
        ("ab,bc,cd->ad", "does not have the form"),
        ("ab->bc,ac", "does not have the form"),
        ("ab,bc->ac->a", "does not have the form"),
        ("a1,1c->ac", "contains '1': labels are single letters"),
        ("...b,bc->...c", r"contains '\.': labels are single letters"),
        ("ab,bc->aac", "repeats label 'a' in its result"),
        ("ab,bc->acz", "has label 'z' in its result that no operand has"),
    ],
)
def test_illegal_specs(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pattern.parse_spec(spec, "mlp.up")
    assert "'mlp.up'" in str(error.value)


def test_check_collective_drops_axes_of_one_device_and_orders_by_label() -> None:
    checked = pattern.check_collective("site", "lhs_gather", "btd", {"d": "x", "b": ("one", "y")}, MESH)
    assert checked == (("b", ("y",)), ("d", ("x",)))


@pytest.mark.parametrize(
    ("collective", "message"),
    [
        ({"q": "x"}, "rhs_gather names label 'q', which is not among the labels 'df'"),
        ({"d": "z"}, "uses axis 'z' for label 'd', but the mesh axes bound here are y, x, one"),
        ({"d": ("x", "z")}, "uses axis 'z'"),
        ({"d": "x", "f": "x"}, "uses axis 'x' twice, for labels 'd' and 'f'"),
        ({"d": ("x", "x")}, "uses axis 'x' twice"),
    ],
)
def test_illegal_collectives(collective: dict[str, pattern.AxisNames], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pattern.check_collective("mlp.up", "rhs_gather", "df", collective, MESH)
    assert str(error.value).startswith("collective_einsum 'mlp.up': rhs_gather")


def test_sizes_of_results() -> None:
    assert pattern.check_sizes("site", UP, [(2, 3, 2), (4, 6)], MESH) == [{"b": 2, "t": 3, "f": 6}]
    assert pattern.check_sizes("site", DOWN, [(2, 3, 5), (5, 4)], MESH) == [{"b": 2, "t": 3, "d": 2}]
    assert pattern.num_shards(("y", "x"), MESH) == 8
    assert pattern.num_shards((), MESH) == 1


@pytest.mark.parametrize(
    ("problem", "shapes", "message"),
    [
        (UP, [(2, 3), (4, 6)], r"left operand has shape \(2, 3\) but labels 'btd'"),
        (UP, [(2, 3, 2), (4,)], r"right operand has shape \(4,\) but labels 'df'"),
        (
            UP,
            [(2, 3, 2), (2, 6)],
            r"'d' has size 8 on the left and 4 on the right after the gathers \(left gathers d:x, right gathers d:y\)",
        ),
        (
            DOWN,
            [(2, 3, 5), (5, 5)],
            "label 'd' of size 10 over axis x of size 4 does not divide: the nearest legal sizes are 8 or 12",
        ),
        (DOWN, [(2, 3, 5), (5, 1)], "of size 2 over axis x of size 4 does not divide: the nearest legal size is 4"),
    ],
)
def test_sizes_that_do_not_fit(problem: Problem, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pattern.check_sizes("mlp", problem, shapes, MESH)


def test_right_operands_may_differ_in_their_own_labels_only() -> None:
    lhs, rhs = Operand("td"), Operand("dn")
    several = pattern.forward(lhs, rhs, Result("tn", (("n", ("x",)),)), num_rhs=2)
    sizes = pattern.check_sizes("qkv", several, [(3, 5), (5, 8), (5, 4)], MESH)
    assert sizes == [{"t": 3, "n": 2}, {"t": 3, "n": 1}]
    with pytest.raises(ValueError, match="label 'd' has size 5 on the left and 6 on the right"):
        pattern.check_sizes("qkv", several, [(3, 5), (5, 8), (6, 4)], MESH)
    with pytest.raises(ValueError, match="label 'n' of size 6 over axis x of size 4"):
        pattern.check_sizes("qkv", several, [(3, 5), (5, 8), (5, 6)], MESH)


def test_roles_are_the_three_cases_of_the_paper() -> None:
    batched = pattern.forward(Operand("gab"), Operand("gbc"), Result("gac"), num_rhs=1)
    assert [batched.role(0, c) for c in "gab"] == ["batch", "free", "contracting"]
    assert [batched.role(1, c) for c in "gbc"] == ["batch", "contracting", "free"]


def test_backward_by_hand() -> None:
    # y = einsum("btd,df->btf", gather(x), gather(w)): dx scatters d over x, dw scatters d over y, dy moves nowhere.
    assert pattern.backward(UP) == Problem(
        operands=(Operand("btf"), *UP.operands),
        results=(Result("btd", (("d", ("x",)),)), Result("df", (("d", ("y",)),))),
        terms=(Term(0, 2, 0), Term(1, 0, 1)),
    )
    dual = pattern.backward(UP)
    assert [dual.spec(t) for t in dual.terms] == ["btf,df->btd", "btd,btf->df"]
    # What was scattered is gathered: dy along d over x, for both gradients.
    assert pattern.backward(DOWN).operands[0] == Operand("btd", (("d", ("x",)),))


def test_the_gradient_of_a_shared_operand_is_one_sum() -> None:
    several = pattern.forward(Operand("td"), Operand("dn"), Result("tn"), num_rhs=3)
    dual = pattern.backward(several)
    assert [t.out for t in dual.terms] == [0, 0, 0, 1, 2, 3]
    dlhs, kept = pattern.restrict(dual, (0,))
    assert kept == (0, 1, 2, 4, 5, 6)  # the cotangents and the right operands, without the left one
    assert dlhs.terms == (Term(0, 3, 0), Term(1, 4, 0), Term(2, 5, 0))
    drhs, kept = pattern.restrict(dual, (1, 3))
    assert kept == (0, 2, 3)
    assert drhs.terms == (Term(2, 0, 0), Term(2, 1, 1))


def test_without_gathers() -> None:
    assert pattern.without_gathers(UP, [0]).operands == (Operand("btd"), UP.operands[1])
    assert pattern.without_gathers(UP, []) == UP
