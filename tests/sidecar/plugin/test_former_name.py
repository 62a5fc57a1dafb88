"""The former name ``handrail.guest.middleware.Handrail`` still works.

Engines have it in their flags: it works for one version, with a warning.
"""

from __future__ import annotations

import importlib
import sys

import pytest


def test_the_former_name_is_the_middleware_and_says_what_to_write(caplog: pytest.LogCaptureFixture) -> None:
    sys.modules.pop("handrail.guest.middleware", None)
    former = importlib.import_module("handrail.guest.middleware")
    assert former.Handrail is sys.modules["handrail.plugin.middleware"].Handrail
    assert [record.message.partition(":")[2] for record in caplog.records] == [
        " use --middleware handrail.plugin.middleware.Handrail"
    ]
