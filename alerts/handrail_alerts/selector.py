"""Check matchers as PromQL writes them between braces.

It finds what Prometheus would refuse. RE2 compiles regular expressions, since Prometheus runs Go's port of RE2; the two differ
only in three rare patterns (tests/alerts/test_selector.py compares them with promtool). ``promql-parser`` was weighed for the
whole check; it compiles patterns with Rust's ``regex``, which is another dialect.
Source of the strings: the lexer and ``util/strutil`` of Prometheus 2.42.
"""

from __future__ import annotations

import re
from typing import Final

LABEL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STRING: Final = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`)"""
_BLANK: Final = r"[ \t\r\n]*"
_OPERATOR: Final = "=~|!~|!=|="
_MATCHER: Final = rf"{_BLANK}{LABEL.pattern}{_BLANK}(?:{_OPERATOR}){_BLANK}{_STRING}{_BLANK}"
_ALL: Final = re.compile(rf"{_MATCHER}(?:,{_MATCHER})*")
_ONE: Final = re.compile(rf"({LABEL.pattern}){_BLANK}({_OPERATOR}){_BLANK}({_STRING})")
_ESCAPE: Final = re.compile(
    r"""\\(?:([abfnrtv\\'"])|([0-3][0-7]{2})|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))""", re.S
)
_SIMPLE: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_SHAPE: Final = "must be matchers as PromQL writes them, without braces: label, =, !=, =~ or !~, a quoted value"


def refused(selector: str) -> str:
    """Return the rule that ``selector`` breaks; '' where Prometheus would accept it."""
    if not _ALL.fullmatch(selector):
        return _SHAPE
    for found in _ONE.finditer(selector):
        label, operator, string = found.groups()
        try:
            value = unquoted(string)
        except ValueError as error:
            return f"the value of {label} {error}"
        if operator.endswith("~") and (reason := refusal(value)):
            return f"the value of {label} is no valid regular expression (RE2): {reason}"
    return ""


def refusal(pattern: str) -> str:
    """Return why Prometheus would refuse ``pattern``, a regular expression.

    Returns '' where it would accept it.
    """
    import re2  # here: of the extra ``alerts``, and only a selector with a pattern needs it

    options = re2.Options()
    options.log_errors = False
    try:
        for text in (pattern, f"^(?:{pattern})$"):  # Prometheus compiles both
            re2.compile(text, options)
    except re2.error as error:
        return str(error.args[0].decode())
    return ""


def unquoted(string: str) -> str:
    """Return the content of a quoted PromQL string.

    Raises ``ValueError``, which says what is wrong with the string.
    """
    quote, inner = string[0], string[1:-1]
    if quote == "`":
        return inner

    def character(found: re.Match[str]) -> str:
        simple, octal, *hexes, _ = found.groups()
        if simple and simple not in {"'": '"', '"': "'"}[quote]:
            return _SIMPLE.get(simple, simple)
        code = int(octal, 8) if octal else next((int(each, 16) for each in hexes if each), -1)
        if code < 0 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
            twice = rf"a backslash in {quote}...{quote} is written twice: \\{found[0][1:]}, or quote the value with `...`"
            hint = f"{simple} needs no backslash there" if simple else twice
            raise ValueError(f"has the escape {found[0]}, which PromQL does not know: {hint}")
        return chr(code)

    return _ESCAPE.sub(character, inner)
