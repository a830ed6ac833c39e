"""Probes in code compiled by torch: they break the graph, and fire as in eager code, with the caller's own line."""

from __future__ import annotations

import pytest
import torch

import multiassert


def forward(hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden * 2
    multiassert.maybe_detect_nan(hidden, "in compiled code")
    return hidden.relu()


@pytest.mark.parametrize("mode", ["auto", "trap", "raise", "warn"])
def test_a_probe_in_compiled_code_fires(mode: str, device: torch.device, traps: bool) -> None:
    if mode == "trap" and not traps:
        pytest.skip(f"trap is refused on {device.type}, as test_cases shows")
    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="aot_eager")
    clean = torch.zeros(4, 8)
    bad = clean.clone()
    bad[2] = float("nan")
    clean, bad = clean.to(device), bad.to(device)
    with multiassert.override("off"):
        compiled(bad)
    with multiassert.override(mode):
        compiled(clean)
        assert multiassert.drain() == []
        if mode == "warn":
            compiled(bad)
            (violation,) = multiassert.drain()
        elif mode == "trap":
            with pytest.raises(RuntimeError, match="NaN detected! in compiled code"):
                compiled(bad)
            return
        else:
            with pytest.raises(multiassert.AsyncAssertionError) as raised:
                compiled(bad), multiassert.drain()
            (violation,) = raised.value.violations
    assert (violation.rows, violation.site.file, violation.site.function) == ((2,), __file__, "forward")
    assert violation.site.line == forward.__code__.co_firstlineno + 2
