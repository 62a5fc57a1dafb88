"""Value types of a configuration, each with its parser and its text form.

Sizes, durations and addresses carry their unit in their type: ``drain: 30s`` is ``config.drain.seconds`` in code. A new value
type needs one function and one row in ``KINDS``.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from handrail.durations import DURATION_RULE, UNITS_NS, TimeError, parse_duration_ns

_SIZE_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BINARY_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")


class Duration(int):
    """Nanoseconds, written ``500ms`` or ``30s``."""

    @property
    def ns(self) -> int:
        return int(self)

    @property
    def seconds(self) -> float:
        return self / 10**9

    def __str__(self) -> str:
        """Shortest exact text in one unit."""
        if not self:
            return "0s"
        unit = max(
            (unit for unit in ("ns", "us", "ms", "s", "m", "h", "d") if self % UNITS_NS[unit] == 0), key=UNITS_NS.__getitem__
        )
        return f"{self.ns // UNITS_NS[unit]}{unit}"


class Size(int):
    """Bytes, written ``64MiB``."""

    @property
    def bytes(self) -> int:
        return int(self)

    def __str__(self) -> str:
        """Shortest exact text in one unit."""
        unit = max(
            (unit for unit in ("B", "KiB", "MiB", "GiB", "TiB") if self % _SIZE_UNITS[unit] == 0), key=_SIZE_UNITS.__getitem__
        )
        return f"{self.bytes // _SIZE_UNITS[unit]}{unit}" if self else "0B"


@dataclass(frozen=True, slots=True)
class Address:
    """Address that a socket binds; with port 0 the system chooses the port."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach the address.

        Names other than ``localhost`` are not resolved, since their address may change.
        """
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Url(str):
    """Checked URL: ``scheme://host[:port][/path]``."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        return urlsplit(self).scheme

    @property
    def host(self) -> str:
        return urlsplit(self).hostname or ""

    @property
    def port(self) -> int:
        """Port of the URL, else its scheme's usual one (4317 for gRPC)."""
        return urlsplit(self).port or {"https": 443, "grpc": 4317, "grpcs": 4317}.get(self.scheme, 80)


