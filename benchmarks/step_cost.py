"""What `step` and `poll` cost the host, as there are more sites, more rows and larger tensors."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy
import torch

import multiassert
from benchmarks import contenders, timing
from benchmarks.table import Row, Spread, Table
from benchmarks.timing import Contender, Effort
from multiassert import delivery, glance

EXPLANATION = (
    "One `step` and one `poll` after every site was probed once, all clean, in mode raise on the CPU. The probes "
    "themselves are not in it. A clean call on the CPU leaves nothing to send. *All sent*: the first look at CPU "
    "tensors is turned off, so that every site is in the snapshot, as on any other device; the kernels of the "
    "snapshot, which another device would run, are then in the time too, and little with one row a site. With few "
    "sites it is all fixed cost; the table below tells what one more site adds."
)
FIT_EXPLANATION = (
    "Fitted to the table above: the slope of a straight line through the times (numpy.polyfit), and the exponent of "
    "the growth from the fewest sites to the most (1 is linear, 0 is flat)."
)
SITES, FEW_SITES = (10, 100, 1000), (10, 100)
ROWS, FEW_ROWS = (1, 256, 4096), (1, 256)
COLUMNS, FEW_COLUMNS = (16, 4096, 1_048_576), (16, 4096)


def contender(site_count: int, rows: int, columns: int) -> Contender:
    """One step with that many sites. It is timed once a turn, because the probes have to run before it again."""
    sites = [multiassert.site(f"layer {number}") for number in range(site_count)]
    tensor = torch.zeros(rows, columns)

    def probe_every_site() -> None:
        contenders.mode_deferred()
        for site in sites:
            multiassert.maybe_detect_nan(tensor, site)

    names = {"step": multiassert.step, "poll": multiassert.poll}
    return Contender("step", "step(); poll()", names, probe_every_site)


def time_of(site_count: int, rows: int, columns: int, effort: Effort) -> Spread:
    """Microseconds of a step and a poll, in a state that has these sites only."""
    delivery.start_anew()
    multiassert.step()  # from here on no probe sends by itself
    once_a_turn = timing.Effort(effort.quick, 4 * effort.rounds, effort.seconds_a_row, seconds_a_turn=0.0)
    race = timing.race([contender(site_count, rows, columns)], once_a_turn)
    delivery.start_anew()
    return Spread.of(numpy.multiply(race.seconds["step"], 1e6))


def measure(effort: Effort) -> list[Table]:
    """More sites for each number of rows, then larger tensors with the sites and rows as they are."""
    table = Table("step", "step and poll", EXPLANATION)
    fits = Table("step fit", "step and poll: growth", FIT_EXPLANATION)
    site_counts = FEW_SITES if effort.quick else SITES
    looks: dict[str, contextlib.AbstractContextManager[object]] = {
        "": contextlib.nullcontext(),
        "all sent": mock.patch.object(glance, "is_clean", return_value=False),
    }
    for sent, look in looks.items():
        with look:
            for rows in (FEW_ROWS if effort.quick else ROWS) if not sent else (1,):
                times = [time_of(count, rows, 16, effort) for count in site_counts]
                for count, spread in zip(site_counts, times, strict=True):
                    table.rows.append(_row(sent, count, rows, 16, spread))
                fits.rows.append(_fit(sent, rows, site_counts, [spread.median for spread in times]))
    for columns in FEW_COLUMNS if effort.quick else COLUMNS:
        table.rows.append(_row("", 100, 1, columns, time_of(100, 1, columns, effort)))
    return [table, fits]


def _row(sent: str, sites: int, rows: int, columns: int, spread: Spread) -> Row:
    each = Spread(*(value / sites for value in (spread.median, spread.low, spread.high)))
    what = {"": sent, "sites": f"{sites:,}", "rows": f"{rows:,}", "columns": f"{columns:,}"}
    return Row(what, {"us": spread, "us a site": each})


def _fit(sent: str, rows: int, site_counts: tuple[int, ...], medians: list[float]) -> Row:
    slope = numpy.polyfit(site_counts, medians, 1)[0]
    exponent = numpy.polyfit(numpy.log(site_counts), numpy.log(medians), 1)[0]
    values = {"us for one more site": slope, "growth exponent": exponent}
    what = {"": sent, "growing": "sites", "rows": f"{rows:,}"}
    return Row(what, {name: Spread.exactly(float(f"{value:.3g}")) for name, value in values.items()})
