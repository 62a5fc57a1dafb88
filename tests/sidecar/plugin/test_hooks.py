"""The plugin's hooks on vLLM's connector and scheduler.

The tests cover what the hooks record, what they leave unchanged, and that they never harm the engine.
"""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from doubles.engine import (
    Blocks,
    Config,
    MultiConnector,
    Pull,
    Request,
    Role,
    Scheduler,
    SupportsHMA,
    cache_config,
    model_output,
    modules,
    output,
    step_of,
)
from handrail.plugin import events as words
from handrail.plugin.guard import FAILURES_ALLOWED
from handrail.plugin.import_hook import when_imported
from handrail.plugin.kv_params import group_sizes, read_offer
from handrail.plugin.logs import GuestHandler
from handrail.plugin.mixin import HOOKS
from handrail.plugin.nixl import error_name
from handrail.plugin.plugin import Plugin
from handrail.plugin.recorder import Recorder

P_ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
D_ASKS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_request_id": "cmpl-a-0-11111111",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
    "transfer_mode": "pull",
    "handrail_traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
}


class Quiet(Recorder):
    """A recorder that starts no thread and sends nothing."""

    def start(self, kind: str) -> None:
        self.kind = kind

    def flush(self, *, wait: bool = True) -> bool:
        return wait


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    found = Plugin(str(tmp_path / "nobody.sock"))
    found.recorder = found.guard.recorder = Quiet(found.recorder.path)
    return found


def events_of(plugin: Plugin, *names: str) -> list[dict[str, Any]]:
    """Return the recorded events by field; ``names`` selects kinds of events."""
    found = []
    for name, at_ns, *values in plugin.recorder._events:
        if not names or name in names:
            assert isinstance(at_ns, int)
            found.append({"name": name, **dict(zip(words.FIELDS[name], values, strict=True))})
    return found


def connector(plugin: Plugin, role: Role, cache: Any = None) -> Any:
    made = plugin.mixer(Pull)(Config(), role, cache or cache_config(2))
    assert events_of(plugin, words.DEGRADED) == []
    return made


# --- classes ------------------------------------------------------------------------------------------------------------------
def test_a_mixed_class_keeps_names_interfaces_and_signature(plugin: Plugin) -> None:
    mixed = plugin.mixer(Pull)
    assert mixed is not Pull
    assert (mixed.__name__, mixed.__qualname__, mixed.__module__) == (Pull.__name__, Pull.__qualname__, Pull.__module__)
    assert issubclass(mixed, (Pull, SupportsHMA))
    assert inspect.signature(mixed) == inspect.signature(Pull)
    assert not inspect.isabstract(mixed)
    assert {name for name in HOOKS if hasattr(mixed, name)} == {name for name in HOOKS if hasattr(Pull, name)}


def test_a_class_is_mixed_once_and_a_composite_never(plugin: Plugin) -> None:
    mixed = plugin.mixer(Pull)
    assert plugin.mixer(Pull) is mixed
    assert plugin.mixer(mixed) is mixed
    assert plugin.mixer(MultiConnector) is MultiConnector


def test_what_cannot_be_mixed_is_given_back(plugin: Plugin) -> None:
    class Final(type):
        def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
            if bases:
                raise TypeError("no subclasses")
            return super().__new__(cls, name, bases, names)

    sealed = Final("sealed", (), {})
    assert plugin.mixer(sealed) is sealed
    assert [e["error"] for e in events_of(plugin, words.DEGRADED)] == ["TypeError"]


def test_the_factory_gives_out_mixed_classes_whatever_the_name(plugin: Plugin) -> None:
    factory, _ = modules()
    plugin._watch_factory(factory)
    plugin._watch_factory(factory)  # vLLM calls the plugin more than once
    given = factory.KVConnectorFactory.get_connector_class("Pull")
    assert given is plugin.mixer(Pull)
    assert factory.KVConnectorFactory.get_connector_class("MultiConnector") is MultiConnector


