"""dcgm-exporter's page: reported faults (CASES.md, kind f), and the source."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from handrail.device_counters.gpu import BY_NAME
from handrail.metrics.registry import Registry
from handrail.records import Process, ProcessEvent, Role, Source
from handrail.records.devices import DeviceSample
from handrail.records.quantities import QuantityKind
from handrail_sidecar.gpu.dcgm import FIELDS, DcgmPage
from handrail_sidecar.live_metrics.gpu_metrics import dcgm_rows
from handrail_sidecar.sources.dcgm import DcgmSource
from handrail_sidecar.sources.engine_metrics import MetricsSettings

PROCESS = Process(role=Role.DECODE, instance="a:1", host="h")
NS = 1_000_000_000


def read(*pages: str) -> list[list[DeviceSample]]:
    reader = DcgmPage(PROCESS, 1)
    return [reader.read(page.encode(), (place + 1) * NS) for place, page in enumerate(pages)]


def values(sample: DeviceSample) -> dict[str, float]:
    return {each.name + (f"{{{each.label}}}" if each.label else ""): each.value for each in sample.values}


def test_F16_one_family_twice_with_other_labels_is_one_gpu_and_links_are_not_added() -> None:
    page = """# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES gauge
DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="0",UUID="GPU-aaa"} 20
# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES gauge
DCGM_FI_PROF_NVLINK_TX_BYTES{gpu="0",gpu_uuid="GPU-aaa",nvlink="1"} 22
DCGM_FI_DEV_POWER_USAGE{gpu="0",gpu_uuid="GPU-aaa"} 512.5
"""
    ((sample,),) = read(page)
    assert sample.device.key == "GPU-aaa"
    assert values(sample) == {"nvlink_bytes_per_second{transmit}": 20, "power_average_watts": 512.5}


def test_F16_a_pod_label_that_goes_makes_no_new_gpu() -> None:
    with_pod = 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",pod="x",modelName="H100"} 3\n'
    (first,), (second,) = read(with_pod, 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 4\n')
    assert first.device == second.device
    assert values(second) == {"utilization_ratio": 0.04}


def test_F17_profiling_that_stops_is_reported_with_the_xid_before_it() -> None:
    reader = DcgmPage(PROCESS, 1)
    power = 'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} %s\n'
    xid = 'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a"} %d\n'
    active = 'DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-a"} %s\n'
    reader.read((power % 500 + xid % 0 + active % 0.6).encode(), 1 * NS)
    assert reader.paused == {}
    (sample,) = reader.read((power % 512.5 + xid % 31 + active % float(0x7FFFFFFFFFFFFFF0)).encode(), 2 * NS)
    assert "dram_active_ratio" not in values(sample)  # a blank is no zero
    paused = reader.paused["GPU-a"]
    assert (paused.since_unix_ns, paused.xid) == (2 * NS, 31)
    reader.read((power % 513 + xid % 31).encode(), 3 * NS)
    assert reader.paused["GPU-a"].since_unix_ns == 2 * NS
    reader.read((power % 513 + active % 0.1).encode(), 4 * NS)
    assert reader.paused == {}


def test_F17_a_gpu_that_never_gave_profiling_values_has_not_paused_them() -> None:
    reader = DcgmPage(PROCESS, 1)
    for at in (1, 2):
        reader.read(b'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a"} 5\n', at * NS)
    assert reader.paused == {}


def test_F13_an_xid_that_stays_is_counted_once_and_one_from_before_not_at_all() -> None:
    line = 'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a",err_code="%d"} %d\n'
    samples = read(*(line % (code, code) for code in (45, 45, 31, 31, 0, 31)), 'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 1\n')
    assert [values(sample[0]).get("xid_errors{31}") for sample in samples] == [None, None, 1, 1, 1, 2, None]
    assert not any("xid_errors{45}" in values(sample[0]) for sample in samples)


def test_F19_odd_text_and_two_hosts_on_one_page() -> None:
    page = """# HELP DCGM_FI_DEV_PSTATE
