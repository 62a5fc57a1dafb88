"""GPUs and links under the waterfall.

Golden files hold whole renderings. Other tests check what must hold for any samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.device_timeline import ROW, S, ordinary, pair, stored
from builders.request_rows import MS
from handrail.records.devices import DeviceKind, DeviceSample
from handrail_cli.main import main
from handrail_cli.render.devices import Axis, format_rate, track_lines
from handrail_cli.render.waterfall import MIN_WIDTH

Golden = Callable[[str, str], None]


def section(text: str) -> str:
    """Return the part of a trace's text about GPUs and links."""
    lines = text.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("GPUs and links"))
    end = next((place for place in range(begin, len(lines)) if not lines[place].strip()), len(lines))
    return "\n".join(line.rstrip() for line in lines[begin:end]) + "\n"


@pytest.fixture
def traced(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the output of ``handrail trace`` for the made request."""

    def trace(samples: list[DeviceSample], *pairs: Any, width: int = 100, **more: Any) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        stored(tmp_path, samples, pairs, **more)
        assert main(["trace", ROW.request_id, "--data", str(tmp_path)]) == 0
        return capsys.readouterr().out

    return trace


BOUNDED = (pair("id-d", "id-e", -2 * MS, 3 * MS), pair("id-e", "id-p", -MS, 2 * MS))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_tracks_stand_on_the_waterfalls_axis(traced: Callable[..., str], width: int, golden: Golden) -> None:
    text = traced(ordinary(), *BOUNDED, width=width)
    golden(f"cli/tracks_{width}.txt", section(text))
    lines = text.splitlines()
    axes = [line for line in lines if "2.00 s" in line and "1.00 s" in line and line.strip()[0] in "pm"]
    assert [line.index("1.00 s") for line in axes] == [axes[0].index("1.00 s")] * 2


def test_a_clock_that_is_ahead_moves_the_samples_and_the_output_says_so(traced: Callable[..., str]) -> None:
    text = section(traced(ordinary(2 * S), pair("id-e", "id-p", 2 * S - MS, 2 * S + 2 * MS)))
    assert "shifted by 2.00 s, since its clock is ahead; placed within ±1.50 ms (host-p's clock)" in text
    assert "drawn on host-d's own clock; its offset from the clock of 0 is unknown" in text
    busy = next(line for line in text.splitlines() if "tensor" in line)
    assert "▇▇▇▇▇▇▇" in busy  # its prefill is where the prefill phase is


def test_without_samples_one_line_says_so(traced: Callable[..., str]) -> None:
    text = section(traced([]))
    assert text == "GPUs and links: no samples from host-p and host-d in this time; no sidecar there reads them.\n"


def test_a_host_whose_sidecar_has_no_nvml_says_so_and_shows_its_links(traced: Callable[..., str]) -> None:
    samples = [one for one in ordinary() if one.device.kind is not DeviceKind.GPU or one.process.host_name == "host-p"]
    text = section(traced(samples, *BOUNDED))
    of_d = text[text.index("D on host-d") :]
    assert "no GPU samples: its sidecar reads only links (no NVML there, or GPU sampling is off)" in of_d
    assert "RDMA in" in of_d
    assert "GPU busy" not in of_d


def test_json_holds_the_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path, ordinary(), BOUNDED)
    assert main(["trace", ROW.request_id, "--data", str(tmp_path), "--json"]) == 0
    hardware = json.loads(capsys.readouterr().out)["hardware"]
    p, d = hardware["places"]
    assert (p["place"], p["host"], p["offset"]) == (
        "prefill",
        "host-p",
        {"same": False, "shift_ns": MS // 2, "bound_ns": 3 * MS // 2},
    )
    assert [device["key"][:5] for device in d["devices"]] == ["GPU-h", "GPU-h", "mlx5_"]
    (moved,) = d["devices"][2]["tracks"]
    assert (moved["name"], moved["label"], moved["per_second"]) == ("bytes", "receive", True)
    assert max(moved["values"]) == pytest.approx(4.8e9)
    busiest = moved["values"].index(max(moved["values"]))
    assert 1_300 * MS < moved["to_ns"][busiest] <= 2_100 * MS


@settings(deadline=None)
@given(st.data())
def test_any_answer_fits_the_width(data: st.DataObject) -> None:
    number = st.integers(-(10**12), 10**12)
    track = st.builds(
        lambda name, label, points, rate: {
            "name": name,
            "label": label,
            "per_second": rate,
            "from_ns": [begin for begin, _, _ in points],
            "to_ns": [begin + length for begin, length, _ in points],
            "values": [value for _, _, value in points],
        },
        st.sampled_from(["utilization_ratio", "bytes", "nvlink_bytes", "throttled", "new"]),
        st.sampled_from(["", "receive", "transmit"]),
        st.lists(st.tuples(number, st.integers(1, 10**10), st.floats(0, 1e15)), min_size=1, max_size=5),
        st.booleans(),
    )
    device = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["gpu", "rdma", "nic"]),
            "key": st.just("k"),
            "product": st.sampled_from(["", "H100"]),
            "line_rate_bytes": st.none() | st.integers(1, 10**12),
            "tracks": st.lists(track, max_size=4),
        }
    )
    place = st.fixed_dictionaries(
        {
            "place": st.sampled_from(["prefill", "decode"]),
            "host": st.just("h"),
            "chosen": st.sampled_from([None, "host"]),
            "offset": st.sampled_from(
                [{"same": True, "shift_ns": 0, "bound_ns": 0}, {"same": False, "shift_ns": -5 * S, "bound_ns": None}]
            ),
            "devices": st.lists(device, max_size=4),
        }
    )
    places = data.draw(st.lists(place, max_size=2))
    axis = Axis(data.draw(st.integers(1, 10**12)), 16, data.draw(st.integers(12, 80)))
    width = axis.name_width + 18 + axis.bar_width
    for line in track_lines({"places": places}, axis, "0", width):
        assert len(line.plain) <= width
        if line.plain[:1] == " ":
            strip = line.plain[axis.name_width + 18 :]
            assert len(strip) <= max(axis.bar_width, MIN_WIDTH)


@pytest.mark.parametrize(
    ("rate", "output"),
    [
        (0, "0 B/s"),
        (999, "999 B/s"),
        (999.6, "1.0 kB/s"),
        (999.6e6, "1.0 GB/s"),
        (9.996e14, "1.0 PB/s"),
        (1e3, "1.0 kB/s"),
        (48e9, "48 GB/s"),
        (4.81e9, "4.8 GB/s"),
        (123e6, "123 MB/s"),
        (2.5e12, "2.5 TB/s"),
    ],
)
def test_rates(rate: float, output: str) -> None:
    assert format_rate(rate) == output
