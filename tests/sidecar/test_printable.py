"""Which characters of foreign text may appear where a person sees them."""

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.printable import is_printable, printable, printable_json, printable_lines, printable_series

TEXT = st.text(st.characters(), max_size=40)  # every code point, surrogates too


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("two\r\nlines", r"two\r\nlines"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("gpt\u202eorp", r"gpt\u202eorp"),
        ("a\u2066b\u2069", r"a\u2066b\u2069"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        ("a\u2028b\u2029", r"a\u2028b\u2029"),
        ("tag\U000e0041\U000e007f", r"tag\U000e0041\U000e007f"),
        ("v\ufe0f\U000e0100", r"v\ufe0f\U000e0100"),
        ("filler\u3164\u115f\u2800\u034f", r"filler\u3164\u115f\u2800\u034f"),
        ("lone\ud800", r"lone\ud800"),
        ("private\ue000", r"private\ue000"),
        ("joined\u200d\u200c", r"joined\u200d\u200c"),
        ("no-break\u00a0space", r"no-break\xa0space"),
    ],
)
def test_what_must_not_stand_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert not is_printable(text)


@pytest.mark.parametrize(
    "text",
    [
        "meta-llama/Llama-3.1-8B",
        "модель",
        "通义千问",
        "نموذج",
        "מודל",
        "हिन्दी",
        "e\u0301",
        "🦙",
        r"C:\models",
        "a b",
        "x≥1 %",
        "",
    ],
)
def test_ordinary_text_of_every_script_stands(text: str) -> None:
    assert printable(text) == text
    assert is_printable(text)


def test_no_character_of_these_categories_stands() -> None:
    raw = {chr(code) for code in range(sys.maxunicode + 1) if is_printable(chr(code))}
    assert {unicodedata.category(each) for each in raw} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} == set()
    assert {each for each in raw if unicodedata.category(each) == "Zs"} == {" "}


@given(TEXT)
def test_what_is_shown_can_be_shown(text: str) -> None:
    assert is_printable(printable(text))
    assert printable(printable(text)) == printable(text)
    assert len(printable(text, "?")) == len(text)
    assert printable_lines(text).count("\n") == text.count("\n")
    printable(text).encode()  # no surrogate is left


@given(TEXT)
def test_json_means_the_same(text: str) -> None:
    for document in (json.dumps({text: [text]}, ensure_ascii=False), json.dumps({text: 1}, ensure_ascii=False, indent=1)):
        shown = printable_json(document)
        assert json.loads(shown) == json.loads(document)
        assert all(map(is_printable, shown.split("\n")))


@given(
    st.dictionaries(st.tuples(TEXT, st.sampled_from(["\\x1b", "\x1b", "\\x1b\\x1b", "\x1b\\x1b", "\\x1b\x1b"])), st.integers())
)
def test_no_series_is_lost_or_printed_twice(series: dict[tuple[str, ...], int]) -> None:
    shown = printable_series(series)
    assert sorted(shown.values()) == sorted(series.values())
    assert all(map(is_printable, (value for labels in shown for value in labels)))
