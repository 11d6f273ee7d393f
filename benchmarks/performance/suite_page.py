"""What the runs of the suite look like: as plain text, as Markdown, as one page of HTML that needs no other file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from comparison import Comparison

if TYPE_CHECKING:
    from suite import Run

READING = (
    "A ratio above 1 means that this project is better: the peer's cost over ours, or our speed over the peer's. It is the median over paired repetitions "
    "in one run, beside the least and the most of a pair. The limit is what theory allows, in updates the ratio of tokens to unique ones (padding not "
    "counted); where it is 1, nearer to 1 is better. The bar is what the project asks of itself."
)
HEADS = ("part", "what", "beside", "ratio", "least to most", "pairs", "ours", "theirs", "limit", "bar", "note")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid #ccc; } h3 { font-size: 1rem; margin-bottom: .3rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid #e4e4e4; } th { background: #f4f4f4; } td.n { text-align: right; }
tr.new td { border-top: 2px solid #999; } .met { background: #d9f2df; } .missed { background: #f9d9d6; font-weight: bold; }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto; } .small { color: #666; font-size: .9em; }
"""


def number(value: Any) -> str:
    """A value of a table: whole numbers with separators, others with three figures that count."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 999.5:  # 999.9 would be 1e+03
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cells(name: str, row: Comparison) -> list[str]:
    """One line of the table of ratios, in the order of ``HEADS``."""
    sides = [f"{number(value)} {row.unit}" for value in (row.ours, row.theirs)]
    bar = "" if row.bar is None else f"{row.bar:.2f} {'met' if row.met else 'MISSED'}"
    limit = "" if row.limit is None else f"{row.limit:.2f}"
    return [name, row.name, row.peer, f"{row.ratio:.2f}", f"{row.low:.2f} to {row.high:.2f}", str(row.pairs), *sides, limit, bar, row.note]


def summary(runs: Sequence[Run], missing: Sequence[str]) -> str:
    """Bars met and missed, and what is not there, in a sentence."""
    bars = [row for run in runs if run.part is not None for row in run.part.rows if row.met is not None]
    said = [f"{sum(bool(row.met) for row in bars)} of {len(bars)} bars met"]
    said += [f"{run.name} failed" for run in runs if run.error] + [f"{name} was not run" for name in missing]
    return "; ".join(said) + "."


def machines(runs: Sequence[Run]) -> list[str]:
    """The machine of each stretch of parts that ran on the same, its load left out, and their loads."""
    lines = []
    described = [(run, ", ".join(f"{key} {value}" for key, value in run.machine.items() if key != "load")) for run in runs if run.machine]
    for text, same in groupby(described, key=lambda pair: pair[1]):
        of = [run for run, _ in same]
        lines.append(f"{', '.join(run.name for run in of)}: {text}; load {', '.join(str(run.machine.get('load', '?')) for run in of)}")
    return lines


def columns(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a figure, in the order in which they first appear."""
    return list(dict.fromkeys(name for line in lines for name in line))


# -- plain text ------------------------------------------------------------------------------------------------------------------------------------------


def table(runs: Sequence[Run]) -> str:
    """All ratios with aligned columns."""
    rows = [list(HEADS), *(cells(run.name, row) for run in runs if run.part is not None for row in run.part.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


# -- Markdown --------------------------------------------------------------------------------------------------------------------------------------------


def markdown(runs: Sequence[Run], missing: Sequence[str] = ()) -> str:
    """``RESULTS.md``."""
    lines = ["# Results of the performance suite", "", summary(runs, missing), "", READING, "", "## Ratios", ""]
    lines += _markdown_table(HEADS, [cells(run.name, row) for run in runs if run.part is not None for row in run.part.rows])
    lines += ["", "## Machine and commands", "", *(f"- {line}" for line in machines(runs)), ""]
    lines += _markdown_table(("part", "command", "seconds", "ended, UTC"), [[run.name, f"`{run.command}`", f"{run.seconds:.0f}", run.date] for run in runs])
    for run in runs:
        lines += ["", *_markdown_run(run)]
    return "\n".join(lines) + "\n"


def _markdown_run(run: Run) -> Iterator[str]:
    if run.part is None:
        yield from (f"## {run.name}: failed", "", "```", run.error, "```")
        return
    yield f"## {run.part.title}"
    for title, lines in run.part.figures.items():
        names = columns(lines)
        yield from ("", f"### {title}", "", *_markdown_table(names, [[number(line.get(name)) for name in names] for line in lines]))
    if run.part.missing:
        yield from ("", *(f"- left out: {line}" for line in run.part.missing))


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"


# -- HTML ------------------------------------------------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Run], missing: Sequence[str] = ()) -> str:
    """``suite.html``: everything on one page without scripts, pictures or fonts."""
    ratios = [_html_row(run.name, row, first=number == 0) for run in runs if run.part is not None for number, row in enumerate(run.part.rows)]
    commands = [[run.name, run.command, f"{run.seconds:.0f}", run.date] for run in runs]
    body = [
        "<h1>Performance suite</h1>",
        f"<p><b>{escape(summary(runs, missing))}</b></p>",
        f'<p class="small">{escape(READING)}</p>',
        f'<div class="wide"><table><tr>{"".join(f"<th>{head}</th>" for head in HEADS)}</tr>{"".join(ratios)}</table></div>',
        "<h2>Machine and commands</h2>",
        *(f"<p>{escape(line)}</p>" for line in machines(runs)),
        _html_table(("part", "command", "seconds", "ended, UTC"), commands),
        *(_html_run(run) for run in runs),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Performance suite</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def _html_row(name: str, row: Comparison, *, first: bool) -> str:
    kinds = {"ratio": "n", "ours": "n", "theirs": "n", "limit": "n", "pairs": "n"}
    if row.met is not None:
        kinds["bar"] = "met" if row.met else "missed"
    inside = "".join(f'<td class="{kinds.get(head, "")}">{escape(cell)}</td>' for head, cell in zip(HEADS, cells(name, row), strict=True))
    return f'<tr class="{"new" if first else ""}">{inside}</tr>\n'


def _html_run(run: Run) -> str:
    if run.part is None:
        return f'<h2>{escape(run.name)}: <span class="missed">failed</span></h2><pre>{escape(run.error)}</pre>'
    parts = [f"<h2>{escape(run.part.title)}</h2>"]
    for title, lines in run.part.figures.items():
        names = columns(lines)
        parts.append(f"<h3>{escape(title)}</h3>" + _html_table(names, [[number(line.get(name)) for name in names] for line in lines]))
    parts += [f'<p class="small">Left out: {escape(line)}</p>' for line in run.part.missing]
    settings = "; ".join(f"{name}: {value}" for name, value in run.part.about.items())
    return "\n".join([*parts, f'<p class="small">{escape(settings)}</p>'])


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{escape(head)}</th>" for head in heads)}</tr>{lines}</table></div>'
