"""Mask possible secrets in error messages about a wrong configuration.

A wrong file may be a key, a token or a password file that was given by mistake, and its error goes to logs that many people read.
The place (file, line, column) is always shown, so that a person who may read the file finds the value.
"""

from __future__ import annotations

import re
from typing import Final

MASK: Final = "****"

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,39}")
_CREDENTIAL: Final = re.compile(
    r"-----BEGIN|(?i:\b(?:bearer|basic)\s+\S)|(?i:\b(?:password|passwd|secret|token|api_?key)\b\s*[=:])"
    r"|\b(?:eyJ|ghp_|github_pat_|glpat-|hf_|sk-|AKIA|xox[abp]-)"
)
_USER_OF_URL: Final = re.compile(r"//[^/\s]*@|[?#]\S*=")
_RANDOM: Final = re.compile(r"[A-Za-z0-9+=_-]{24,}")
_QUOTED: Final = re.compile(r"'([^']*)'|\"([^\"]*)\"")


def may_be_secret(text: str) -> bool:
    """Whether ``text`` looks like a credential.

    Evidence: its words, a URL's user or query, or 24 letters and digits in a row.
    """
    return bool(
        _CREDENTIAL.search(text)
        or _USER_OF_URL.search(text)
        or any(re.search(r"\d", run) and re.search(r"[A-Za-z]", run) for run in _RANDOM.findall(text))
    )


def shown_value(text: str) -> str:
    """``text``, or a mask where it may be a secret."""
    return MASK if may_be_secret(text) else text


def shown_key(path: str) -> str:
    """Path of a key for an error message.

    A part that is no name, or may be a secret, is masked.
    """
    return ".".join(step if _NAME.fullmatch(step) and not may_be_secret(step) else MASK for step in path.split("."))


def shown_fault(message: str) -> str:
    """Parser's error message without its quotes from the file.

    ``<scalar>`` and single characters stay.
    """
    return _QUOTED.sub(
        lambda found: found[0] if len(found[0]) <= 3 or found[0][1] == "<" else f"'{MASK}'", message.partition("\n")[0]
    )
