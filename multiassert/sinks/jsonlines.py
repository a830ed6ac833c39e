"""Violations as lines of JSON: one object a line, one system call a line, nothing kept back in a buffer.

Each object has `event`, `time` (UTC) and `pid`, and then:

- `event` is `violation`: all keys of `Violation.to_dict()`, always.
- `event` is `suppressed`: `count` more violations of that `kind` and `site` were not written, because there were more
  than `per_site` of them within a second; `site` is null where there were too many sites to tell them apart.
- `event` is `lost`: `count` lines before this one could not be written.

Any number of threads and processes of a machine may write to one path, since each line is appended at once. (NFS does
not append at once: use `{rank}` or `{pid}` in the path there.)
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import re
import stat
import sys
import threading
import time
from typing import Any, Protocol, TextIO

from multiassert import delivery, ranks
from multiassert.sites import Site
from multiassert.throttle import Throttle
from multiassert.violation import Violation, suppressed

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

PER_SITE, SECONDS = 2, 1.0  # so many violations of a site and a kind are written in so many seconds
MAX_BYTES = 64 * 2**20
NAMES = ("rank", "pid")  # that a path may have in braces
LOOKS_AT_THE_END, SECONDS_BETWEEN_LOOKS = 10, 0.002
LOOKS_FOR_THE_FILE = 3  # other processes may move it away in between


def write_to(
    path_or_file: str | os.PathLike[str] | TextIO, *, max_bytes: int | None = MAX_BYTES, per_site: int = PER_SITE
) -> JsonLines:
    """Append every violation to a file as a line of JSON from now on; touches no device, the host writes as it looks.

    In a path, `{rank}` and `{pid}` stand for those of the process that writes; several processes may share one. The
    file and its folders are made when the first violation comes. Before it exceeds `max_bytes` it is moved to the same
    name with `.1` behind it, in place of an older one, so both take no more than twice that; None sets no limit. Of a
    site and a kind at most `per_site` violations are written in a second, and then how many were not. A text file that
    is passed open is flushed after each line, and neither limited in size nor closed.

    A write that fails, because the disk is full say, is logged once and stops nothing. Returns the sink; its close()
    ends it. A path that is written to already returns its sink, as it is. Raises OSError where the path cannot be
    written to as things are, ValueError for an unknown name in braces and for limits below 1, TypeError for anything
    that is neither a path nor an open text file.
    """
    for name, limit in (("max_bytes", max_bytes), ("per_site", per_site)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}")
    if not isinstance(path_or_file, (str, os.PathLike)):
        return JsonLines(_OpenFile(path_or_file), per_site)
    path = os.path.abspath(os.fspath(path_or_file))
    with delivery.locked(), _opening:
        sink = _open.get(path)
        if sink is None:
            target = _Path(path, max_bytes)
            target.check()
            sink = _open[path] = JsonLines(target, per_site)
        return sink


class JsonLines(delivery.Observer):
    """A sink of lines of JSON, from when it is made until it is closed."""

    def __init__(self, target: _Target, per_site: int) -> None:
        self.target = target
        self._per_site = per_site
        self._closed = False
        self._start_anew()
        self._removals = [delivery.on_violation(self), delivery.observe(self)]

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a handler of a signal may drain in the middle of a write
        self._throttle: Throttle[tuple[Site, str]] = Throttle(self._per_site, SECONDS)
        self._lost = 0  # lines, since the last that was written
        self._has_failed = False

    def __call__(self, violation: Violation) -> None:
        """Write a violation, unless its site has written too many."""
        with self._locked():
            self._write_suppressed()
            if not self._closed and self._throttle.admits((violation.site, violation.kind)):
                self._write("violation", violation.to_dict())

    def step_ended(self) -> None:
        with self._locked():
            self._write_suppressed()

    def snapshot_sent(self) -> None:
        self.step_ended()

    def process_ends(self) -> None:
        with self._locked():
            self._finish()

    def close(self) -> None:
        """Write how many violations were suppressed until now, and end; touches no device. May be called again."""
        for remove in self._removals:
            remove()
        with self._locked():
            if not self._closed:
                self._finish()
                self._closed = True
        with delivery.locked(), _opening:
            for path in [path for path, sink in _open.items() if sink is self]:
                del _open[path]

    def _locked(self) -> contextlib.AbstractContextManager[bool]:
        if self._pid != os.getpid():
            # In a forked child: a thread that is not here may have the lock, the counts are for the parent to write,
            # and a lock on a file that both have open from before would keep neither out.
            self._start_anew()
            self.target.release()
        return self._lock

    def _finish(self) -> None:
        self._write_suppressed(all_of_them=True)
        if self._lost:
            logger.warning("%d lines were not written to %s", self._lost, self.target)
            self._lost = 0
        self.target.release()

    def _write_suppressed(self, all_of_them: bool = False) -> None:
        for site_and_kind, count in self._throttle.ended(all_of_them):
            site, kind = site_and_kind or (None, None)
            self._write("suppressed", suppressed(site, kind, count))

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        try:
            if self._lost:
                self.target.append(_line("lost", {"count": self._lost}))
                self._lost = 0
            self.target.append(_line(event, fields))
        except (OSError, ValueError) as error:  # ValueError: a file that its owner has closed
            self._lost += 1
            if not self._has_failed:
                self._has_failed = True
                logger.warning(
                    "violations cannot be written to %s: %s. It is tried again for each; this is logged once.",
                    self.target,
                    error,
                )


def _line(event: str, fields: dict[str, Any]) -> str:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"event": event, "time": now, "pid": os.getpid(), **fields}, allow_nan=False) + "\n"


_open: dict[str, JsonLines] = {}
_opening = threading.Lock()


# ---------------------------------------------------------------------------------------------------------------------
# Where lines go.


class _Target(Protocol):
    def append(self, line: str) -> None:
        """Write a line now; raises OSError or ValueError where it is not written."""

    def release(self) -> None:
        """Hold on to nothing that a later line does not take anew."""


class _OpenFile:
    """A text file of the caller's."""

    def __init__(self, file: TextIO) -> None:
        try:
            file.write("")
        except (AttributeError, TypeError):
            raise TypeError(
                f"path_or_file must be a path or an open text file, got {type(file).__name__}: open it with mode 'a'"
            ) from None
        self._file = file

    def __str__(self) -> str:
        return str(getattr(self._file, "name", self._file))

    def append(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()

    def release(self) -> None:
        pass


class _Path:
    """A file that is appended to by any number of processes, and moved away by one of them when it is full.

    The handlers of `logging` that do this keep the file open under its old name in all other processes.
    """

    def __init__(self, pattern: str, max_bytes: int | None) -> None:
        unknown = [name for name in re.findall(r"\{(\w*)\}", pattern) if name not in NAMES]
        if unknown:
            good = ", ".join(f"{{{name}}}" for name in NAMES)
            raise ValueError(f"{{{unknown[0]}}} in {pattern!r} stands for nothing. Good names: {good}.")
        self._pattern = pattern
        self._max_bytes = max_bytes
        self._path = ""
        self._descriptor: int | None = None
        self._ends_in_half_a_line = False

    def __str__(self) -> str:
        return self._pattern

    def _expanded(self) -> str:
        """The path of this process now: the rank is mostly known later than the path, and a fork changes the pid."""
        rank = ranks.own_rank() if "{rank}" in self._pattern else None
        path = self._pattern.replace("{rank}", "none" if rank is None else str(rank))
        return path.replace("{pid}", str(os.getpid()))

    def check(self) -> None:
        """Raise OSError where the file could not be made or written now; makes nothing."""
        path = self._expanded()
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        if path != self._expanded() and not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def append(self, line: str) -> None:
        data = line.encode("ascii")
        descriptor = self._ready_for(len(data) + 1)
        if self._ends_in_half_a_line:
            data = b"\n" + data
        written = os.write(descriptor, data)
        self._ends_in_half_a_line = written < len(data)
        if self._ends_in_half_a_line:
            raise OSError(errno.ENOSPC, "only a part of a line was written")

    def release(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _ready_for(self, size: int) -> int:
        """The descriptor of a file that is at the path, with room for so many bytes."""
        path = self._expanded()
        if path != self._path:
            self.release()
            self._path = path
        for _ in range(LOOKS_FOR_THE_FILE):
            descriptor = self._opened()
            if not self._is_moved(descriptor) and not (self._is_full(descriptor, size) and self._move_away(descriptor)):
                return descriptor
            self.release()
        return self._opened()

    def _opened(self) -> int:
        if self._descriptor is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            # Without waiting: nobody may read from a pipe.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
            self._descriptor = os.open(self._path, flags, 0o666)
            self._ends_in_half_a_line = self._is_cut_off(self._descriptor)
        return self._descriptor

    def _is_cut_off(self, descriptor: int) -> bool:
        """Whether the file's last line was written in part only, by this process or by an earlier one."""
        mine = os.fstat(descriptor)
        if not stat.S_ISREG(mine.st_mode) or not mine.st_size:
            return False
        # A line that another process is writing right now may be seen in part, too: that one is whole a moment later.
        for _ in range(LOOKS_AT_THE_END):
            try:
                with open(self._path, "rb") as file:
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) == b"\n":
                        return False
            except OSError:  # it may be written only
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True

    def _is_moved(self, descriptor: int) -> bool:
        """Whether the open file is at its path no more: another process has moved it, or logrotate has."""
        mine = os.fstat(descriptor)
        if not stat.S_ISREG(mine.st_mode):
            return False
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)

    def _is_full(self, descriptor: int, size: int) -> bool:
        now = os.fstat(descriptor)
        # A device or a pipe must never be moved away.
        return (
            self._max_bytes is not None
            and stat.S_ISREG(now.st_mode)
            and now.st_size > 0
            and now.st_size + size > self._max_bytes
        )

    def _move_away(self, descriptor: int) -> bool:
        """Make room at the path; returns False where another process is doing so right now."""
        if sys.platform == "win32":
            self.release()  # no file can be moved there while it is open
        else:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:
                pass  # a file system without locks: at worst two processes move it, and the older file is lost
            if self._is_moved(descriptor):
                return True
        os.replace(self._path, f"{self._path}.1")
        return True
