"""The report as one HTML file that needs no network: tables that sort, curves, and for each number its runs."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentropy.study.figures import caption
from agentropy.study.markdown import heading, intro, number, overrides_text, state_of, versions, written
from agentropy.study.plan import Run
from agentropy.study.results import Cell, Results, Row, Table
from agentropy.study.spec import Column

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 110rem; padding: 0 1rem; color: #1a1a1a;
  background: #fff; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
.wide { overflow-x: auto; margin: .8rem 0 1.4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap;
  vertical-align: top; }
th { border-bottom: 2px solid #888; } td:first-child, th:first-child { text-align: left; }
table.sortable td:first-child, table.sortable th:first-child { position: sticky; left: 0; background: #fff; }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th button, td button { all: unset; cursor: pointer; } th button:focus-visible, td button:focus-visible {
  outline: 2px solid #0072b2; }
td button:hover { text-decoration: underline dotted; }
th[aria-sort=ascending] button::after { content: " \\25B2"; } th[aria-sort=descending] button::after {
  content: " \\25BC"; }
.interval { color: #555; font-size: .8rem; } .star { font-weight: 700; } tr.before { color: #555; font-style: italic; }
.note { border-left: 4px solid #d55e00; padding: .3rem .8rem; background: #fdf3ec; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto; font-size: .8rem; }
#runs-of { position: sticky; bottom: 0; background: #f3f7fa; border: 1px solid #9bb; padding: .5rem .9rem;
  max-height: 45vh; overflow: auto; }
@media print { #runs-of { display: none; } }
"""

