"""The parts of promtool's notation that our test files rely on (case H11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from alert_cases.promtool_files import promtool
from harness.alert_tools import needs_promtool


@needs_promtool
@pytest.mark.parametrize(
    ("values", "at", "samples"),
    [
        ("0x10 1x20", "40m", 32),  # 0, ten more, 1, twenty more: no hexadecimal number
        ("5+0x287", "300m", 288),
        ("0+2x3", "10m", 4),
        ("_x5 1", "10m", 1),  # five scrapes without a sample, not six
        ("1 _ 1", "10m", 2),
        ("1x3 stale", "10m", 4),  # the marker is no sample
    ],
)
def test_H11_promtool_reads_the_notation_as_we_do(values: str, at: str, samples: int, tmp_path: Path) -> None:
    file = tmp_path / "notation.yaml"
    file.write_text(
        f"""
rule_files: []
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series: [{{series: x, values: '{values}'}}]
    promql_expr_test:
      - {{expr: 'count_over_time(x[10h])', eval_time: {at}, exp_samples: [{{labels: '{{}}', value: {samples}}}]}}
""",
        encoding="utf-8",
    )
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout


@needs_promtool
def test_H11_underscore_and_stale_begin_and_end_a_series(tmp_path: Path) -> None:
    file = tmp_path / "notation.yaml"
    file.write_text(
        """
rule_files: []
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series: [{series: x, values: '_x5 1x3 stale'}]
    promql_expr_test:
      - {expr: 'x', eval_time: 4m}
      - {expr: 'x', eval_time: 5m, exp_samples: [{labels: 'x', value: 1}]}
      - {expr: 'x', eval_time: 8m, exp_samples: [{labels: 'x', value: 1}]}
      - {expr: 'x', eval_time: 9m}
""",
        encoding="utf-8",
    )
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout
