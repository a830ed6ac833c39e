"""Tests of a child process, with unittest: it inherits the mode, and tells what it saw by its exit code or its log."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import unittest

from multiassert.pytest_plugin import logged_violations

WORKER = [sys.executable, str(pathlib.Path(__file__).with_name("worker.py"))]


class WorkerTest(unittest.TestCase):
    """One worker for all tests of the class."""

    worker: subprocess.Popen[str]

    @classmethod
    def setUpClass(cls) -> None:
        cls.worker = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.worker.communicate()
        assert cls.worker.returncode == 0, "a violation in mode raise ends the worker with exit code 1"

    def test_it_answers(self) -> None:
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        print(5, 6, file=self.worker.stdin, flush=True)
        assert self.worker.stdout.readline() == "5 6\n"


class FaultyRequestTest(unittest.TestCase):
    """In mode warn a worker lives on, and its log tells."""

    def test_the_log_names_the_row(self) -> None:
        environment = {**os.environ, "MULTIASSERT_CPU": "warn"}
        run = subprocess.run(WORKER, input="1 2 99\n", capture_output=True, text=True, env=environment, check=True)
        (violation,) = logged_violations(run.stderr)
        assert (violation.kind, violation.message, violation.rows) == ("high", "token ids", (2,))
