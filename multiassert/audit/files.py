"""From paths to the text of Python files."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import io
import os
import pathlib
import stat
import tokenize
import warnings
from collections.abc import Iterator, Sequence

from multiassert.audit.module import Module

LEFT_OUT = ("__pycache__", "node_modules", "site-packages")
"""Folders that are never searched, besides those whose names begin with a dot."""
TESTS = ("test", "tests", "test_*.py", "*_test.py", "conftest.py")


class UnreadableError(Exception):
    """A file or folder cannot be read; the text says why."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A file to read, or what cannot be searched."""

    path: pathlib.Path
    folders: tuple[str, ...] = ()
    """The folders in which it lies, from the one that was searched."""
    error: UnreadableError | None = None


def search(paths: Sequence[pathlib.Path], exclude: Sequence[str], with_tests: bool) -> Iterator[Source]:
    """Each Python file once: those named, and those in the folders named."""
    seen: set[str] = set()
    patterns = (*exclude, *(() if with_tests else TESTS))
    for path in paths:
        for source in _in_folder(path, patterns) if os.path.isdir(path) else iter([Source(path)]):
            real = os.path.realpath(source.path)
            if real not in seen:
                seen.add(real)
                yield source


def _in_folder(folder: pathlib.Path, patterns: Sequence[str]) -> Iterator[Source]:
    errors: list[OSError] = []
    for inside, folders, files in os.walk(folder, onerror=errors.append):
        here = pathlib.Path(inside)
        relative = here.relative_to(folder)
        wanted = [name for name in folders if not name.startswith(".") and name not in LEFT_OUT]
        folders[:] = sorted(name for name in wanted if not _matches(relative / name, patterns))
        for name in sorted(files):
            if name.endswith((".py", ".pyi")) and not _matches(relative / name, patterns):
                yield Source(here / name, relative.parts)
    for error in errors:
        reason = UnreadableError(error.strerror or str(error))
        yield Source(pathlib.Path(str(error.filename)), error=reason)


def _matches(path: pathlib.Path, patterns: Sequence[str]) -> bool:
    """Whether a pattern is that of the path, from the folder that is searched, or of its last part."""
    return any(fnmatch.fnmatch(path.as_posix(), pattern) or fnmatch.fnmatch(path.name, pattern) for pattern in patterns)


def parse(path: pathlib.Path, folders: tuple[str, ...] = ()) -> Module:
    """Read a file and its tree; raises UnreadableError. `folders` are those of its Source."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnreadableError("it is no regular file")
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        # Lines end where Python says, and not at a form feed.
        text = io.StringIO(data.decode(encoding), newline=None).read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the code that is read, such as a bad escape in a string
            return Module(shown(path), text, ast.parse(text), folders)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not in {error.encoding}: byte {error.start} is none of a character") from error
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise UnreadableError(f"{where}{error.msg}") from error
    except (MemoryError, RecursionError) as error:
        raise UnreadableError("its code is nested too deeply") from error
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from error
    except (LookupError, ValueError) as error:
        raise UnreadableError(str(error)) from error


def shown(path: pathlib.Path) -> str:
    """The path as text that can be printed, with slashes."""
    return os.fsencode(path.as_posix()).decode("utf-8", "replace")