# --- the scheduler's side -----------------------------------------------------------------------------------------------------
def test_p_publishes_what_it_keeps_and_adds_a_traceparent(plugin: Plugin) -> None:
    side = connector(plugin, Role.SCHEDULER)
    request = Request("cmpl-a-0-11111111", dict(P_ASKS))
    side.on_new_request(request)
    kept, params = side.request_finished_all_groups(request, ([4, 5, 6],))
    assert kept
    (published,) = events_of(plugin, words.KV_PUBLISHED)
    assert published["traceparent"] == params["handrail_traceparent"]
    assert {k: published[k] for k in ("blocks", "kv_bytes", "tokens", "direction", "mode", "engine_id")} == {
        "blocks": 3,
        "kv_bytes": 3 * 2 * 1000 * 2,  # blocks, layers, page, ranks
        "tokens": 96,
        "direction": "p_to_d",
        "mode": "pull",
        "engine_id": "E",
    }


def test_the_engines_own_trace_is_carried_on(plugin: Plugin) -> None:
    side = connector(plugin, Role.SCHEDULER)
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    request = Request("cmpl-a-0-11111111", dict(P_ASKS), {"traceparent": parent})
    side.on_new_request(request)
    _, params = side.request_finished_all_groups(request, ([4],))
    assert params["handrail_traceparent"][:36] == parent[:36]
    assert params["handrail_traceparent"][36:52] != parent[36:52]
    assert params["handrail_traceparent"][-2:] == "01"


def test_d_keeps_blocks_by_another_lease_than_p(plugin: Plugin) -> None:
    config = Config()
    config.kv_transfer_config.kv_connector = "NixlConnector"
    config.kv_transfer_config.kv_connector_extra_config = {"kv_lease_duration": 6}
    side = plugin.mixer(Pull)(config, Role.SCHEDULER, cache_config(2))
    for name, params in (("p", P_ASKS), ("d", D_ASKS)):
        request = Request(name, dict(params))
        side.on_new_request(request)
        side.request_finished_all_groups(request, ([4],))
    assert [(e["direction"], e["lease_ns"]) for e in events_of(plugin, words.KV_PUBLISHED)] == [
        ("p_to_d", 6 * 10**9),
        ("d_to_p", 480 * 10**9),
    ]


def test_the_traceparent_can_be_turned_off(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_TRACEPARENT", "0")
    side = connector(plugin, Role.SCHEDULER)
    request = Request("cmpl-a-0-11111111", dict(P_ASKS))
    side.on_new_request(request)
    assert "handrail_traceparent" not in side.request_finished_all_groups(request, ([4],))[1]


def test_one_publish_although_one_hook_calls_the_other(plugin: Plugin) -> None:
    side = connector(plugin, Role.SCHEDULER)
    request = Request("r", dict(P_ASKS))
    side.request_finished(request, [4])
    assert len(events_of(plugin, words.KV_PUBLISHED)) == 1


def test_d_knows_wants_and_notices(plugin: Plugin) -> None:
    side = connector(plugin, Role.SCHEDULER)
    request = Request("cmpl-a-0-22222222", dict(D_ASKS))
    side.on_new_request(request)
    side.get_num_new_matched_tokens(request, 32)
    request.kv_transfer_params["do_remote_prefill"] = False  # type: ignore[index]  # connectors change it while they work
    side.update_state_after_alloc(request, Blocks([7, 8, 9, 10]), 64)
    side.update_state_after_alloc(request, Blocks([]), 0)
    side.update_connector_output(
        SimpleNamespace(finished_recving={"cmpl-a-0-22222222"}, finished_sending=None, failed_recving=set())
    )
    known, wanted, noticed = events_of(plugin)[1:] if events_of(plugin)[0]["name"] == "facts" else events_of(plugin)
    assert (known["name"], known["peer_engine_id"], known["peer_request_id"]) == ("kv_known", "P", "cmpl-a-0-11111111")
    assert (known["peer_host"], known["peer_port"], known["direction"], known["mode"]) == ("10.0.0.1", 5600, "p_to_d", "pull")
    assert known["traceparent"] == D_ASKS["handrail_traceparent"]
    assert (wanted["tokens_wanted"], wanted["tokens_local"], wanted["asynchronous"]) == (64, 32, True)
    assert (wanted["blocks"], wanted["bytes_expected"]) == (3, 3 * 2 * 1000 * 2)  # no more than the peer has
    assert (noticed["name"], noticed["failed"]) == ("kv_noticed", False)


def test_a_request_that_loads_once_more_says_so(plugin: Plugin) -> None:
    made = connector(plugin, Role.SCHEDULER, cache_config(2, page_bytes=500))
    request = Request("r")
    for _ in range(2):  # the second, after a preemption had discarded its blocks
        made.get_num_new_matched_tokens(request, 32)
        made.update_state_after_alloc(request, Blocks([1, 2]), 64)
        assert made.build_connector_meta(None).handrail_loads == (("r", True),)
        made.update_state_after_alloc(request, Blocks([1, 2]), 0)  # loaded
    assert [e["name"] for e in events_of(plugin, words.KV_KNOWN, words.KV_WANTED)] == [words.KV_KNOWN, words.KV_WANTED] * 2
    assert [e["tokens_wanted"] for e in events_of(plugin, words.KV_WANTED)] == [64, 64]


def test_a_clean_up_of_the_engines_own_is_no_fetch(plugin: Plugin) -> None:
    side = connector(plugin, Role.SCHEDULER)
    side.on_new_request(Request("0123456789abcdef", dict(D_ASKS), abort_immediately=True))
    assert events_of(plugin, words.KV_KNOWN) == []


def test_p_that_reads_back_from_d_says_so(plugin: Plugin) -> None:
    side = connector(plugin, Role.SCHEDULER)
    side.on_new_request(Request("r", {**D_ASKS, "do_remote_prefill": False, "do_remote_decode": True}))
    assert [e["direction"] for e in events_of(plugin, words.KV_KNOWN)] == ["d_to_p"]


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_prefill": 5, "remote_port": "x", "remote_block_ids": 7}]
)
def test_an_offer_that_lacks_everything_is_still_a_fetch(plugin: Plugin, params: dict[str, Any]) -> None:
    side = connector(plugin, Role.SCHEDULER)
    side.on_new_request(Request("r", params))
    assert [(e["peer_engine_id"], e["peer_port"]) for e in events_of(plugin, words.KV_KNOWN)] == [(None, None)]