SCRIPT = """
document.querySelectorAll('table.sortable').forEach(table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], order = [...body.rows];
  heads.forEach((head, i) => head.querySelector('button').addEventListener('click', () => {
    const now = head.getAttribute('aria-sort');
    const next = now === 'descending' ? 'ascending' : now === 'ascending' ? null : 'descending';
    heads.forEach(h => h.removeAttribute('aria-sort'));
    const value = row => row.cells[i].dataset.value;
    let rows = order;
    if (next) {
      head.setAttribute('aria-sort', next);
      const sign = next === 'ascending' ? 1 : -1;
      rows = [...order].sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === '' || y === '') return (x === '') - (y === '');
        return sign * (i === 0 ? x.localeCompare(y) : Number(x) - Number(y));
      });
    }
    body.append(...rows);
  }));
});
const panel = document.getElementById('runs-of');
document.querySelectorAll('td button').forEach(button => button.addEventListener('click', () => {
  const cell = button.parentElement;
  panel.hidden = false;
  panel.querySelector('h3').textContent = cell.dataset.what;
  panel.querySelector('tbody').replaceChildren(...JSON.parse(cell.dataset.runs).map(([seed, value, folders]) => {
    const row = document.createElement('tr');
    row.insertCell().textContent = seed;
    row.insertCell().textContent = value;
    const places = row.insertCell();
    places.className = 'text';
    folders.forEach((folder, i) => {
      const link = document.createElement('a');
      link.href = '#' + folder;
      link.textContent = folder;
      link.addEventListener('click', () => { document.getElementById(folder).open = true; });
      if (i) places.append(', ');
      places.append(link);
    });
    return row;
  }));
}));
panel.querySelector('button').addEventListener('click', () => { panel.hidden = true; });
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(results: Results, figures: Sequence[tuple[str, Path]]) -> str:
    """The page. figures: (label, SVG file) of each curve."""
    e = html.escape
    study = results.study
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{e(study.spec.name)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{e(study.spec.name)}</h1>",
        *(f"<p>{e(text)}</p>" for text in intro(results)),
        "<p>A click on a heading sorts, a click on a number shows the runs that it comes from.</p>",
        *(f'<p class="note">{e(warning)}.</p>' for warning in results.warnings),
    ]
    if results.unfinished:
        items = "".join(f"<li>{e(r.name)}: {e(state_of(results, r))}</li>" for r in results.unfinished)
        parts.append(f'<div class="note">Not in the tables:<ul>{items}</ul></div>')
    for table in results.tables:
        parts.append(f"<h2>{e(table.setting)}</h2>")
        parts.append(_table(results, table, table.rows))
        for d in table.differences:
            parts.append(f"<h3>Differences from {e(d.label)}</h3>")
            parts.append(_table(results, table, d.rows, members=d.members))
    if figures:
        parts.append(f"<h2>Learning curves</h2><p>Each curve: {e(caption(results))}.</p>")
        for i, (label, path) in enumerate(figures):
            parts.append(
                f'<figure role="img" aria-label="{e(label)} over steps">{_inline_svg(path, f"f{i}-")}</figure>'
            )
    parts += ["<h2>What was compared</h2>"]
    for what, named in (("setting", study.spec.settings), ("variant", study.spec.variants)):
        rows = "".join(
            f'<tr><td>{e(name)}</td><td class="text">{e(overrides_text(keys))}</td></tr>'
            for name, keys in named.items()
        )
        parts.append(
            f'<div class="wide"><table><thead><tr><th>{what}</th><th class="text">overrides</th></tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    parts.append(f"<p>All runs: {e(overrides_text(study.spec.base))}.</p>")
    parts.append(f"<h2>Runs</h2><p>{e('Made with ' + versions(results) if results.data else 'None is complete')}.</p>")
    parts += [_run(results, run) for run in study.runs]
    parts.append(
        '<div id="runs-of" hidden><button type="button">Close</button><h3></h3><table><thead><tr><th>seed</th>'
        '<th>value</th><th class="text">run directories</th></tr></thead><tbody></tbody></table></div>'
    )
    parts.append(f"<script>{SCRIPT}</script></body></html>")
    return "\n".join(parts)


def _table(results: Results, table: Table, rows: Iterable[Row], members: Sequence[str] | None = None) -> str:
    e = html.escape
    heads = ["variant", "seeds", *(heading(label, c) for label, c in zip(table.labels, table.columns, strict=True))]
    titles = ["", "complete runs", *(c.key for c in table.columns)]
    head = "".join(
        f'<th title="{e(t)}"><button type="button">{e(h)}</button></th>' for h, t in zip(heads, titles, strict=True)
    )
    body = []
    for row in rows:
        cells = [
            f'<td data-value="{e(row.name)}">{e(row.name)}</td>',
            f'<td data-value="{len(row.seeds)}">{len(row.seeds)}</td>',
        ]
        for cell, column, label in zip(row.cells, table.columns, table.labels, strict=True):
            cells.append(_cell(results, table.setting, row, cell, column, label, members))
        body.append(('<tr class="before">' if row.measured else "<tr>") + "".join(cells) + "</tr>")
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(
    results: Results,
    setting: str,
    row: Row,
    cell: Cell,
    column: Column,
    label: str,
    members: Sequence[str] | None,
) -> str:
    e = html.escape
    if cell.mean is None:
        return '<td data-value="">–</td>'
    text = written(cell, column, len(row.seeds), difference=members is not None)
    mean, bracket, rest = text.partition(" [")
    shown = f'{e(mean)} <span class="interval">[{e(rest)}</span>' if bracket else e(text)
    shown = f'<span class="star">{shown}</span>' if members is not None and cell.excludes_zero else shown
    variants = [row.measured or row.name, *(members or ())]
    runs = [
        (
            seed,
            number(v, column, sign=members is not None),
            [f"runs/{setting}/{variant}/seed-{seed}" for variant in variants],
        )
        for seed, v in cell.values.items()
    ]
    title = "; ".join(f"seed {seed}: {v} ({', '.join(folders)})" for seed, v, folders in runs)
    where = f"{label}, {row.name}, {setting}" + (f": minus {' and '.join(members)}" if members else "")
    return (
        f'<td data-value="{cell.mean!r}" data-what="{e(where)} ({e(column.key)})" data-runs="{e(json.dumps(runs))}" '
        f'title="{e(title)}"><button type="button">{shown}</button></td>'
    )


def _run(results: Results, run: Run) -> str:
    e = html.escape
    folder = f"runs/{run.name}"
    data = results.data.get(run.name)
    state = "complete" if data else state_of(results, run)
    inside = [f'<p><a href="{e(quote(folder))}/">{e(folder)}</a>: {e(state)}</p>']
    if (run.directory(results.out) / "report.html").is_file():
        inside.append(f'<p><a href="{e(quote(folder))}/report.html">Its report: curves and trajectories</a></p>')
    if data:
        environment: dict[str, Any] = {k: v for k, v in data.environment.items() if k != "packages"}
        inside.append(f"<pre>{e(json.dumps(environment, indent=1))}</pre><pre>{e(data.config_text)}</pre>")
    return f'<details id="{e(folder)}"><summary>{e(run.name)}</summary>{"".join(inside)}</details>'


def _inline_svg(path: Path, prefix: str) -> str:
    """A figure's `svg` element with ids that no other figure of the page has."""
    text = path.read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid=")', rf"\1{prefix}", text)
    return re.sub(r'(href="#|url\(#)', rf"\1{prefix}", text)
