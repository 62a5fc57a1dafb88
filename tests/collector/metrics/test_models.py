"""Model names as label values: bounded, and not for a client to make up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from handrail_collector.metrics.models import MOST, OTHER, Models
from handrail_collector.rows import RequestRow
from made_rows import request_row


def asked(model: str | None, outcome: str = "ok") -> RequestRow:
    return replace(request_row(()), model=model, outcome=outcome)


def test_a_client_that_tries_names_takes_no_place() -> None:
    models = Models()
    for n in range(1000):
        assert models.label(asked(f"guess-{n}", "http_error")) == OTHER
    assert models.label(asked("llama")) == "llama"
    assert models.label(asked("llama", "http_error")) == "llama"
    assert models.known == {"llama"}


def test_the_number_of_names_is_bounded_and_the_first_stay() -> None:
    models = Models()
    labels = [models.label(asked(f"m{n}")) for n in range(MOST + 10)]
    assert labels[:MOST] == [f"m{n}" for n in range(MOST)]
    assert set(labels[MOST:]) == {OTHER}
    assert models.label(asked("m3")) == "m3"


def test_names_of_an_earlier_life_keep_their_place() -> None:
    models = Models([f"old-{n}" for n in range(MOST)] + ["", OTHER])
    assert (models.label(asked("old-7")), models.label(asked("new"))) == ("old-7", OTHER)


@pytest.mark.parametrize("name", ["x" * 201, "a\nb", "\x00"], ids=["long", "newline", "nul"])
def test_what_is_no_name_for_a_label_has_no_place(name: str) -> None:
    assert Models().label(asked(name)) == OTHER


@pytest.mark.parametrize("name", [None, ""])
def test_no_model_is_no_other_model(name: str | None) -> None:
    assert Models().label(asked(name)) == ""
