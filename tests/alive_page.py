"""docs/alive.md, made from what the tests of all platforms recorded in one run."""

from __future__ import annotations

import pathlib

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "alive.md"

# What a test recorded under "alive", by row and platform.
Cells = dict[str, dict[str, str]]

COLUMNS = {
    "cpu": "CPU",
    "npu": "NPU, simulated",
    "musa": "MUSA, simulated",
    "generic": "no vendor, simulated",
}

TEXT = """# Does it still fire?

A probe that disappears under `torch.compile`, is recorded into nothing, or raises on one rank while the others wait, is
worse than none. Each cell is a test that ran: a clean pass that must be silent, a pass with a NaN that must be told
with its row and its step, and a clean pass again. This page is written by the test run itself
(`python -m tests.all_platforms --write`), and `make test` fails where it is not what the run saw.

- *yes*: the test passed on that platform.
- *no probe in it*: no report is expected there, and the test shows that nothing breaks.
- *by design*, *unknown*: there is no test, for the reason that follows.

{table}

Of CUDA, ROCm, XPU and MPS nothing is known yet: no cell of theirs was run. `python scripts/gpu_check.py` runs these
ways and more on one GPU in four minutes, and prints its own table.

## Counted in the same run

{numbers}

## What to know

- **Compiled code.** The probe is part of the graph: no break with `fullgraph=True`, fused into the kernel that makes
  its tensor, kept although nothing depends on it, switched by `configure` and `override` after compiling. Layers that
  share code take a `multiassert.site(...)` each and compile once; with a string that differs for each layer torch
  compiles anew each time and gives up at 8, and you are warned.
- **Captured graphs.** Call `multiassert.prewarm(device)` before a capture, since nothing can be allocated inside one.
  Warm up in `suspend()`. The report comes with the first `step()`, `poll()` or `drain()` after the bad replay; the
  replays themselves need no Python. Run the probed code once on the capture's stream before capturing, and the graph
  holds two kernels for a NaN probe instead of three.
- **Turning captured probes off.** `override("off")`, `configure("off")` and `suspend()` drop what captured probes see
  in the meantime, with no new capture and no host wait. Their kernels stay in the graph. A switch on the device that
  the graph reads could not take them out either: it would add a kernel to each probe, and a reduction whose result is
  not wanted costs as much as one whose is. To save the kernels too, capture inside `suspend()`.
- **Ranks.** `step(group=...)`: all ranks raise at the same call, two calls after the host of one has seen the
  violation. A rank that is silent is named in a `SilentRankError`.
- **Export, `torch.jit.trace`.** An exported program has no process whose state it could update, and `torch.jit`
  deletes asserts: both are without probes. Probe what calls them.
- **Fork.** A child of `fork` or `spawn` reports its own violations and none of its parent's, and ends with exit code 1
  in mode `raise`. No accelerator can be used in the child of a process that used it; that is the vendors' rule, not
  ours.
"""


def page(cells: Cells, numbers: dict[str, dict[str, str]]) -> str:
    """The page; rows and numbers in the order in which the tests stand in their files."""
    lines = [f"| | {' | '.join([*COLUMNS.values(), 'CUDA'])} |", f"|---|{'---|' * (len(COLUMNS) + 1)}"]
    lines += [
        f"| {row} | {' | '.join([*(cells[row].get(platform, '') for platform in COLUMNS), 'unknown'])} |"
        for row in cells
    ]
    counted = [
        f"- {what}: {', '.join(f'{COLUMNS[platform]} {value}' for platform, value in by_platform.items())}"
        for what, by_platform in numbers.items()
    ]
    return TEXT.format(table="\n".join(lines), numbers="\n".join(counted))
