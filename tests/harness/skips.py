"""Skip a test with a reason of one of two classes.

``MISSING``: a program or package that ``make setup`` installs. CI has all of them: there such a skip is a failure.
``UNABLE``: something that this machine or this user cannot be given: a kernel's feature, a limit, root. It stays a skip.
A skip of no class is a failure in CI too (tests/conftest.py).
"""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
from typing import Any, Final, NoReturn

import pytest

MISSING: Final = "missing: "
UNABLE: Final = "not on this machine: "


def needs_program(program: str) -> pytest.MarkDecorator:
    """Mark a test that runs this program."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{MISSING}{program}: make setup installs it or says how")


def needs_ability(has: bool, what: str) -> pytest.MarkDecorator:
    """Mark a test for machines on which ``has`` is true.

    ``what`` says what the other machines lack.
    """
    return pytest.mark.skipif(not has, reason=UNABLE + what)


def skip_missing(what: str) -> NoReturn:
    """Skip the running test: a program or package is not installed."""
    pytest.skip(MISSING + what)


def skip_unable(what: str) -> NoReturn:
    """Skip the running test: this machine cannot do it."""
    pytest.skip(UNABLE + what)


def skip_package(name: str) -> NoReturn:
    """Skip the running test: a package is not installed.

    The package has builds for Linux on x86_64 only (pyproject.toml).
    """
    if sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info >= (3, 11):
        skip_missing(f"the package {name}: make setup installs it")
    skip_unable(f"the package {name}, which has no build for this machine or Python")


def package(name: str, distribution: str) -> Any:
    """Import a package of that kind; skip the running test without it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        skip_package(distribution)
