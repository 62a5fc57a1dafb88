"""The reader of literals: what it accepts and what it refuses."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail_sidecar.engine_logs.literal import NotALiteralError, flat_dict


def test_scalars_are_read_and_nested_values_skipped() -> None:
    text = "{'a': 'x\\'y', 'b': 12, 'c': None, 'd': [1, [2, 3]], 'e': {'k': 'v'}, 'f': -1.5, 'g': True, 'h': (), 'i': \"q\"} tail"
    assert flat_dict(text) == {"a": "x'y", "b": 12, "c": None, "f": -1.5, "g": True, "i": "q"}


@pytest.mark.parametrize(
    "text",
    ["", "x", "{'a': 1", "{" * 5000, "{'a': " + "[" * 5000, "{'a': __import__('os')!}", "{'a': '" + "x" * 10_000 + "'}"],
    ids=["empty", "word", "open", "deep", "deep_value", "call", "long"],
)
def test_what_is_no_small_literal_is_refused(text: str) -> None:
    with pytest.raises(NotALiteralError):
        flat_dict(text)


@given(
    st.dictionaries(st.text(alphabet="abcdef_", min_size=1), st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9)))
)
def test_what_python_prints_is_read_back(given_dict: dict[str, int | None]) -> None:
    assert flat_dict(repr(given_dict)) == given_dict


@given(st.text(alphabet="{}[](),:'\"\\ ab1.-N", max_size=300))
def test_nothing_but_its_own_error_leaves_it(text: str) -> None:
    with contextlib.suppress(NotALiteralError):
        flat_dict(text)