# --- the worker's side --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("received", [{"r": object()}, {"P": {"r": object()}}], ids=["nixl", "mooncake"])
def test_requests_to_load_by_id_or_by_peer(plugin: Plugin, received: dict[str, Any]) -> None:
    side = connector(plugin, Role.WORKER)
    side._connector_metadata = SimpleNamespace(reqs_to_recv=received)
    side.start_load_kv(None)
    assert [e["request"] for e in events_of(plugin)] == ["r"]


def test_a_worker_says_when_it_loads_and_when_that_is_over(plugin: Plugin) -> None:
    side = connector(plugin, Role.WORKER)
    side._connector_metadata = SimpleNamespace(reqs_to_recv={"r": object()})
    side.start_load_kv(None)
    side._connector_metadata = SimpleNamespace(reqs_to_recv={})
    side.start_load_kv(None)
    side.get_transfer_results(set())
    side.done = {"r"}
    side.get_transfer_results(set())
    assert [(e["name"], e["request"], e["rank"]) for e in events_of(plugin)] == [("kv_load", "r", 1), ("kv_loaded", "r", 1)]


def test_a_connector_that_loads_within_the_call_is_over_with_it(plugin: Plugin) -> None:
    scheduler_side, worker_side = connector(plugin, Role.SCHEDULER), connector(plugin, Role.WORKER)
    request = Request("r")
    scheduler_side._handrail_side.matched(request, 0, (64, False))
    scheduler_side.on_new_request(request)
    scheduler_side.update_state_after_alloc(request, Blocks([1, 2]), 64)
    worker_side._connector_metadata = scheduler_side.build_connector_meta(None)
    worker_side.start_load_kv(None)
    assert [e["name"] for e in events_of(plugin, "kv_known", "kv_wanted", "kv_load", "kv_loaded")] == [
        "kv_known",
        "kv_wanted",
        "kv_load",
        "kv_loaded",
    ]


# --- the scheduler ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def scheduler(plugin: Plugin) -> Scheduler:
    _, module = modules()
    plugin._watch_schedulers(module)
    plugin._watch_schedulers(module)
    made: Scheduler = module.Scheduler(Config())
    assert events_of(plugin, words.DEGRADED) == []
    return made


def run(scheduler: Scheduler, step: Any, done: Any) -> None:
    scheduler.next = step
    assert scheduler.update_from_output(scheduler.schedule(), done) == {0: "outputs"}


