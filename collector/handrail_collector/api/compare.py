"""Answer ``GET /api/v1/compare``.

It parses the query string into arms and objectives, and encodes the answer as JSON. Pure except for reading the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from handrail.durations import DURATION_RULE, PERIOD_RULE, parse_duration_ns, parse_period
from handrail_collector.api.errors import ApiError, nearest
from handrail_collector.compare.comparison import Arm, CompareError, compare
from handrail_collector.compare.formatting import period
from handrail_collector.compare.load import StorePeriod
from handrail_collector.compare.report import ITL_OF, SloTargets, to_plain
from handrail_collector.store.filters import SCOPES

_WHERE: Final = "query string"
_ARMS: Final = "abc"
_NAMED: Final = re.compile(r"([A-Za-z][\w-]*)=(.+)", re.DOTALL)
_ARM_RULE: Final = f"[NAME=]PERIOD[,PERIOD], a PERIOD being {PERIOD_RULE}"

Question = tuple[tuple[Arm, ...], SloTargets, str | None, str | None]
"""Arms, objectives, scope and model."""


def parse_compare(pairs: Iterable[tuple[str, str]], root: Path, now_unix_ns: int) -> Question:
    """Parse what to compare in the store at ``root``.

    Raises ``ApiError`` (400) for the first parameter that is wrong.
    """
    given: dict[str, str] = {}
    for name, text in pairs:
        if name not in COMPARE_PARAMETERS:
            known = tuple(COMPARE_PARAMETERS)
            raise _wrong(f"unknown parameter {name!r}", ", ".join(known), nearest(name, known))
        if name in given:
            raise _wrong(f"{name}: given twice", "one value")
        given[name] = text
    if missing := [name for name in "ab" if name not in given]:
        raise _wrong(f"{' and '.join(missing)}: missing", f"a and b, perhaps c, each {_ARM_RULE}")
    read = {name: _read(name, text, now_unix_ns) for name, text in given.items()}
    typed = [read[name] for name in _ARMS if name in given]
    names = [name or letter.upper() for (name, _), letter in zip(typed, _ARMS, strict=False)]
    if len(set(names)) < len(names):
        raise _wrong(f"two arms have the same name: {', '.join(names)}", "names that differ")
    arms = tuple(
        Arm(
            name=name,
            stretches=tuple(
                StorePeriod(root=root, where=period(since, until), since_unix_ns=since, until_unix_ns=until)
                for since, until in periods
            ),
            gpus=_gpus_of(name, read.get("gpus", {})),
        )
        for name, (_, periods) in zip(names, typed, strict=True)
    )
    return arms, _objectives(read), given.get("scope"), given.get("model")


def answer(question: Question) -> tuple[int, dict[str, Any]]:
    """Return status and body; blocks while it reads the store.

    Raises ``ApiError`` and ``StoreDamagedError``.
    """
    arms, objectives, scope, model = question
    try:
        return 200, to_plain(compare(arms, objectives, scope=scope, model=model))
    except CompareError as error:
        raise ApiError(status=404, what=error.what, where=error.where, valid=error.valid) from None


def _objectives(read: Mapping[str, Any]) -> SloTargets:
    fields = {
        "ttft": "ttft_ns",
        "itl": "itl_ns",
        "ttft_ns": "ttft_ns",
        "itl_ns": "itl_ns",
        "itl_of": "itl_of",
        "attain": "attain",
    }
    objectives = SloTargets(**{field: read[name] for name, field in fields.items() if name in read})
    if problems := objectives.validate():
        raise _wrong("; ".join(problems), "objectives that a request can meet")
    return objectives


def _gpus_of(name: str, gpus: Mapping[str, int]) -> int:
    return gpus.get(name, gpus.get("", 0))


def _read(name: str, text: str, now_unix_ns: int) -> Any:
    read, valid, words = COMPARE_PARAMETERS[name]
    try:
        return read(text, now_unix_ns)
    except ValueError as error:
        what = str(error) if name in _ARMS else f"{name}: {text!r} is not valid"
        raise _wrong(what, valid, nearest(text, words)) from None


def _wrong(what: str, valid: str, near: tuple[str, ...] = ()) -> ApiError:
    return ApiError(status=400, what=what, where=_WHERE, valid=valid, nearest=near)


def _arm(text: str, now_unix_ns: int) -> tuple[str, list[tuple[int, int]]]:
    match = _NAMED.fullmatch(text)
    name, periods = (match[1], match[2]) if match else ("", text)
    return name, [parse_period(each, now_unix_ns) for each in periods.split(",")]


def _gpus(text: str, _: int) -> dict[str, int]:
    found = {}
    for each in text.split(","):
        name, _separator, number = each.rpartition("=")
        if not number.isascii() or not number.isdigit() or not int(number):
            raise ValueError(text)
        found[name] = int(number)
    return found


def _word(words: tuple[str, ...]) -> Callable[[str, int], str]:
    def read(text: str, _: int) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return read


def _nanoseconds(text: str, _: int) -> int:
    return int(text)


def _duration(text: str, _: int) -> int:
    return parse_duration_ns(text)


Reading = tuple[Callable[[str, int], Any], str, tuple[str, ...]]
"""Reader of a parameter, what is valid, and the known words.

The reader raises ``ValueError`` for a wrong text.
"""

COMPARE_PARAMETERS: dict[str, Reading] = {
    "a": (_arm, _ARM_RULE, ()),
    "b": (_arm, _ARM_RULE, ()),
    "c": (_arm, _ARM_RULE, ()),
    "ttft": (_duration, DURATION_RULE, ()),
    "itl": (_duration, DURATION_RULE, ()),
    "ttft_ns": (_nanoseconds, "an integer of nanoseconds", ()),
    "itl_ns": (_nanoseconds, "an integer of nanoseconds", ()),
    "itl_of": (_word(ITL_OF), ", ".join(ITL_OF), ITL_OF),
    "attain": (lambda text, _: float(text), "a share between 0 and 1, such as 0.9", ()),
    "gpus": (_gpus, "a number of GPUs, for all arms or as NAME=N, with commas between", ()),
    "scope": (_word(SCOPES), ", ".join(SCOPES), SCOPES),
    "model": (lambda text, _: text, "a model's name", ()),
}
"""Every parameter."""
