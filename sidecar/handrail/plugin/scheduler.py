"""Observe vLLM's scheduler object through the methods of its interface.

The interface is ``SchedulerInterface`` (v1/core/sched/interface.py, seen on 0.32): ``add_request``, ``schedule``,
``update_from_output``, ``shutdown``. Wrapping the finished object reaches every subclass and leaves the classes as they are.
One private member is wrapped where it exists: ``_free_request`` (the moment a request ends).
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from handrail.plugin.events import FINISHED, FIRST_TOKEN, PREEMPTED, QUEUED, SCHEDULED, STEP
from handrail.plugin.guard import HookGuard

MAX_STEPS_IN_FLIGHT: Final = 64
MOST_DECODED: Final = 16  # tokens of one request in a step: its new one and drafts; more are computed once more


class SchedulerWatch:
    """Observer of one scheduler.

    A decode-only step costs one event, whatever the number of its requests.
    """

    def __init__(self, scheduler: Any, guard: HookGuard) -> None:
        self._scheduler = scheduler
        self._record = guard.recorder.record
        self._first_due: dict[str, int] = {}  # scheduled, no token yet: of how many of its tokens the KV is here
        self._lost: dict[str, int] = {}  # of those that were preempted: of how many tokens the KV was here before
        self._preempted: set[str] = set()
        self._resumed: set[str] = set()  # preempted before, and computing again what was lost
        self._clean_ups: set[str] = set()
        self._steps: deque[tuple[Any, int, int, int, int, int]] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self.last_step_ns: int | None = None
        self.frees_seen = False

    def life(self) -> tuple[int | None, int | None]:
        """Time of the last step, and the number of unfinished requests.

        The recorder's thread reads it.
        """
        return self.last_step_ns, self._scheduler.get_num_unfinished_requests()

    def added(self, request: Any) -> None:
        if getattr(request, "abort_immediately", False):  # vLLM's own clean-up of a request that it refused
            self._clean_ups.add(request.request_id)
            return
        headers = request.trace_headers
        self._record(
            (
                QUEUED,
                time.monotonic_ns(),
                request.request_id,
                int(request.arrival_time * 1e9),
                request.num_prompt_tokens,
                headers.get("traceparent") if headers else None,
            )
        )

    def scheduled(self, output: Any, begin_ns: int) -> None:
        """Record a scheduled step.

        Looks at requests one by one only where they are new, resumed, or without a first token.
        """
        now = time.monotonic_ns()
        self.last_step_ns = now
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._first_due[new.req_id] = getattr(new, "num_computed_tokens", 0)
            self._say_scheduled(now, new.req_id)
        preempted = output.preempted_req_ids or ()
        for request_id in preempted:
            self._preempted.add(request_id)
            if request_id in self._first_due:
                self._lost[request_id] = max(self._first_due[request_id], self._lost.get(request_id, 0))
                self._first_due[request_id] = 0
            self._record((PREEMPTED, now, request_id))
        if self._preempted:
            for request_id in [r for r in self._preempted if r in counts and r not in preempted]:
                self._preempted.discard(request_id)
                self._resumed.add(request_id)
                self._say_scheduled(now, request_id)
        if not self.frees_seen:
            for request_id in output.finished_req_ids:
                self._end(request_id)
                self._record((FINISHED, now, request_id, None, None))
        prefills = tokens = 0
        again = self._computed_again(counts) if self._resumed else 0
        for request_id, here in self._first_due.items():
            if (count := counts.get(request_id)) is not None:
                prefills += 1
                lost = min(count, max(0, self._lost.get(request_id, 0) - here)) if self._lost else 0
                tokens += count - lost
                again += lost
                self._first_due[request_id] = here + count
        self._steps.append((output, begin_ns, prefills, tokens, again, len(preempted)))

    def _computed_again(self, counts: Any) -> int:
        """Tokens of this step that are computed again.

        They belong to streams that were preempted, until these have caught up.
        """
        tokens = 0
        for request_id in tuple(self._resumed):
            count = counts.get(request_id, 0)
            if request_id not in self._first_due and count > MOST_DECODED:
                tokens += count
            elif count:
                self._resumed.discard(request_id)
        return tokens

    def stepped(self, output: Any, landed: bool) -> None:
        """Record that a step's output has been processed.

        A step that ran nothing is no event: an engine that waits for KV makes many.
        """
        now = time.monotonic_ns()
        self.last_step_ns = now
        requests = self._scheduler.requests
        if self._first_due:
            for request_id in [r for r in self._first_due if self._has_token(requests.get(r))]:
                del self._first_due[request_id]
                self._lost.pop(request_id, None)
                self._record((FIRST_TOKEN, now, request_id))
        while self._steps:
            found, begin_ns, prefills, prefill_tokens, again, preemptions = self._steps.popleft()
            if found is output:
                break
        else:
            return
        total = output.total_num_scheduled_tokens
        if total or landed:
            running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
            count = len(output.num_scheduled_tokens)
            decode = total - prefill_tokens - again
            ran = (count, prefills, prefill_tokens, decode, preemptions, running, waiting, landed, again)
            self._record((STEP, now, begin_ns, *ran))

    def freed(self, request: Any) -> None:
        """Record that a request has ended: in a step, or by an abort."""
        now = time.monotonic_ns()
        request_id, output_tokens = request.request_id, request.num_output_tokens
        if request_id in self._clean_ups:
            self._clean_ups.discard(request_id)
            return
        if request_id in self._first_due and output_tokens:
            self._record((FIRST_TOKEN, now, request_id))
        self._end(request_id)
        self._record((FINISHED, now, request_id, request.status.name, output_tokens))

    def _say_scheduled(self, now: int, request_id: str) -> None:
        request = self._scheduler.requests.get(request_id)
        stats = getattr(request, "prefill_stats", None)
        cached = getattr(stats, "num_local_cached_tokens", None)
        external = getattr(stats, "num_external_cached_tokens", None)
        self._record((SCHEDULED, now, request_id, cached, external))

    def _end(self, request_id: str) -> None:
        self._first_due.pop(request_id, None)
        self._lost.pop(request_id, None)
        self._preempted.discard(request_id)
        self._resumed.discard(request_id)

    @staticmethod
    def _has_token(request: Any) -> bool:
        return request is not None and request.num_output_tokens > 0


def watch_scheduler(scheduler: Any, guard: HookGuard) -> list[str]:
    """Wrap ``scheduler``'s methods and return the names of those that exist.

    It raises no exception of the engine's; the engine's own calls stay.
    """
    watch = SchedulerWatch(scheduler, guard)
    add, schedule, update = scheduler.add_request, scheduler.schedule, scheduler.update_from_output
    clock = time.monotonic_ns

    def add_request(request: Any, *rest: Any, **named: Any) -> Any:
        guard("add_request", watch.added, request)
        return add(request, *rest, **named)

    def schedule_step(*given: Any, **named: Any) -> Any:
        begin_ns = clock()
        output = schedule(*given, **named)
        guard("schedule", watch.scheduled, output, begin_ns)
        return output

    def update_from_output(output: Any, model_output: Any, *rest: Any, **named: Any) -> Any:
        result = update(output, model_output, *rest, **named)
        kv = getattr(model_output, "kv_connector_output", None)
        landed = kv is not None and bool(getattr(kv, "finished_recving", None))
        guard("update_from_output", watch.stepped, output, landed)
        return result

    scheduler.add_request = add_request
    scheduler.schedule = schedule_step
    scheduler.update_from_output = update_from_output
    hooked = ["add_request", "schedule", "update_from_output"]
    shutdown = getattr(scheduler, "shutdown", None)
    if shutdown is not None:

        def shut_down(*given: Any, **named: Any) -> Any:
            guard("shutdown", guard.recorder.say_stopping)
            return shutdown(*given, **named)

        scheduler.shutdown = shut_down
        hooked.append("shutdown")
    free = getattr(scheduler, "_free_request", None)
    if free is not None:

        def free_request(request: Any, *rest: Any, **named: Any) -> Any:
            guard("_free_request", watch.freed, request)
            return free(request, *rest, **named)

        scheduler._free_request = free_request
        watch.frees_seen = True
        hooked.append("_free_request")
    guard.recorder.life = watch.life
    return hooked