def test_a_request_from_queue_to_end(plugin: Plugin, scheduler: Scheduler) -> None:
    scheduler.add_request(Request("a"))
    run(scheduler, output(new=("a",), a=64), model_output())
    run(scheduler, output(a=32), model_output(tokens=("a",)))
    run(scheduler, output(a=1), model_output(tokens=("a",), ends=("a",)))
    assert [e["name"] for e in events_of(plugin)] == ["queued", "scheduled", "step", "first_token", "step", "finished", "step"]
    steps = events_of(plugin, words.STEP)
    assert [(s["prefill_requests"], s["prefill_tokens"], s["decode_tokens"]) for s in steps] == [
        (1, 64, 0),
        (1, 32, 0),
        (0, 0, 1),
    ]
    (finished,) = events_of(plugin, words.FINISHED)
    assert (finished["status"], finished["output_tokens"]) == ("FINISHED_STOPPED", 2)


def test_a_request_of_one_token_has_a_first_token(plugin: Plugin, scheduler: Scheduler) -> None:
    scheduler.add_request(Request("a"))
    run(scheduler, output(new=("a",), a=96), model_output(tokens=("a",), ends=("a",)))
    assert [e["name"] for e in events_of(plugin)] == ["queued", "scheduled", "first_token", "finished", "step"]


def test_a_preempted_request_is_scheduled_again(plugin: Plugin, scheduler: Scheduler) -> None:
    for name in "ab":
        scheduler.add_request(Request(name))
    run(scheduler, output(new=("a", "b"), a=96, b=96), model_output(tokens=("a", "b")))
    run(scheduler, output(preempted=("b",), a=1), model_output(tokens=("a",)))
    run(scheduler, output(a=1, b=97), model_output(tokens=("a", "b")))
    assert [e["name"] for e in events_of(plugin) if e.get("request") == "b"] == [
        "queued",
        "scheduled",
        "first_token",
        "preempted",
        "scheduled",
    ]


def test_what_a_preempted_request_computes_again_is_counted_apart(plugin: Plugin, scheduler: Scheduler) -> None:
    for name in "ab":
        scheduler.add_request(Request(name))
    run(scheduler, output(new=("a", "b"), a=96, b=96), model_output(tokens=("a", "b")))
    run(scheduler, output(preempted=("b",), a=1), model_output(tokens=("a",)))
    run(scheduler, output(a=1, b=64), model_output(tokens=("a",)))  # in two chunks
    run(scheduler, output(a=1, b=33), model_output(tokens=("a", "b")))
    run(scheduler, output(a=1, b=1), model_output(tokens=("a", "b")))
    steps = events_of(plugin, words.STEP)
    assert [(e["prefill_tokens"], e["resumed_tokens"], e["decode_tokens"], e["preemptions"]) for e in steps] == [
        (192, 0, 0, 0),
        (0, 0, 1, 1),
        (0, 64, 1, 0),
        (0, 33, 1, 0),
        (0, 0, 2, 0),
    ]


def test_what_was_computed_of_a_prompt_before_a_preemption_is_counted_apart(plugin: Plugin, scheduler: Scheduler) -> None:
    scheduler.add_request(Request("a"))
    run(scheduler, output(new=("a",), a=64), model_output())
    run(scheduler, output(preempted=("a",)), model_output())
    run(scheduler, output(a=48), model_output())
    run(scheduler, output(preempted=("a",)), model_output())  # once more, before it is back
    run(scheduler, output(a=80), model_output())
    run(scheduler, output(a=16), model_output(tokens=("a",)))
    assert [(e["prefill_tokens"], e["resumed_tokens"]) for e in events_of(plugin, words.STEP)] == [
        (64, 0),
        (0, 48),
        (16, 64),
        (16, 0),
    ]


def test_a_prompt_whose_kv_was_loaded_and_lost_is_computed_once_more(plugin: Plugin, scheduler: Scheduler) -> None:
    scheduler.add_request(Request("a"))
    loaded = output(new=("a",), a=1)
    loaded.scheduled_new_reqs[0].num_computed_tokens = 95
    run(scheduler, loaded, model_output())
    run(scheduler, output(preempted=("a",)), model_output())
    run(scheduler, output(a=96), model_output(tokens=("a",)))
    assert [(e["prefill_tokens"], e["resumed_tokens"]) for e in events_of(plugin, words.STEP)] == [(1, 0), (0, 96)]


