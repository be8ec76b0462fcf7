"""Learning curves: one figure a metric, a panel a setting; mean over seeds with a bootstrap band."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentropy.errors import UserError
from agentropy.study.results import LEVEL, Results
from agentropy.study.spec import Curve

Floats = npt.NDArray[np.float64]

# Okabe and Ito's palette, told apart by colour-blind readers; the yellow, pale on white, comes last. Line styles carry
# the same information in grey: no two of the first forty lines share both.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
PANELS_A_ROW = 3
RESAMPLES = 2000


def need_matplotlib(curves: Sequence[Curve]) -> None:
    """Raises UserError where curves are wanted and matplotlib is not installed."""
    if curves and importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need the package matplotlib: pip install 'agentropy[plots]', or set 'curves: []'")


def file_name(curve: Curve) -> str:
    """The figure's name without its ending."""
    over = "" if curve.over == "step" else f"-over-{curve.over}"
    return re.sub(r"[^A-Za-z0-9_+.-]+", "-", curve.metric) + over


def smooth(values: Floats, window: int) -> Floats:
    """[R, S] trailing means over `window` steps (fewer at the start); NaN where none of them has a value."""
    known = np.isfinite(values)
    total = np.cumsum(np.where(known, values, 0.0), axis=1)
    count = np.cumsum(known, axis=1).astype(np.float64)
    total[:, window:] -= total[:, :-window].copy()
    count[:, window:] -= count[:, :-window].copy()
    means: Floats = np.where(count > 0, total / np.maximum(count, 1.0), math.nan)
    return means


def band(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean over runs and its percentile bootstrap band, each [S], of values [R, S]; runs are resampled."""
    runs = len(values)
    drawn = np.random.default_rng(0).integers(0, runs, size=(RESAMPLES, runs))
    weights = np.zeros((RESAMPLES, runs))
    np.add.at(weights, (np.arange(RESAMPLES)[:, None], drawn), 1.0 / runs)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(weights @ values, [tail, 1 - tail], axis=0)
    return values.mean(axis=0), low, high


def lines(results: Results, curve: Curve, setting: str) -> list[tuple[str, Floats, Floats]]:
    """(variant, places [S], values [R, S]) for each variant with the metric; steps that a run lacks are left out.

    Over what was sampled, which differs between runs, each run is read off at the same places between its steps.
    """
    out = []
    runs = [r for r in results.study.runs if r.setting == setting and r.name in results.data]
    for variant in dict.fromkeys(r.variant for r in results.study.runs):
        data = [results.data[r.name].series for r in runs if r.variant == variant]
        length = min((len(d.get(curve.metric, ())) for d in data), default=0)
        if not length:
            continue
        values = np.array([list(d[curve.metric])[:length] for d in data], dtype=np.float64)
        # What is measured every few steps (a validation) is drawn as it is.
        sparse = float(np.isfinite(values).mean()) < 0.5
        values = values if sparse else smooth(values, results.study.spec.smooth)
        values *= 100 if curve.percent else 1
        whole = np.isfinite(values).all(axis=0)
        places = np.arange(1, length + 1, dtype=np.float64)[whole]
        values = values[:, whole]
        if curve.over != "step" and whole.any():
            steps = np.array([list(d.get(f"rollout/{curve.over}", ()))[:length] for d in data], dtype=np.float64)
            if steps.shape[1] < length:
                continue
            sampled = np.cumsum(np.nan_to_num(steps), axis=1)[:, whole]
            places = np.linspace(sampled[:, 0].max(), sampled[:, -1].min(), len(places))
            values = np.array([np.interp(places, at, v) for at, v in zip(sampled, values, strict=True)])
        if places.size:
            out.append((variant, places, values))
    return out


def caption(results: Results) -> str:
    """What the curves show, for all of them."""
    window = results.study.spec.smooth
    smoothing = f"trailing mean of {window} steps, " if window > 1 else ""
    return f"{smoothing}mean over the seeds of complete runs; band: {LEVEL:.0%} bootstrap interval over seeds"


def draw(results: Results, curve: Curve, folder: Path) -> Path | None:
    """Write `<metric>.svg` and `.png`; None where no run has the metric. The same results give the same bytes."""
    panels = [(t.setting, lines(results, curve, t.setting)) for t in results.tables]
    panels = [(setting, series) for setting, series in panels if series]
    if not panels:
        return None
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(r.variant for r in results.study.runs))
    columns = min(PANELS_A_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    legend_rows = math.ceil(len(variants) / 6)
    with rc_context({"svg.hashsalt": "agentropy", "font.family": "DejaVu Sans", "font.size": 9}):
        figure = Figure(figsize=(max(4.6 * columns, 6.4), 3.1 * rows + 0.25 * legend_rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=False).ravel()
        handles: dict[str, Any] = {}
        for axis, (setting, series) in zip(axes, panels, strict=False):
            for variant, places, values in series:
                i = variants.index(variant)
                mean, low, high = band(values)
                look = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[(i + i // len(COLOURS)) % len(STYLES)]}
                gaps = curve.over == "step" and places[0] + len(places) - 1 < places[-1]
                marker = "o" if gaps or len(places) == 1 else None
                (handle,) = axis.plot(places, mean, linewidth=1.4, marker=marker, markersize=3, **look)
                if len(values) > 1:
                    axis.fill_between(places, low, high, color=look["color"], alpha=0.15, linewidth=0)
                handles.setdefault(variant, handle)
            axis.set_title(setting if len(results.tables) > 1 else "")
            axis.set_xlabel("step" if curve.over == "step" else f"{curve.over} sampled")
            axis.grid(alpha=0.3, linewidth=0.5)
            axis.xaxis.get_major_locator().set_params(integer=True)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        k = str(results.study.runs[0].config.evaluation.samples)
        label = (curve.label or curve.metric).replace("{k}", k) + (" (%)" if curve.percent else "")
        for axis in axes[::columns]:
            axis.set_ylabel(label, parse_math=False)
        ordered = [v for v in variants if v in handles]
        figure.legend([handles[v] for v in ordered], ordered, loc="outside lower center", ncols=6, fontsize=8)
        folder.mkdir(parents=True, exist_ok=True)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        path = folder / f"{file_name(curve)}.svg"
        for ending, metadata in ((".png", {"Software": None}), (".svg", nothing)):
            partial = path.with_name(f".{path.stem}{ending}")
            figure.savefig(partial, dpi=144, metadata=metadata, format=ending[1:])
            partial.replace(path.with_suffix("").with_name(path.stem + ending))
    return path
