"""What a probe that is off costs, beside SGLang's and beside an empty function: `python -m benchmarks.off_path`."""

from __future__ import annotations

import torch

import multiassert
from benchmarks import contenders, report, timing
from benchmarks.contenders import VOCABULARY
from benchmarks.table import Row, Table
from benchmarks.timing import Contender, Effort

EXPLANATION = (
    "A probe that is off looks at one variable of a module; SGLang's looks its variables up in the environment. The "
    "time of the loop and of passing the arguments is in all columns."
)

# Each call without its module, so that looking the name up costs the same for all.
CALLS = {
    "maybe_detect_nan": "(x, 'logits')",
    "maybe_detect_inf": "(x, 'hidden')",
    "maybe_detect_oob": f"(x, 0, {VOCABULARY}, 'ids')",
    "maybe_detect_page_aligned": "(x, 64, 'slots')",
    "maybe_detect_in_closed_range": "(x, 0.0, 1.0, 'confidence')",
    "maybe_assert_async": "(x, 'condition')",
    "maybe_assert_sum": "(x, 1, 'lengths')",
    "maybe_warn_nan": "(x, 'logits')",
}


def empty(tensor: object, first: object = None, second: object = None, third: object = None) -> None:
    """Do nothing, as a call whose body was taken out."""


def measure(effort: Effort) -> Table:
    """Time every probe with everything off."""
    table = Table("off", "Probes that are off", EXPLANATION)
    sglang = contenders.sglang_async_probe()
    for name, arguments in CALLS.items():
        statement = f"call{arguments}"
        x = torch.zeros(4)
        racers = [
            Contender("off", statement, {"call": getattr(multiassert, name), "x": x}, contenders.mode_off),
            Contender("empty", statement, {"call": empty, "x": x}),
        ]
        if sglang is not None:
            call = getattr(sglang, name)
            racers.append(Contender("SGLang off", statement, {"call": call, "x": x}, contenders.close_sglang_gate))
        race = timing.race(racers, effort)
        nanoseconds = {f"ns, {racer.name}": race.time(racer.name, 1e9) for racer in racers}
        ratios = {f"off / {theirs}": race.ratio("off", theirs) for theirs in ("SGLang off", "empty")}
        table.rows.append(Row({"probe": name}, {**ratios, **nanoseconds}))
    return table


if __name__ == "__main__":
    report.show([measure(timing.FULL)])
