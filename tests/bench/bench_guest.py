"""Measure what the plugin costs inside the engine, in isolation.

A stand-in scheduler and connector run wrapped and unwrapped; the difference is the cost.
Budgets (DESIGN section 13): 1 us a token event, 30 us a request.
The recorder's thread is counted separately: it encodes and sends under the same interpreter lock.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from handrail.plugin.events import CORE, FIRST_TOKEN
from handrail.plugin.guard import HookGuard
from handrail.plugin.middleware import _ExchangeState
from handrail.plugin.mixin import Mixer
from handrail.plugin.recorder import Recorder
from handrail.plugin.scheduler import watch_scheduler

_REPEATS = 7
_STEPS = 2_000
_BATCH = 64
_REQUESTS = 1_000


class Quiet(Recorder):
    """A recorder that records but starts no thread."""

    def start(self, kind: str) -> None:
        self.kind = kind


class _Scheduler:
    """The cheapest possible scheduler, so that the figure is the plugin's cost."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.next: Any = None

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> Any:
        return self.next

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> None: ...

    def _free_request(self, request: Any) -> None:
        self.requests.pop(request.request_id, None)


class _Connector:
    """A leaf connector that does nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata = SimpleNamespace(reqs_to_recv={})

    def on_new_request(self, request: Any) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 96, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._connector_metadata

    def update_connector_output(self, connector_output: Any) -> None: ...

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any]]:
        return block_ids is not None, {"remote_block_ids": block_ids, "remote_num_tokens": 96}

    def start_load_kv(self, forward_context: Any) -> None: ...

    def get_transfer_results(self, finished_req_ids: Any) -> Any:
        return _NOTHING_DONE


_NOTHING_DONE = SimpleNamespace(finished_sending=set(), finished_recving=set(), failed_recving=set())
_NO_KV = SimpleNamespace(finished_sending=None, finished_recving=None, failed_recving=set())
_MODEL_OUTPUT = SimpleNamespace(kv_connector_output=None)
_BLOCKS = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([1, 2, 3],))
_P_ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
_D_ASKS = {
    "do_remote_prefill": True,
    "remote_engine_id": "8c5d927a-6da6-818b-6846-3d98b36c7567",
    "remote_request_id": "cmpl-lab-0001-0-9c60a41c",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
    "transfer_mode": "pull",
    "handrail_traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
}
_CONFIG = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(engine_id="E", kv_connector="X", kv_connector_extra_config={}),
    parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
)
_CACHE = SimpleNamespace(
    kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=16_384), layer_names=["a", "b"])]
)


def run() -> list[dict[str, Any]]:
    """Return the figures, each the median of repeats (a minimum of medians flatters)."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bench.sock")
        token = _per_token_us(path) * 1000
        return [
            _figure("guest_record_event", _record_ns(path), "ns", 1000.0),
            _figure("guest_decode_step_per_token", token, "ns", 1000.0),
            _figure(f"guest_decode_step_of_{_BATCH}", token * _BATCH / 1000, "us", None),
            _figure("guest_idle_engine_step", _idle_step_us(path), "us", None),
            _figure("guest_request_on_p_that_publishes", _request_us(path, _p_request), "us", 30.0),
            _figure("guest_request_on_d_that_loads", _request_us(path, _d_request), "us", 30.0),
            _figure("guest_middleware_per_chunk", _chunk_us(path) * 1000, "ns", 1000.0),
            _figure("guest_thread_encode_and_send_event", _sent_us(path), "us", None),
        ]


def _record_ns(path: str) -> float:
    recorder = Quiet(path)
    record, clock = recorder.record, time.monotonic_ns

    def loop() -> None:
        for _ in range(_STEPS):
            record((FIRST_TOKEN, clock(), "cmpl-lab-0001-0-9c60a41c"))

    return _cpu_us(loop, _STEPS, recorder) * 1000


def _per_token_us(path: str) -> float:
    names = [f"cmpl-lab-{n:04d}-0-9c60a41c" for n in range(_BATCH)]
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=_BATCH,
        preempted_req_ids=None,
        finished_req_ids=set(),
    )

    def steps(scheduler: _Scheduler) -> Callable[[], None]:
        scheduler.next = output

        def loop() -> None:
            for _ in range(_STEPS):
                scheduler.update_from_output(scheduler.schedule(), _MODEL_OUTPUT)

        return loop

    recorder = Quiet(path)
    watched = _Scheduler()
    watch_scheduler(watched, HookGuard(recorder))
    return (_cpu_us(steps(watched), _STEPS, recorder) - _cpu_us(steps(_Scheduler()), _STEPS, recorder)) / _BATCH


def _idle_step_us(path: str) -> float:
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        preempted_req_ids=None,
        finished_req_ids=set(),
    )

    def steps(scheduler: _Scheduler, ours: Any, theirs: Any) -> Callable[[], None]:
        scheduler.next = output

        def loop() -> None:
            for _ in range(_STEPS):
                step = scheduler.schedule()
                ours.build_connector_meta(step)
                theirs.start_load_kv(None)
                theirs.get_transfer_results(None)
                ours.update_connector_output(_NO_KV)
                scheduler.update_from_output(step, _MODEL_OUTPUT)

        return loop

    recorder = Quiet(path)
    watched, pair = _Scheduler(), _connectors(recorder)
    watch_scheduler(watched, HookGuard(recorder))
    bare = (_Connector(None, None, None), _Connector(None, None, None))
    return _cpu_us(steps(watched, *pair), _STEPS, recorder) - _cpu_us(steps(_Scheduler(), *bare), _STEPS, recorder)


