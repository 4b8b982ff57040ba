"""Results as pages: Markdown and HTML with the same words, tables and pictures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.results import Results
from launch.sweep_pictures import png
from overlapfx.train.directories import make_directory

_MADE = "Made by `python -m experiments.{name}` from stored results: do not edit, run it again."
_QUICK = (
    "**Quick variant**: tiny models on the smallest slices. It shows that everything works; its numbers say nothing "
    "about large models, where a device computes long enough to hide anything."
)
_HOW = (
    "Simulated means: the real training step, compiled ahead of time for a slice of TPUs that is not there, its "
    "schedule walked with the compiler's cycles and the figures of the chip below. Nothing of that ran on a TPU; all "
    "such times are estimates. Measured means: programs that ran, here on simulated CPU devices. Published means: "
    "printed by the paper, or by public runs of the same models, and named where it stands; what the paper's figures "
    "show per model is not at hand and not guessed."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
caption { text-align: left; font-style: italic; padding: .2rem 0; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; margin: .5rem 0; }
"""
Block = tuple[str, str] | Table  # ("h1" | "h2" | "p" | "li" | "img", text), or a table


def check(folder: Path, name: str) -> None:
    """Makes the folder; raises ValueError if it cannot be, or if a page would replace a file that was not made here."""
    make_directory(folder, "--out", "choose another folder")
    for path in (folder / f"{name}.md", folder / f"{name}.html"):
        if path.exists() and _MADE.format(name=name).split("`")[1] not in path.read_text("utf-8", "replace"):
            raise ValueError(f"{path} was not made by this command and is not overwritten; choose another --out.")


def write(folder: Path, name: str, figures: Sequence[Figure], quick: bool, results: Results) -> list[Path]:
    """Writes both pages and a picture per figure that has one; returns their paths."""
    contents = {figure.name: figure.content(quick, results) for figure in figures}
    written = []
    for figure in figures:
        picture = contents[figure.name].picture
        if picture is not None:
            path = folder / f"{figure.name}.png"
            path.write_bytes(png(picture))
            written.append(path)
    blocks = list(_blocks(name, figures, contents, quick, results))
    for suffix, text in (("md", markdown(blocks)), ("html", as_html(blocks))):
        path = folder / f"{name}.{suffix}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _blocks(
    name: str, figures: Sequence[Figure], contents: dict[str, Content], quick: bool, results: Results
) -> Iterator[Block]:
    yield "h1", "The paper, reproduced" if len(figures) > 1 else figures[0].title
    yield "p", _MADE.format(name=name)
    if quick:
        yield "p", _QUICK
    yield "p", _HOW
    for figure in figures:
        yield from _figure(figure, contents[figure.name], quick, results)
    findings = [finding for content in contents.values() for finding in content.findings]
    if findings:
        yield "h2", "Finding by finding"
        yield _findings(findings)
        yield from (("li", f"{one.claim}: {one.why}") for one in findings if one.why)
    yield from _origin(figures, quick, results)


def _figure(figure: Figure, content: Content, quick: bool, results: Results) -> Iterator[Block]:
    yield "h2", figure.title
    for what, text in (("Simulated", figure.simulated), ("Measured", figure.measured), ("Published", figure.published)):
        if text:
            yield "p", f"**{what}**: {text}"
    yield from content.tables
    if content.picture is not None:
        yield "img", figure.name
    yield from (("p", note) for note in content.notes)
    failures = figure.failures(quick, results)
    if failures:
        yield "p", "Without a result:"
        yield from (("li", f"{what}: {why}") for what, why in failures)


def _findings(findings: Sequence[Finding]) -> Table:
    rows = [(one.claim, one.numbers, one.verdict) for one in findings]
    return Table(("claim", "our numbers", "verdict"), rows)


def _origin(figures: Sequence[Figure], quick: bool, results: Results) -> Iterator[Block]:
    """Where the results come from: commits, versions, assumptions."""
    wanted = [m for figure in figures for m in figure.measurements(quick)]
    records = {m.identity(): r for m in wanted if (r := results.record(m)) is not None}.values()
    yield "h2", "Where the numbers come from"
    old = sum(not results.is_current(m) for m in wanted if results.record(m) is not None)
    if old:
        yield "p", f"{old} of the results below are of older code than the present one."
    commits = dict.fromkeys(str(record.get("commit")) for record in records)
    yield "p", f"Commits: {', '.join(commits) or 'none'}."
    for versions in dict.fromkeys(tuple(record["basis"]["versions"].items()) for record in records):
        yield "p", f"Versions: {', '.join(f'{package} {version}' for package, version in versions)}."
    chips = {r["result"]["chip"]: r["result"]["assumptions"] for r in records if "chip" in (r.get("result") or {})}
    for chip, assumed in chips.items():
        rows = [(one["name"], f"{one['value']:.4g}", one["unit"], one["source"]) for one in assumed]
        yield Table(("figure", "value", "unit", "source"), rows, f"Assumed of {chip}")


def markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown."""
    parts = []
    for block in blocks:
        if isinstance(block, Table):
            lines = [block.columns, ["---", *["---:"] * (len(block.columns) - 1)], *block.rows]
            table = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
            parts.append(f"*{block.caption}*\n\n{table}" if block.caption else table)
        else:
            kind, text = block
            marks = {"h1": "# ", "h2": "## ", "li": "- "}
            parts.append(f"![{text}]({text}.png)" if kind == "img" else marks.get(kind, "") + " ".join(text.split()))
    return re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", "\n\n".join(parts)) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def as_html(blocks: Sequence[Block]) -> str:
    """The page as HTML; whatever comes from outside is escaped."""
    title = html.escape(next(block[1] for block in blocks if not isinstance(block, Table)))
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{_STYLE}</style>'
    return "\n".join((head, *map(_html, blocks), "</html>\n"))


def _html(block: Block) -> str:
    if isinstance(block, Table):
        caption = f"<caption>{html.escape(block.caption)}</caption>" if block.caption else ""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in block.columns)
        rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in block.rows)
        return f"<table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    kind, text = block
    if kind == "img":
        return f'<img alt="{html.escape(text)}" src="{html.escape(text)}.png">'
    marked = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text)))
    return f"<{kind}>{marked}</{kind}>"
