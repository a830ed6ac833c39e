"""Child processes of a test: run something in one, and read what multiassert wrote in its output."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import pytest

from multiassert import simulate

LINE_START = "multiassert violation "


@dataclasses.dataclass(frozen=True)
class LoggedViolation:
    """A violation as a log line of mode warn tells it."""

    kind: str
    message: str
    site: str  # file:line:function
    platform: str
    device: str
    rank: int | None
    step: str  # a number, or first..last
    rows: tuple[int | range, ...]
    row_names: tuple[str, ...] | None
    value: str
    bound: str | None
    fields: Mapping[str, str] = dataclasses.field(repr=False)  # all of the line, as it is written there


def logged_violations(output: str) -> list[LoggedViolation]:
    """The violations that a process has logged, from its output; lines that are not multiassert's do not matter."""
    return [
        _logged_violation(line[line.index(LINE_START) + len(LINE_START) :])
        for line in output.splitlines()
        if LINE_START + "kind=" in line
    ]


def _logged_violation(text: str) -> LoggedViolation:
    fields = dict(_fields(text))
    names = fields["row_names"]
    return LoggedViolation(
        kind=fields["kind"],
        message=json.loads(fields["message"]),
        site=json.loads(fields["site"]),
        platform=fields["platform"],
        device=fields["device"],
        rank=None if fields["rank"] == "-" else int(fields["rank"]),
        step=fields["step"],
        rows=tuple(_rows(fields["rows"])),
        row_names=None if names == "-" else tuple(json.loads(names)),
        value=fields["value"],
        bound=None if fields["bound"] == "-" else fields["bound"],
        fields=types.MappingProxyType(fields),
    )


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """key=value after key=value; a value that starts like JSON is JSON, and may hold spaces."""
    decoder = json.JSONDecoder()
    while text:
        key, _, text = text.partition("=")
        if text[:1] in ('"', "["):
            _, end = decoder.raw_decode(text)
        else:
            end = len(text.split(" ", 1)[0])
        yield key, text[:end]
        text = text[end:].lstrip(" ")


def _rows(text: str) -> Iterator[int | range]:
    for part in text.split(","):
        first, _, last = part.partition("..")
        if last:
            yield range(int(first), int(last) + 1)
        elif first.isdigit():  # neither "-", which is no row, nor "+7", which are more than a line holds
            yield int(first)


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """How a child process ended, and what it wrote."""

    returncode: int  # negative where a signal ended it
    stdout: str
    stderr: str

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, such as signal.SIGABRT; None where it ended by itself."""
        return signal.Signals(-self.returncode) if self.returncode < 0 else None

    @property
    def violations(self) -> list[LoggedViolation]:
        """What it has logged, in mode warn."""
        return logged_violations(self.stdout + "\n" + self.stderr)


class RunInChildProcess(Protocol):
    """What the fixture run_in_child_process is."""

    def __call__(
        self,
        body: Callable[..., object] | str,
        *arguments: object,
        timeout: float = 120,
        env: Mapping[str, str | None] | None = None,
    ) -> ChildResult: ...


# Only what cannot be done after the imports: the parent's path is needed for them.
_START = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from multiassert import pytest_children
pytest_children.run_what_the_parent_sent()
"""


def run_in_child_process(
    body: Callable[..., object] | str,
    *arguments: object,
    timeout: float = 120,
    env: Mapping[str, str | None] | None = None,
) -> ChildResult:
    """Run a function at the top level of a module, or code, in a new Python process; see the fixture of that name.

    `env` adds to the environment; None takes a variable out. An exception in the child is its exit code 1 and a
    traceback on its stderr, as of any program.
    """
    __tracebackhide__ = True
    environment = {**os.environ, **(env or {})}
    sent = _to_send(body, arguments)
    child = subprocess.Popen(
        [sys.executable, "-c", _START],
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that what it starts can be ended with it
    )
    ended_in_time = True
    try:
        stdout, stderr = child.communicate(sent, timeout)
    except subprocess.TimeoutExpired:
        ended_in_time = False
        _kill(child)
        stdout, stderr = child.communicate()
    except BaseException:
        _kill(child)
        raise
    result = ChildResult(child.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
    if not ended_in_time:
        pytest.fail(
            f"the child process did not end within {timeout} seconds and was killed; its stdout:\n{result.stdout}\n"
            f"its stderr:\n{result.stderr}",
            pytrace=False,
        )
    return result


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()


def _to_send(body: Callable[..., object] | str, arguments: tuple[object, ...]) -> bytes:
    __tracebackhide__ = True
    simulator = simulate.installed()
    simulated = None if simulator is None else simulator.name
    if isinstance(body, str):
        module, file, to_call = None, None, pickle.dumps((textwrap.dedent(body), arguments))
    else:
        module = body.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        try:
            to_call = pickle.dumps((body, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{body!r} with its arguments cannot be sent to a child process: {error}. Pass a function at the top "
                "level of a module and arguments that can be pickled, or code as a string."
            ) from None
    return pickle.dumps(sys.path) + pickle.dumps((simulated, module, file, to_call))


def run_what_the_parent_sent() -> None:
    """In the child: set up what the parent has, and call."""
    _write_no_core_dump()
    simulated, module, file, to_call = pickle.load(sys.stdin.buffer)
    if simulated is not None:
        simulate.install(simulated)
    if module is not None:
        _import(module, file)
    body, arguments = pickle.loads(to_call)
    if isinstance(body, str):
        sys.argv[1:] = map(str, arguments)
        exec(compile(body, "<run_in_child_process>", "exec"), {"__name__": "__main__"})
    else:
        body(*arguments)


def _write_no_core_dump() -> None:
    try:
        import resource
    except ImportError:  # not on Windows, which writes none
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _import(name: str, file: str | None) -> None:
    """Import a test's module, by its file where pytest's import mode has given it a name that only pytest knows."""
    try:
        importlib.import_module(name)
    except ImportError:
        spec: Any = None if file is None else importlib.util.spec_from_file_location(name, file)
        if spec is None:
            raise
        parts = name.split(".")
        for end in range(1, len(parts)):  # pickle looks for the packages that the name tells of
            package = ".".join(parts[:end])
            sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
