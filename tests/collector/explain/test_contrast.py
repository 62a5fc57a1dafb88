"""What the requests in question have more of than the controls.

The clearest value is found, and a coincidence is not.
"""

from __future__ import annotations

from itertools import product

import pytest

from handrail_collector.explain.period.concentration import CaseControlStratum, Concentration, contrasts, likelihood

HOSTS = tuple(product(("p0", "p1"), ("d0", "d1")))


def groups(query: dict[tuple[str, str], int], others: int = 250, outcome: str | None = "ok") -> list[CaseControlStratum]:
    return [CaseControlStratum((p, d, f"{p}>{d}", "m", outcome, None), query.get((p, d), 0), others) for p, d in HOSTS]


def standing(found: list[Concentration]) -> list[tuple[str, str]]:
    return [(c.dimension, c.value) for c in found if c.stands_out]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        pytest.param({("p0", "d0"): 40}, [("link", "p0>d0")], id="a link accuses neither of its hosts"),
        pytest.param({("p0", "d0"): 20, ("p0", "d1"): 20}, [("prefill_host", "p0")], id="a host, not its links"),
        pytest.param({("p0", "d1"): 20, ("p1", "d1"): 21}, [("decode_host", "d1")], id="a decode host"),
        pytest.param(dict.fromkeys(HOSTS, 10), [], id="all alike"),
        pytest.param(dict(zip(HOSTS, (14, 11, 8, 9), strict=True)), [], id="a little more somewhere"),
        pytest.param({("p0", "d0"): 4}, [], id="too few"),
        pytest.param({}, [], id="none in question"),
    ],
)
def test_what_stands_out_is_the_value_that_tells_them_apart(
    query: dict[tuple[str, str], int], expected: list[tuple[str, str]]
) -> None:
    assert standing(contrasts(groups(query))) == expected


def test_a_second_value_is_found_among_what_the_first_leaves() -> None:
    found = contrasts(
        [
            *groups({("p0", "d0"): 60, ("p0", "d1"): 60, ("p1", "d0"): 2, ("p1", "d1"): 2}),
            CaseControlStratum(("p1", "d1", "p1>d1", "m", "http_error", None), 20, 2),
        ]
    )
    assert standing(found) == [("outcome", "http_error"), ("prefill_host", "p0")], "the clearest first"


def test_lift_is_the_ratio_of_the_shares_and_lies_within_its_interval() -> None:
    found = {(c.dimension, c.value): c for c in contrasts(groups({("p0", "d0"): 30, ("p1", "d1"): 10}))}
    host = found["prefill_host", "p0"]
    assert (host.cases, host.controls, host.cases_share, host.controls_share) == (30, 500, 0.75, 0.5)
    assert host.lift == 1.5
    assert host.low is not None
    assert host.high is not None
    assert host.low < 1.5 < host.high
    assert ("model", "m") not in found, "a dimension with one value tells nothing apart"


def test_a_value_that_no_other_has_has_no_ratio() -> None:
    rows = [*groups({}), CaseControlStratum(("p0", "d0", "p0>d0", "m", "timed_out", None), 9, 0)]
    only = next(c for c in contrasts(rows) if c.value == "timed_out")
    assert only.lift is None
    assert only.stands_out


def test_likelihood_counts_only_what_is_more_frequent() -> None:
    assert likelihood(0, 100, 10, 200) == 0
    assert likelihood(5, 95, 10, 190) == 0
    assert likelihood(9, 91, 10, 190) > likelihood(7, 93, 10, 190) > 0