def test_steps_that_run_nothing_are_no_events(plugin: Plugin, scheduler: Scheduler) -> None:
    for _ in range(100):
        run(scheduler, output(), model_output())
    run(scheduler, output(), model_output(landed=("r",)))
    assert [e["landed"] for e in events_of(plugin)] == [True]


def test_a_decode_step_is_one_event_whatever_its_requests(plugin: Plugin, scheduler: Scheduler) -> None:
    names = [f"r{n}" for n in range(200)]
    for name in names:
        scheduler.add_request(Request(name))
    run(scheduler, step_of(dict.fromkeys(names, 8), new=tuple(names)), model_output(tokens=tuple(names)))
    plugin.recorder._events.clear()
    run(scheduler, step_of(dict.fromkeys(names, 1)), model_output(tokens=tuple(names)))
    assert [(e["name"], e["requests"], e["decode_tokens"]) for e in events_of(plugin)] == [("step", 200, 200)]


def test_an_abort_from_outside_is_an_end(plugin: Plugin, scheduler: Scheduler) -> None:
    scheduler.add_request(Request("a"))
    assert scheduler._free_request(scheduler.requests["a"]) == "freed"
    assert [e["name"] for e in events_of(plugin)] == ["queued", "finished"]


@pytest.mark.parametrize(
    ("raised", "clean"), [(None, True), (SystemExit, True), (KeyboardInterrupt, True), (RuntimeError, False)]
)
def test_an_engine_that_shuts_down_says_whether_it_had_failed(
    plugin: Plugin, scheduler: Scheduler, raised: type[BaseException] | None, clean: bool
) -> None:
    """The engine shuts down as EngineCore does.

    That is in a ``finally``, while the exception that ended it propagates.
    """
    try:
        if raised is not None:
            raise raised
    except BaseException:
        assert scheduler.shutdown() == "shut"
    else:
        assert scheduler.shutdown() == "shut"
    made = connector(plugin, Role.WORKER)
    assert made.shutdown() == "shut"  # its parts record no more than it did
    assert [e["clean"] for e in events_of(plugin, words.STOPPING)] == [clean]


@pytest.mark.parametrize(
    ("lines", "clean"),
    [
        ([(logging.INFO, "[shutdown] API server: shutdown triggered")], [True]),
        ([(logging.INFO, "[shutdown] EngineCore: trigger received signal=%s")], [True]),
        (
            [
                (logging.WARNING, "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"),
                (logging.INFO, "[shutdown] API server: shutdown triggered"),
            ],
            [False],
        ),
        ([(logging.ERROR, "EngineCore encountered a fatal error.")], [False]),
        ([(logging.INFO, "Application startup complete."), (logging.INFO, "a prompt: [shutdown] API server")], []),
    ],
    ids=["api-server", "core", "after-its-core-had-died", "fatal", "anything-else"],
)
def test_vllms_own_lines_show_a_requested_end(plugin: Plugin, lines: list[tuple[int, str]], clean: list[bool]) -> None:
    """Read from vLLM's own log lines that the core had to end.

    vLLM 0.32 kills its core so soon after SIGTERM that no hook there is called.
    """
    handler = GuestHandler(plugin.recorder)
    for level, text in lines:
        raised = (RuntimeError, RuntimeError(), None) if level == logging.ERROR else None
        handler.handle(logging.LogRecord("vllm.x", level, "f", 1, text, ("SIGTERM",) if "%s" in text else (), raised))
    assert [e["clean"] for e in events_of(plugin, words.STOPPING)] == clean
    assert len(events_of(plugin, words.LOG)) == sum(level >= logging.WARNING for level, _ in lines)


def test_an_exception_that_was_logged_just_before_is_why_it_ends(plugin: Plugin) -> None:
    made = connector(plugin, Role.WORKER)
    handler = GuestHandler(plugin.recorder)
    try:
        raise RuntimeError
    except RuntimeError:
        failed = logging.LogRecord("vllm", logging.ERROR, "f", 1, "WorkerProc failed.", (), sys.exc_info())
    handler.handle(failed)
    made.shutdown()
    assert [e["clean"] for e in events_of(plugin, words.STOPPING)] == [False]