# TYPE DCGM_FI_DEV_PSTATE gauge
DCGM_FI_DEV_PSTATE{gpu="0",UUID="GPU-a",Hostname="h1",DCGM_FI_DEV_SERIAL="S1",DCGM_FI_DRIVER_VERSION="470.1"} 8
# NOTE copied from another family
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-b",Hostname="h2",DCGM_FI_DRIVER_VERSION="460.1"} 8.969000
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-a",Hostname="h1",DCGM_FI_DEV_SERIAL="S1"} 9
"""
    upgraded = page.replace("460.1", "535.2")
    for first, second in read(page, upgraded):
        assert (first.device.key, second.device.key) == ("GPU-a", "GPU-b")
        assert values(second) == {"power_average_watts": 8.969}
        assert "S1" not in repr(first)
    assert read(page)[0][0].device == read(upgraded)[0][0].device


def test_a_mig_instance_is_a_device_of_its_own() -> None:
    ((gpu, instance),) = read(
        'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 5\n'
        'DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",GPU_I_ID="3",GPU_I_PROFILE="1g.10gb"} 2\n'
        'DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",GPU_I_ID="3",GPU_I_PROFILE="1g.10gb"} 6\n'
    )
    assert (instance.device.key, instance.device.parent) == ("GPU-a/3", "GPU-a")
    assert values(instance) == {"memory_used_bytes": 2 << 20, "memory_total_bytes": 8 << 20}
    assert values(gpu) == {"memory_used_bytes": 5 << 20}


def test_an_exporter_that_began_again_gives_a_counter_a_new_start() -> None:
    line = 'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a"} %d\n'
    samples = read(line % 5000, line % 7000, line % 1000)
    reports = [(each.value, each.start_unix_ns) for sample in samples for each in sample[0].values]
    assert reports == [(5, NS), (7, NS), (1, 3 * NS)]


def test_every_field_names_a_counter_of_the_table_with_its_kind_and_label() -> None:
    for name, field in FIELDS.items():
        row = BY_NAME[field.name]
        assert field.label in {value.label for value in row.values}, name
        assert (row.counter.kind is QuantityKind.COUNTER) is field.counts, name


@pytest.fixture
async def exporter() -> AsyncIterator[dict[str, str]]:
    """A dcgm-exporter page that the test writes; '' answers 500."""
    statement = {"page": ""}

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=statement["page"], status=200 if statement["page"] else 500)

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    statement["url"] = f"http://{host}:{port}/metrics"
    yield statement
    await runner.cleanup()


async def test_the_source_hands_on_samples_and_events_and_shows_nothing_old(exporter: dict[str, str]) -> None:
    events: list[ProcessEvent] = []
    samples: list[DeviceSample] = []
    now = 100 * NS
    source = DcgmSource(
        MetricsSettings(url=exporter["url"], interval_s=5.0), PROCESS, events.append, samples.append, now_unix_ns=lambda: now
    )

    def shown() -> str:
        page, _ = Registry(dcgm_rows(source, monotonic_s=lambda: now / NS)).expose("text/plain")
        return page.decode()

    await source.scrape()
    assert not source.up
    assert "handrail_gpu_up 0.0" in shown()
    line = 'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a"} %d\nDCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a"} 0.5\n'
    for code in (0, 79):
        exporter["page"] = line % code
        now += 5 * NS
        await source.scrape()
    assert 'handrail_gpu_sm_active_ratio{gpu="0",uuid="GPU-a"} 0.5' in shown()
    assert 'handrail_gpu_xid_errors_total{gpu="0",uuid="GPU-a",xid="79"} 1.0' in shown()
    assert [(event.kind.value, event.source, event.detail) for event in events] == [
        ("gpu_xid", Source.DCGM, "GPU 0 (GPU-a): Xid 79")
    ]
    assert len(samples) == 2
    exporter["page"] = ""
    now += 16 * NS
    await source.scrape()
    assert "handrail_gpu_sm_active_ratio{" not in shown()
    await source.shutdown(1)
    await source.shutdown(1)
