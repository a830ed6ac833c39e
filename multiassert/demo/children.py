"""The demo on several platforms: one child process for each, since a process can simulate one vendor only."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from multiassert.demo.summary import Played, Summary


def play_each(platforms: Sequence[str], tiny: bool) -> list[Played]:
    """Play the demo on each platform, one after the other; what they print goes to the screen."""
    played = []
    with tempfile.TemporaryDirectory() as folder:
        for platform in platforms:
            file = pathlib.Path(folder, f"{platform}.json")
            exit_code = subprocess.run(command(platform, tiny, file), check=False).returncode
            played.append(Played(platform, exit_code, Summary.read(file) if file.exists() else None))
    return played


def command(platform: str, tiny: bool, file: pathlib.Path) -> list[str]:
    """The command of the child that plays on `platform` and writes its summary to `file`."""
    options = ["--platform", platform, "--summary", str(file), *(["--tiny"] if tiny else [])]
    return [sys.executable, "-m", "multiassert", "demo", *options]
