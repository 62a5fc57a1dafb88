"""The fast reader of metrics pages, against the stock parser and on bad pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from handrail_sidecar.engine_metrics.exposition import Scanner, families_of, split_sample

_DATA = Path(__file__).parents[1] / "data"
_PAGES = sorted(
    [
        *(_DATA / "recordings").glob("metrics_*.txt"),
        *(_DATA / "replay/metrics").glob("*.prom"),
        *(_DATA / "metrics").glob("*.prom"),
    ]
)

Sample = tuple[str, tuple[tuple[str, str], ...]]


def everything(name: str, labels: Mapping[str, str]) -> Sample:
    return name, tuple(sorted(labels.items()))


def scanned(page: bytes, times: int = 1) -> list[tuple[Sample, float]]:
    scanner = Scanner(everything)
    found: list[tuple[Sample, float]] = []
    for _ in range(times):
        found = list(scanner.scan(page))
    return found


@pytest.mark.parametrize("path", _PAGES, ids=lambda path: path.name)
@pytest.mark.parametrize("times", [1, 2], ids=["first", "again"])
def test_every_sample_of_a_page_is_what_the_stock_parser_reads(path: Path, times: int) -> None:
    text = path.read_text(encoding="utf-8")
    stock = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert sorted(scanned(text.encode(), times)) == sorted(stock)


_LABELS = st.dictionaries(st.sampled_from(["engine", "a", "le"]), st.text(alphabet='xY0 {}=,"\\\n#é', max_size=6), max_size=3)


@given(st.lists(st.tuples(_LABELS, st.floats(allow_nan=False)), max_size=8))
def test_labels_of_any_text_are_read_back(samples: list[tuple[dict[str, str], float]]) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    page = "".join(
        "m"
        + ("{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}" if labels else "")
        + f" {number!r}\n"
        for labels, number in samples
    )
    expected = [(("m", tuple(sorted(labels.items()))), number) for labels, number in samples]
    assert scanned(page.encode()) == expected
    assert scanned(page.encode(), 2) == expected


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b"m 1", 1.0),
        (b"m 7.400757e+06", 7_400_757.0),
        (b"m +Inf", math.inf),
        (b"m{} 2", 2.0),
        (b'm{a="b",} 2', 2.0),
        (b"m 1 1700000000000", 1.0),
        (b'm_bucket{le="1"} 3 # {trace_id="x"} 0.5 1.7e9', 3.0),
        (b"m  4", 4.0),
        (b"m 5\r", 5.0),
    ],
    ids=["bare", "exponent", "infinite", "no_labels", "comma", "timestamp", "exemplar", "spaces", "cr"],
)
def test_forms_of_a_sample(line: bytes, value: float) -> None:
    scanner = Scanner(everything)
    assert [number for _, number in scanner.scan(line)] == [value]
    assert [number for _, number in scanner.scan(line)] == [value]


def test_a_timestamped_page_does_not_fill_the_memory() -> None:
    scanner = Scanner(everything, most_known=10)
    for at in range(100):
        assert len(list(scanner.scan(b"m 1 %d\n" % at))) == 1
    assert scanner.stats.forgotten == 0


def test_labels_that_change_at_every_scrape_are_forgotten() -> None:
    scanner = Scanner(everything, most_known=10)
    for at in range(100):
        assert len(list(scanner.scan(b'm{id="%d"} 1\n' % at))) == 1
    assert scanner.stats.forgotten == 9


@pytest.mark.parametrize("line", [b"<html>", b"m", b"m{a=b} 1", b'm{a="b" 1', b"m one", b"{} 1", b"x" * 70_000], ids=range(7))
def test_what_is_no_sample_is_counted_and_passed_over(line: bytes) -> None:
    scanner = Scanner(everything)
    assert len(list(scanner.scan(line + b"\nm 1\n"))) == 1
    assert scanner.stats.malformed == 1


@given(st.binary(max_size=300))
def test_no_bytes_make_it_raise(page: bytes) -> None:
    list(Scanner(everything).scan(page))
    split_sample(page)
    families_of(page)