def test_a_scheduler_without_the_private_method_reports_ends_a_step_later(plugin: Plugin) -> None:
    _, module = modules()
    module.Scheduler._free_request = None
    plugin._watch_schedulers(module)
    made = module.Scheduler(Config())
    made.add_request(Request("a"))
    step = output(new=("a",), a=96)
    made.next = step
    made.schedule()
    step.finished_req_ids = {"a"}
    made.schedule()
    assert [(e["name"], e.get("status")) for e in events_of(plugin) if e["name"] == "finished"] == [("finished", None)]
    assert plugin.recorder._facts["missing"] == ["_free_request"]


# --- the boundary -------------------------------------------------------------------------------------------------------------
def test_whatever_fails_in_us_the_engine_goes_on_and_the_hook_goes_off(plugin: Plugin, scheduler: Scheduler) -> None:
    class Broken(Request):
        @property
        def request_id(self) -> str:
            found: str = self.__dict__["request_id"]
            return found

        @request_id.setter
        def request_id(self, value: str) -> None:
            self.__dict__["request_id"] = value

        @property
        def trace_headers(self) -> Any:
            raise AttributeError("moved in the next version")

        @trace_headers.setter
        def trace_headers(self, value: Any) -> None: ...

    for n in range(FAILURES_ALLOWED + 2):
        scheduler.add_request(Broken(f"r{n}"))
    assert len(scheduler.requests) == FAILURES_ALLOWED + 2
    degraded = events_of(plugin, words.DEGRADED)
    assert [e["hook"] for e in degraded] == ["add_request"] * FAILURES_ALLOWED
    assert [e["off"] for e in degraded] == [False] * (FAILURES_ALLOWED - 1) + [True]


def test_the_engines_own_errors_pass_unchanged(plugin: Plugin, scheduler: Scheduler) -> None:
    run(scheduler, output(), model_output())
    with pytest.raises(KeyError):
        scheduler.update_from_output(output(gone=1), model_output())


def test_a_version_that_was_not_tried_is_warned_of_once(
    plugin: Plugin, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = modules()
    plugin._watch_schedulers(module)
    with caplog.at_level("WARNING"):
        for version in ("0.32.1", "0.33.0"):
            monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
            module.Scheduler(Config())
    assert ["this is 0.33.0" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("broken", ["KVConnectorFactory", "Scheduler"])
def test_an_unknown_engine_degrades_with_one_warning(plugin: Plugin, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    factory, scheduler = modules()
    for module in (factory, scheduler):
        if hasattr(module, broken):
            delattr(module, broken)
    with caplog.at_level("WARNING"):
        plugin._try("connectors", plugin._watch_factory, factory)
        plugin._try("scheduler", plugin._watch_schedulers, scheduler)
    assert len(caplog.records) == 1
    assert "handrail observes less of this engine" in caplog.text
    assert len(plugin.missing) == len(plugin.hooked) == 1


# --- imports ------------------------------------------------------------------------------------------------------------------
def test_a_module_is_waited_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[ModuleType] = []
    when_imported("late_module", seen.append)
    assert "late_module" not in sys.modules
    import late_module  # type: ignore[import-not-found]

    assert seen == [late_module]
    assert (late_module.value, late_module.__spec__.loader.__class__.__name__) == (7, "SourceFileLoader")
    when_imported("late_module", seen.append)
    assert seen == [late_module, late_module]
    monkeypatch.delitem(sys.modules, "late_module")


def test_a_module_that_is_not_there_stays_an_import_error() -> None:
    when_imported("no_such_module_anywhere", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_module_anywhere")


# --- small readers ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "sizes"),
    [([[1, 2], [3]], (2, 1)), ([1, 2, 3], (3,)), ([], ()), (None, ()), (([1],), (1,)), ("x", ())],
)
def test_group_sizes(blocks: Any, sizes: tuple[int, ...]) -> None:
    assert group_sizes(blocks) == sizes


def test_an_offer_keeps_types_and_lengths() -> None:
    offer = read_offer({"do_remote_prefill": True, "remote_engine_id": "x" * 9999, "remote_port": "5600", "remote_host": 5})
    assert (len(offer.peer_engine_id or ""), offer.peer_port, offer.peer_host) == (256, 5600, None)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (None, None),
        (RuntimeError("NIXL_ERR_REMOTE_DISCONNECT"), "NIXL_ERR_REMOTE_DISCONNECT"),
        (ValueError("the prompt was: secret"), "ValueError"),
    ],
)
def test_an_error_is_named_and_never_quoted(error: Any, name: str | None) -> None:
    assert error_name(error) == name