def _request_us(path: str, one: Callable[[str, _Scheduler, Any, Any], None]) -> float:
    """Measure all records of one request from its queue to its end, steps included."""

    def requests(scheduler: _Scheduler, ours: Any, theirs: Any) -> Callable[[], None]:
        def loop() -> None:
            for n in range(_REQUESTS):
                one(f"cmpl-lab-{n:04d}-0-9c60a41c", scheduler, ours, theirs)

        return loop

    recorder = Quiet(path)
    watched, pair = _Scheduler(), _connectors(recorder)
    watch_scheduler(watched, HookGuard(recorder))
    bare = (_Connector(None, None, None), _Connector(None, None, None))
    return _cpu_us(requests(watched, *pair), _REQUESTS, recorder) - _cpu_us(requests(_Scheduler(), *bare), _REQUESTS, recorder)


def _p_request(name: str, scheduler: _Scheduler, ours: Any, theirs: Any) -> None:
    request = _request(name, _P_ASKS)
    scheduler.add_request(request)
    ours.on_new_request(request)
    _step(name, scheduler, request, new=True)
    scheduler._free_request(request)
    ours.request_finished_all_groups(request, ([1, 2, 3],))
    ours.update_connector_output(SimpleNamespace(finished_sending={name}, finished_recving=None, failed_recving=set()))


def _d_request(name: str, scheduler: _Scheduler, ours: Any, theirs: Any) -> None:
    request = _request(name, _D_ASKS)
    scheduler.add_request(request)
    ours.on_new_request(request)
    ours.get_num_new_matched_tokens(request, 0)
    ours.update_state_after_alloc(request, _BLOCKS, 96)
    theirs._connector_metadata.reqs_to_recv = {name: None}
    theirs.start_load_kv(None)
    theirs._connector_metadata.reqs_to_recv = {}
    ours.update_connector_output(SimpleNamespace(finished_sending=None, finished_recving={name}, failed_recving=set()))
    _step(name, scheduler, request, new=True)
    scheduler._free_request(request)
    ours.request_finished_all_groups(request, None)


def _request(name: str, params: dict[str, Any]) -> Any:
    return SimpleNamespace(
        request_id=name,
        trace_headers=None,
        arrival_time=1.8e9,
        num_prompt_tokens=96,
        num_output_tokens=0,
        num_computed_tokens=0,
        kv_transfer_params=dict(params),
        prefill_stats=None,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
        abort_immediately=False,
    )


def _step(name: str, scheduler: _Scheduler, request: Any, *, new: bool) -> None:
    scheduler.next = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name)] if new else [],
        num_scheduled_tokens={name: 1},
        total_num_scheduled_tokens=1,
        preempted_req_ids=None,
        finished_req_ids=set(),
    )
    step = scheduler.schedule()
    request.num_output_tokens += 1
    scheduler.update_from_output(step, _MODEL_OUTPUT)


def _chunk_us(path: str) -> float:
    """Measure one chunk of a stream through the middleware's observer."""
    recorder = Quiet(path)
    seen = _ExchangeState(recorder, {"headers": [], "method": "POST", "path": "/v1/completions"})
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    seen.sent(start, 0)
    message = {"type": "http.response.body", "body": b"data: " + b"x" * 260 + b"\n\n", "more_body": True}
    clock, sent, guard = time.monotonic_ns, seen.sent, HookGuard(recorder)

    def loop() -> None:
        for _ in range(_STEPS):
            guard("middleware", sent, message, clock())

    return _cpu_us(loop, _STEPS, recorder)


def _connectors(recorder: Recorder) -> tuple[Any, Any]:
    mixed = Mixer(HookGuard(recorder))(_Connector)
    return tuple(mixed(_CONFIG, SimpleNamespace(name=role), _CACHE) for role in ("SCHEDULER", "WORKER"))


def _sent_us(path: str) -> float:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(path)
        bound.setblocking(False)
        recorder = Quiet(path)
        recorder.start(CORE)
        spent = []
        for _ in range(_REPEATS):
            for n in range(_STEPS):
                recorder.record((FIRST_TOKEN, n, "cmpl-lab-0001-0-9c60a41c"))
            begin = time.process_time_ns()
            while not recorder.flush():
                _drain(bound)
            spent.append((time.process_time_ns() - begin) / _STEPS / 1000)
            _drain(bound)
        recorder.stop()
        return median(spent)


def _drain(bound: socket.socket) -> None:
    try:
        while True:
            bound.recv(70_000)
    except BlockingIOError:
        return


def _cpu_us(loop: Callable[[], None], count: int, recorder: Recorder) -> float:
    """Measure the processor time of one round of ``loop``, in us.

    The figure is the median of repeats. The events are discarded between rounds.
    """
    spent = []
    for _ in range(_REPEATS):
        begin = time.process_time_ns()
        loop()
        spent.append((time.process_time_ns() - begin) / count / 1000)
        recorder._events.clear()
    return median(spent)


def _figure(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ratio": None if budget is None else round(value / budget, 3),
        "met": None if budget is None else value <= budget,
    }
