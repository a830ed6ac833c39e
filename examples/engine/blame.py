"""From a record of multiassert to the requests that it is about."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler import Batch

from multiassert import Violation

# The messages of the engine's probes.
LOGITS = "engine: logits"
SAMPLED_IDS = "engine: sampled ids"
READ_SLOTS = "engine: slots to read"
PAGE_STARTS = "engine: first slot of each page"
WRITE_SLOTS = "engine: slots to write"

A_ROW_FOR_EACH_REQUEST = (LOGITS, SAMPLED_IDS, READ_SLOTS, PAGE_STARTS)
A_ROW_FOR_EACH_TOKEN = (WRITE_SLOTS,)


def requests_of(violation: Violation, batches: Mapping[int, Batch]) -> list[list[str]]:
    """The requests whose rows `violation` tells, by name; `batches` are those of the steps that it may be about.

    There is a list for each bad row. It has one name, or several of which one or more had the bad value: of a tensor of
    more than 256 rows, neighbours share what the device remembers.

    The record comes late. Its rows are those of the batch of its own step, and in the batch that runs by now they are
    other requests'; multiassert keeps the names that `step(rows=...)` gave, for exactly that.
    """
    is_folded = any(isinstance(row, range) for row in violation.rows)
    if violation.message in A_ROW_FOR_EACH_REQUEST and violation.row_names and not is_folded:
        return [[str(name)] for name in violation.row_names]
    # `step(rows=...)` names one kind of rows. What has a row for each token is looked up here; and so is a record
    # without names, because it arrived before its step had ended (a probe sends what it saw where a step takes seconds,
    # and so does a poll() within a step), or because it covers several steps.
    of_steps = [batches[step] for step in steps_of(violation) if step in batches]
    if violation.message in A_ROW_FOR_EACH_REQUEST:
        owners = [batch.names for batch in of_steps]
    elif violation.message in A_ROW_FOR_EACH_TOKEN:
        owners = [batch.token_owners for batch in of_steps]
    else:  # a probe that this engine knows nothing of, in the model, say: it may be anybody's
        return [list(dict.fromkeys(name for batch in of_steps for name in batch.names))]
    return [list(dict.fromkeys(name for names in owners for name in _at(row, names))) for row in violation.rows]


def steps_of(violation: Violation) -> range:
    """The steps that a record covers: nearly always one."""
    first, last = (violation.step,) * 2 if isinstance(violation.step, int) else violation.step
    return range(first, last + 1)


def _at(row: int | range, names: list[str]) -> list[str]:
    """Whose a row is, or each row of a range; nobody's if it is padding."""
    return names[row.start : row.stop] if isinstance(row, range) else names[row : row + 1]
