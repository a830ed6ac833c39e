"""What the numbers have to be. A missed target is told, and fails nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from benchmarks.table import Row, Table


@dataclasses.dataclass(frozen=True)
class Target:
    """A limit on one value of the rows of one table whose words match."""

    says: str
    table: str
    value: str
    at_most: float
    only: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)

    def concerns(self, table: Table, row: Row) -> bool:
        """Whether the row has a value that this target limits."""
        return (
            table.key == self.table
            and row.values.get(self.value) is not None
            and all(row.what.get(name) in allowed for name, allowed in self.only.items())
        )

    def excess(self, row: Row) -> float:
        """How far the median is above the limit; not above 0 where the target is met."""
        value = row.values[self.value]
        return 0.0 if value is None else value.median - self.at_most

    def is_met(self, row: Row) -> bool:
        """Whether the median is inside the limit."""
        return self.excess(row) <= 0


LARGE_FLOAT_LOGITS = {
    "probe": ["nan"],
    "shape": ["64x151936", "64x151936, half -inf"],
    "dtype": ["float32", "bfloat16"],
}
BOUNDS = {"probe": ["out of bounds"]}
PAGES = {"probe": ["page aligned, 64", "page aligned, 48"]}

WATCHED = {"watch": ["off", "on", "on, with a padding mask", "ops"]}

TARGETS = [
    Target("off: at most 1/20 of SGLang's", "off", "off / SGLang off", 0.05),
    Target("NaN in large logits: at most 1/5 of SGLang's", "probes", "auto / SGLang", 0.2, LARGE_FLOAT_LOGITS),
    Target("NaN in large logits: 80 % of the speed of reading", "probes", "auto / limit", 1.25, LARGE_FLOAT_LOGITS),
    Target("out of bounds: at most half of SGLang's", "probes", "auto / SGLang", 0.5, BOUNDS),
    Target("page alignment: at most 0.6 of SGLang's", "probes", "auto / SGLang", 0.6, PAGES),
    Target("nothing slower than SGLang, in auto", "probes", "auto / SGLang", 1.0),
    Target("nothing slower than SGLang, deferred", "probes", "deferred / SGLang", 1.0),
    Target("never more kernels than SGLang launches", "kernels", "ours / SGLang", 1.0),
    Target("no host waits", "kernels", "our waits", 0.0),
    Target("no operator falls back to the CPU", "kernels", "our fallbacks", 0.0),
    Target("step and poll: under 1 us a site, of 1,000", "step", "us a site", 1.0, {"sites": ["1,000"]}),
    Target("step and poll: at most linear in the sites", "step fit", "growth exponent", 1.0),
    Target("step and poll: under 1 us for one more site", "step fit", "us for one more site", 1.0),
    Target("decode: probes that are off cost nothing", "decode", "off / no probes", 1.05),
    Target("decode: cheaper than SGLang's probes, in auto", "decode", "auto / SGLang", 1.0),
    Target("decode: cheaper than SGLang's probes, deferred", "decode", "deferred / SGLang", 1.0),
    Target("watched: no host waits", "watch counts", "waits added", 0.0, WATCHED),
]


def missed(table: Table, row: Row) -> list[Target]:
    """The targets that this row misses."""
    return [target for target in TARGETS if target.concerns(table, row) and not target.is_met(row)]


def verdicts(tables: Iterable[Table]) -> Iterator[tuple[Target, int, list[Row]]]:
    """Each target that concerns some row, with how many it concerns and which of them miss it."""
    tables = list(tables)
    for target in TARGETS:
        rows = [row for table in tables for row in table.rows if target.concerns(table, row)]
        if rows:
            yield target, len(rows), [row for row in rows if not target.is_met(row)]