class InvalidValueError(Exception):
    """Text that breaks the rule of its type; ``nearest`` is the probable intention."""

    def __init__(self, rule: str, nearest: str | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.nearest = nearest


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Known name most similar to ``name``, or None when none is similar.

    Case, ``-``, ``_`` and ``.`` do not count.
    """
    plain = {_plain(each): each for each in known}
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_").lstrip("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Metadata of a field: its description, and rules narrower than its type."""

    help: str
    example: str
    flag: str | None  # "--listen"; None: made from the path; "": only in the file
    secret: bool
    unset: str  # how the reference shows None: "off", "in memory"
    at_least: int | float | None
    at_most: int | float | None
    choices: tuple[str, ...]
    schemes: tuple[str, ...]
    path: bool


@dataclass(frozen=True, slots=True)
class ValueType:
    """Parser and text form of one type. ``parse`` raises ``InvalidValueError``."""

    name: str
    metavar: str
    parse: Callable[[str, Setting], Any]
    show: Callable[[Any], Any]


def _text(text: str, _: Setting) -> str:
    return text


def _whole(text: str, declared: Setting) -> int:
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        raise InvalidValueError("is not a whole number") from None
    return _within(value, declared)


def _number(text: str, declared: Setting) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidValueError("is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidValueError("is not a finite number")
    return _within(value, declared)


def _truth(text: str, _: Setting) -> bool:
    if text.lower() in ("true", "yes", "on"):
        return True
    if text.lower() in ("false", "no", "off"):
        return False
    raise InvalidValueError("must be true or false", nearest(text, ("true", "false")))


def _duration(text: str, declared: Setting) -> Duration:
    try:
        return _within(Duration(parse_duration_ns(text)), declared)
    except TimeError:
        raise InvalidValueError(f"is not a duration: write {DURATION_RULE}", f"{text}s" if text.isdigit() else None) from None


def _size(text: str, declared: Setting) -> Size:
    match = _SIZE.fullmatch(text.replace(" ", "").replace("_", ""))
    factor = match and {unit.lower(): size for unit, size in _SIZE_UNITS.items()}.get(match[2].lower())
    if not match or not factor:
        rule = "is not a size: write a number with a unit of B, KiB, MiB, GiB, TiB (or KB, MB, GB, TB), such as 64MiB"
        raise InvalidValueError(rule, f"{text}B" if text.isdigit() else None)
    return _within(Size(Fraction(match[1]) * factor), declared)


_Quantity = TypeVar("_Quantity", int, float, Duration, Size)


def _within(value: _Quantity, declared: Setting) -> _Quantity:
    if declared.at_least is not None and value < declared.at_least:
        raise InvalidValueError(f"must be at least {type(value)(declared.at_least)}")
    if declared.at_most is not None and value > declared.at_most:
        raise InvalidValueError(f"must be at most {type(value)(declared.at_most)}")
    return value


def _address(text: str, _: Setting) -> Address:
    host, _colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: which colon ends it is a guess
    if not host or not (port.isascii() and port.isdigit()) or any(c.isspace() or c in "/@[]" for c in host):
        bare = text.lstrip(":")
        raise InvalidValueError("is not HOST:PORT ([HOST]:PORT for IPv6)", f"127.0.0.1:{bare}" if bare.isdigit() else None)
    if int(port) > 65535:
        raise InvalidValueError(f"has port {port}; a port is 0 to 65535 (0: chosen by the system)")
    return Address(host, int(port))


def _url(text: str, declared: Setting) -> Url:
    return url(text, declared.schemes, path=declared.path)


def url(text: str, schemes: tuple[str, ...] = ("http", "https"), *, path: bool = True) -> Url:
    """URL in ``text``. Raises ``InvalidValueError``.

    ``path``: whether the URL may have one.
    """
    beginnings = " or ".join(f"{scheme}://" for scheme in schemes)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise InvalidValueError("is not a URL: its port is not a number" if "Port" in str(error) else "is not a URL") from None
    if parts.scheme not in schemes or "://" not in text:
        guess = f"{schemes[0]}://{text}" if "://" not in text and text and " " not in text else None
        raise InvalidValueError(f"must begin with {beginnings}", guess)
    if not parts.hostname or any(c.isspace() for c in text) or port == 0:
        raise InvalidValueError("has no host and port to connect to")
    if parts.username or parts.password:
        raise InvalidValueError("contains a user or password; Handrail logs URLs, so use a header instead")
    if parts.query or parts.fragment or (parts.path not in ("", "/") and not path):
        raise InvalidValueError("must have only a scheme, host and port" if not path else "must not have a query or a fragment")
    return Url(text if path else text.rstrip("/"))


def _path(text: str, _: Setting) -> Path:
    if "\0" in text:
        raise InvalidValueError("is not a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidValueError("names a home folder that does not exist") from None


def enum_kind(enum: type[Enum]) -> ValueType:
    def parse(text: str, declared: Setting) -> Enum:
        known = [str(member.value) for member in enum if not declared.choices or member.value in declared.choices]
        for member in enum:
            if member.value == text and text in known:
                return member
        raise InvalidValueError(f"must be one of {', '.join(known)}", nearest(text, known))

    return ValueType("one of", "|".join(str(member.value) for member in enum), parse, lambda value: value.value)


KINDS: Final[Mapping[type, ValueType]] = {
    str: ValueType("text", "TEXT", _text, str),
    int: ValueType("whole number", "N", _whole, int),
    float: ValueType("number", "X", _number, float),
    bool: ValueType("true or false", "BOOL", _truth, bool),
    Duration: ValueType("duration", "DURATION", _duration, str),
    Size: ValueType("size", "SIZE", _size, str),
    Address: ValueType("host:port", "HOST:PORT", _address, str),
    Url: ValueType("URL", "URL", _url, str),
    Path: ValueType("path", "PATH", _path, str),
}
