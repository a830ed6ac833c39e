"""The rules: what keeps code from being covered, why that matters and where, and what to use instead."""

from __future__ import annotations

from multiassert.audit import cuda_gates, device_asserts, host_checks, retired, unfilled
from multiassert.audit.finding import Rule

UNREADABLE = Rule(
    name="unreadable",
    title="a file that could not be read",
    why="What is in it was not looked at.",
    instead="a file in UTF-8, or in the encoding that it declares, that this Python can parse",
    level="warning",
)

RULES = (
    Rule(
        name="assert-without-message",
        title="torch._assert_async without a message",
        why="torch.compile deletes it on every platform, so that it never fires in compiled code. In eager code the "
        "host waits for it at every call on Ascend NPU and Moore Threads MUSA, and on CUDA it ends the process without "
        "a word.",
        instead="maybe_assert_async(condition, msg), or the probe of that condition",
        level="error",
        words=device_asserts.WORDS,
        find=device_asserts.without_message,
    ),
    Rule(
        name="direct-assert",
        title="torch._assert_async with a message",
        why="On Ascend NPU it has no kernel: a hidden fallback to the CPU, for which the host waits at every call. On "
        "Moore Threads MUSA it calls .item(), which waits too; both are illegal in a captured graph. On ROCm it does "
        "nothing up to torch 2.7, and as a rule aborts without the message later. On CUDA it ends the process.",
        instead="maybe_assert_async(condition, msg), or the probe of that condition",
        level="warning",
        words=device_asserts.WORDS,
        find=device_asserts.with_message,
    ),
    Rule(
        name="host-check",
        title="a check for which the host waits",
        why="The host stops until the device has computed the answer, at every call and on every platform but CPU. "
        "While a graph is captured it is illegal, and when one is replayed it is not run.",
        instead="maybe_detect_nan(tensor, msg), maybe_detect_inf, maybe_detect_oob or maybe_assert_async; "
        "sanitize_nan_logits where the values are healed",
        level="warning",
        words=host_checks.WORDS,
        find=host_checks.host_checks,
    ),
    Rule(
        name="cuda-gate",
        title="a probe on CUDA only",
        why="On Ascend NPU, Moore Threads MUSA, XPU, MPS and CPU the probe never runs, and nothing tells so. With a "
        "shim such as torchada or transfer_to_npu the condition does not even tell what the device is.",
        instead="the probe without the condition: multiassert goes by the device of the tensor",
        level="warning",
        words=cuda_gates.WORDS,
        find=cuda_gates.cuda_gates,
    ),
    Rule(
        name="unfilled-index",
        title="an index tensor that is allocated and not filled before its use",
        why="On every platform it holds what was in memory before: at times a good index, at times one that crashes "
        "the device or overwrites another slot. A probe of it passes or fails by chance.",
        instead="torch.zeros_like(...) or torch.zeros(...), and maybe_detect_oob(indices, low, high, msg) before "
        "its use",
        level="error",
        words=unfilled.WORDS,
        find=unfilled.unfilled_indices,
    ),
    Rule(
        name="retired-setting",
        title="a setting that SGLang has retired",
        why="SGLang ignores it by now, on every platform: who sets it thinks that probes are on. multiassert still "
        "honours it, with a warning.",
        instead=retired.INSTEAD,
        level="warning",
        words=retired.WORDS,
        find=retired.retired_settings,
    ),
    UNREADABLE,
)
BY_NAME = {rule.name: rule for rule in RULES}
