"""What `multiassert.watch` costs a model: off, on, and with a look at every operator.

python -m benchmarks.watch [--quick] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

import torch

import multiassert
from benchmarks import contenders, environment, report, timing
from benchmarks.table import Row, Spread, Table
from benchmarks.timing import Contender, Effort

TIMES = (
    "One forward pass of a Llama with random weights in float32 on the CPU, all clean, beside the same model without "
    "hooks: medians and quartiles of ratios within a round. `auto` looks in the call, `deferred` (mode raise) records "
    "and ends a step. Compiled: each layer by Inductor, all by the same code, hooks set before; `ops` makes compiled "
    "code run eagerly. Models this small do so little work that looking weighs more than it ever will."
)
COUNTS = (
    "What one forward pass adds on a simulated npu with the vendor's own list of operators, mode raise: kernels and "
    "copies, host waits, operators that fall back to the CPU. The model alone launches as many as the first row says."
)
SIMULATED = "npu"
VOCABULARY = 512
# Layers, width, rows and positions of the ids.
DECODE, PREFILL = (4, 128, 8, 1), (4, 512, 8, 64)


def model_of(layers: int, width: int) -> Any:
    """A Llama that nobody has trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)


def ids_of(rows: int, positions: int) -> torch.Tensor:
    """Token ids that are all inside."""
    return torch.arange(rows * positions).view(rows, positions) % VOCABULARY


def measure(effort: Effort) -> list[Table]:
    """Time and count."""
    return [times(effort), counts()]


def times(effort: Effort) -> Table:
    """Race a model without hooks and the same one with them."""
    table = Table("watch", "A watched forward pass, in time", TIMES)
    cases = [("decode, 8x1", "eager", DECODE), ("prefill, 8x64", "eager", PREFILL)]
    if not effort.quick:
        cases += [("decode, 8x1", "compiled", DECODE), ("prefill, 8x64", "compiled", PREFILL)]
    for name, how, (layers, width, rows, positions) in cases:
        race = timing.race(_contenders(layers, width, ids_of(rows, positions), how == "compiled"), effort)
        values = {f"{ours} / no hooks": race.ratio(ours, "no hooks") for ours in ("off", "auto", "deferred", "ops")}
        note = "; ".join(f"{who} cannot ({reason})" for who, reason in race.refusals.items())
        table.rows.append(Row({"pass": name, "how": how}, {**values, "us, no hooks": race.time("no hooks")}, note))
    return table


def _contenders(layers: int, width: int, ids: torch.Tensor, compiled: bool) -> list[Contender]:
    def racer(name: str, ops: bool | None, prepare: Any) -> Contender:
        model = model_of(layers, width)
        if ops is not None:
            multiassert.watch(model, ops=ops)
        if compiled and not ops:
            for layer in model.model.layers:
                layer.compile()
        return Contender(name, "model(ids)", {"model": model, "ids": ids}, prepare)

    found = [
        racer("no hooks", None, contenders.mode_off),
        racer("off", False, contenders.mode_off),
        racer("auto", False, contenders.mode_auto),
        racer("deferred", False, contenders.mode_deferred),
    ]
    return found if compiled else [*found, racer("ops", True, contenders.mode_auto)]


def counts() -> Table:
    """Count on the simulated device, in a process of its own, since a process has room for one."""
    table = Table("watch counts", "A watched forward pass, in kernels and waits", COUNTS)
    command = [sys.executable, "-m", "benchmarks.watch", "--count"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    alone = found["no hooks"]
    table.rows.append(_counted("no hooks", alone, [0, 0, 0]))
    table.rows += [_counted(name, counted, alone) for name, counted in found.items() if name != "no hooks"]
    return table


def _counted(name: str, counted: list[int], alone: list[int]) -> Row:
    columns = ("kernels added", "waits added", "fallbacks added")
    values: dict[str, Spread | None] = {
        column: Spread.exactly(of_all - of_model)
        for column, of_all, of_model in zip(columns, counted, alone, strict=True)
    }
    return Row({"watch": name}, values)


def count_on_simulated_device() -> None:
    """What the child process does: print kernels, waits and fallbacks of a forward pass as JSON."""
    from multiassert.demo import hardware

    device = hardware.set_up(SIMULATED)
    simulator = hardware.simulator_of(device)
    if simulator is None:
        raise RuntimeError(f"the {SIMULATED} device here is a real one, which counts nothing")
    layers, width, rows, positions = DECODE
    ids = ids_of(rows, positions).to(device)
    found: dict[str, list[int]] = {}
    for name, mode, ops in (
        ("no hooks", "off", None),
        ("off", "off", False),
        ("on", "raise", False),
        ("on, with a padding mask", "raise", False),
        ("ops", "raise", True),
    ):
        model = model_of(layers, width).to(device)
        given = {"attention_mask": torch.ones_like(ids)} if "mask" in name else {}
        alone = 0
        if given:  # what the mask costs the model itself is not ours
            with simulator.record() as ledger:
                model(ids, **given)
            alone = len(ledger.kernels) - found["no hooks"][0]
        if ops is not None:
            multiassert.watch(model, ops=ops)
        with multiassert.override(mode):
            model(ids, **given)
            simulator.run_all()
            multiassert.drain()
            with simulator.record() as ledger:
                model(ids, **given)
            found[name] = [len(ledger.kernels) - alone, len(ledger.waits), len(ledger.fallbacks)]
            simulator.run_all()
            multiassert.drain()
    print(json.dumps(found))


def main() -> None:
    """Measure, print, and write a page if asked for one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing compiled: shows that it works")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the tables")
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.count:
        count_on_simulated_device()
        return
    torch.set_num_threads(1)
    tables = measure(timing.QUICK if given.quick else timing.FULL)
    report.show(tables)
    if given.markdown:
        command = " ".join(["python -m benchmarks.watch", *sys.argv[1:]])
        report.write_markdown(given.markdown, tables, environment.describe(), command, {}, "What watch costs", "")


if __name__ == "__main__":
    main()
