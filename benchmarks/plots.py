"""Two pictures: what a probe costs as its tensor grows, and what a step costs as sites are added."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.probes import PLAIN_SHAPES
from benchmarks.table import Row, Spread, Table

PICTURED = {
    ("nan", "float32"): "NaN, float32",
    ("nan", "bfloat16"): "NaN, bfloat16",
    ("out of bounds", "int64"): "out of bounds, int64",
    ("page aligned, 64", "int64"): "page aligned, int64",
}
CURVES = {"us": "auto", "us, deferred": "deferred", "us, SGLang": "SGLang", "us, plain": "plain", "us, limit": "limit"}


def draw(folder: pathlib.Path, tables: Sequence[Table]) -> dict[str, pathlib.Path]:
    """Write the pictures that there are numbers for; returns the files by what they show."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 8, "savefig.dpi": 110})
    folder.mkdir(parents=True, exist_ok=True)
    by_key = {table.key: table for table in tables}
    drawn = {}
    if "probes" in by_key:
        drawn["Cost against size"] = _cost_against_size(by_key["probes"], folder / "cost-against-size.png")
    if "step" in by_key:
        drawn["Cost of step and poll"] = _cost_against_sites(by_key["step"], folder / "cost-against-sites.png")
    return drawn


def _cost_against_size(table: Table, file: pathlib.Path) -> pathlib.Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PICTURED), figsize=(11, 2.8), layout="constrained", sharey=True)
    for axis, ((probe, dtype), title) in zip(axes, PICTURED.items(), strict=True):
        rows = [row for row in table.rows if (row.what["probe"], row.what["dtype"]) == (probe, dtype)]
        rows = [row for row in rows if row.what["shape"] in PLAIN_SHAPES and row.what["shape"] != "65536x152"]
        for column, label in CURVES.items():
            _curve(axis, [(math.prod(PLAIN_SHAPES[row.what["shape"]]), row.values[column]) for row in rows], label)
        axis.set(title=title, xlabel="elements", xscale="log", yscale="log")
    axes[0].set(ylabel="us a call")
    axes[0].legend()
    return _save(figure, file)


def _cost_against_sites(table: Table, file: pathlib.Path) -> pathlib.Path:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(4, 2.8), layout="constrained")
    by_rows: dict[str, list[Row]] = {}
    for row in table.rows:
        if row.what["columns"] == "16":
            by_rows.setdefault(row.what["rows"], []).append(row)
    for rows, lines in by_rows.items():
        points = {int(row.what["sites"].replace(",", "")): row.values["us"] for row in lines}
        _curve(axis, sorted(points.items()), f"{rows} rows")
    axis.set(xlabel="sites", ylabel="us, step and poll", xscale="log", yscale="log")
    axis.legend()
    return _save(figure, file)


def _curve(axis: Any, points: Sequence[tuple[int, Spread | None]], label: str) -> None:
    there = [(size, spread) for size, spread in points if spread is not None]
    if there:
        sizes, spreads = zip(*there, strict=True)
        axis.plot(sizes, [spread.median for spread in spreads], marker=".", label=label)
        axis.fill_between(sizes, [spread.low for spread in spreads], [spread.high for spread in spreads], alpha=0.2)


def _save(figure: Any, file: pathlib.Path) -> pathlib.Path:
    figure.savefig(file)
    return file
