"""Sites: the places probes stand, each registered once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType

import torch

# Distinct messages that one call place may have, each its own site. Code that formats, say, the step number into the
# message goes past it; its later messages then share one site, and a record still carries the latest message.
MESSAGES_PER_PLACE = 256

Message = str | Callable[[], object]


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """The place a probe stands: its message and the caller's file, line and function. Equal only to itself.

    Compiled code keeps the site's cells as further attributes of it (see tracing.py), for this process alone.
    """

    message: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    def __deepcopy__(self, memo: object) -> Site:
        return self  # a copied layer stands at the same place

    def __reduce__(self) -> tuple[Callable[..., Site], tuple[str, str, int, str]]:
        return register, (self.message, self.file, self.line, self.function)


def site(message: str) -> Site:
    """Make a site beforehand, for code that many layers share; touches no device.

    Pass it as the `msg` of a probe: `self.site = site("layer 3: mlp")`, then `maybe_detect_nan(x, self.site)`. Its
    file, line and function are those of this call.
    """
    if not isinstance(message, str):
        raise TypeError(f"message must be a string, got {type(message).__name__}")
    frame = sys._getframe(1)
    return register(message, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def register(message: str, file: str, line: int, function: str, *, is_generated: bool = False) -> Site:
    """Make a site that compiled code may meet; `is_generated` where nobody wrote a probe, as in a watched model."""
    made = Site(message, file, line, function)
    if is_generated:
        _generated.add(made)
    _made_beforehand[next(_numbers)] = made
    for prepare in _new_site_listeners:
        prepare(made)
    return made


# By the order in which they were made, which is the order of layers, and so of causes.
_made_beforehand: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
_generated: weakref.WeakSet[Site] = weakref.WeakSet()
_numbers = itertools.count()
_new_site_listeners: list[Callable[[Site], None]] = []


def all_made_beforehand() -> list[Site]:
    """The sites made by `site()` that are still in use."""
    return [site for _, site in sorted(_made_beforehand.items())]


def is_generated(site: Site) -> bool:
    """Whether it stands where nobody wrote a probe."""
    return site in _generated


def on_new_site(listener: Callable[[Site], None]) -> None:
    """Call `listener` with every site that `site()` makes from now on."""
    _new_site_listeners.append(listener)


class _Place:
    """One call in the caller's source, with a site for each of its messages."""

    # The code object is kept so that its id, the key of the registry, is not given to another one.
    __slots__ = ("by_message", "code", "shared")

    def __init__(self, code: CodeType, line: int) -> None:
        self.code = code
        self.shared = Site("", code.co_filename, line, code.co_name)
        self.by_message: dict[str, Site] = {}


_places: dict[tuple[int, int], _Place] = {}
_lock = threading.Lock()


# Frames of these are not the caller's: our own calls, and torch's between compiled code and a probe outside the graph.
_OUR_FILES = {
    os.path.join(os.path.dirname(__file__), name)
    for name in ("dispatch.py", "probes.py", "pytest_plugin.py", "speculative.py", "tracing.py", "transforms.py")
}
_TORCH_FILES = os.path.dirname(torch.__file__) + os.sep


def leave_out(*files: str) -> None:
    """Frames of these files are not the caller's either: an engine's own probes that call ours."""
    _OUR_FILES.update(files)


def is_callers(file: str) -> bool:
    """Whether a frame of that file is the caller's."""
    return file not in _OUR_FILES and not file.startswith(_TORCH_FILES)


def _callers_place() -> _Place:
    """The place in the caller's source from which a probe was called."""
    frame = sys._getframe(4)  # below it: this, resolve, the one of dispatch, the public call
    while not is_callers(frame.f_code.co_filename):
        if frame.f_back is None:
            break
        frame = frame.f_back
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    place = _places.get(key)
    if place is None:
        with _lock:
            place = _places.setdefault(key, _Place(code, frame.f_lineno))
    return place


def require_message(message: object) -> None:
    """Raise TypeError for what can be no message."""
    if not isinstance(message, (str, Site)) and not callable(message):
        raise TypeError(f"msg must be a string, a callable or a Site, got {type(message).__name__}")


def resolve(message: Message | Site) -> tuple[Site, Message | None]:
    """The site of the probe that is being called, and the message of this call where the site has none of its own."""
    if isinstance(message, Site):
        return message, None
    place = _callers_place()
    if not isinstance(message, str):
        require_message(message)
        return place.shared, message
    found = place.by_message.get(message)
    if found is None:
        with _lock:
            if len(place.by_message) >= MESSAGES_PER_PLACE and message not in place.by_message:
                return place.shared, message
            shared = place.shared
            found = place.by_message.setdefault(message, Site(message, shared.file, shared.line, shared.function))
    return found, None


def text_of(site: Site, message: Message | None) -> str:
    """The message of a site for a report; this is where a callable message is called."""
    if message is None:
        return site.message
    if isinstance(message, str):
        return message
    try:
        return str(message())
    except Exception as error:
        return f"(the message callable raised {type(error).__name__}: {error})"
