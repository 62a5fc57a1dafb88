"""The records that real sidecars would make of a virtual fleet, and their arrival.

Ids, parents and connector keys are those of a real fleet, so that the real rules make the joins. The client sends an
``X-Request-Id`` and no ``traceparent``, every proxy continues the trace, vLLM's span is below the proxy in front of it, and D
reads the KV that P published.
Exporters send as the real ones do: a sidecar twice a second, vLLM's batch processor every five seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import Final

from handrail.identity import derive_trace_id
from handrail.metrics.exponential_histogram import GapSketch
from handrail.records import EngineRequest, Exchange, Gaps, KvParams, Outcome, Process, Role, RouterCall, Source, SpanIds
from handrail.stalls import Stalls, StallWatch, marked
from handrail.wire.engines.vllm import NEVER_SCHEDULED
from handrail_collector.stitch.engine_activity import Activities
from handrail_collector.stitch.evidence import Item
from handrail_sim.emulator.faults import Fault
from handrail_sim.emulator.observe import (
    EngineObservation,
    HostClock,
    Observation,
    ProxyObservation,
    RouterObservation,
    clocks,
    observe,
)
from handrail_sim.emulator.observe_plugin import observe_plugin
from handrail_sim.emulator.scenario import Scenario
from handrail_sim.emulator.simulate import Flight, Ran
from handrail_sim.virtual.engines import engine_records
from handrail_sim.virtual.plugin import PluginRecords

PROXY_EVERY_NS: Final = 500_000_000
ENGINE_EVERY_NS: Final = 5_000_000_000
_PATH: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class TimedRecord:
    """A request record and when the collector receives it.

    ``received_unix_ns``: by the collector's own right clock.
    """

    received_unix_ns: int
    record: Item


@dataclass(frozen=True, slots=True)
class ArrivedOfEngine:
    """An engine record and when the collector receives it, as in ``TimedRecord``."""

    received_unix_ns: int
    record: Activities


def arrivals(
    scenario: Scenario,
    flights: Sequence[Flight],
    faults: Sequence[Fault],
    *,
    seed: int,
    started_unix_ns: int,
    plugin: bool = False,
) -> list[TimedRecord]:
    """Build all request records that a collector receives of a run, in that order.

    ``plugin``: the engines have one. A client that still waits when the run is over gives up then: its proxies see a disconnect.
    """
    fleet = _Fleet(scenario, seed, started_unix_ns, over_ns(flights))
    by_host = clocks(scenario, faults, started_unix_ns)
    made = [one for flight in flights for one in fleet.records(flight, observe(scenario, flight, faults, by_host), by_host)]
    if plugin:
        made += [one for flight in flights for one in fleet.plugin_records(flight, by_host)]
    made.sort(key=lambda one: one.received_unix_ns)
    return made


def engine_arrivals(
    scenario: Scenario, ran: Ran, faults: Sequence[Fault], *, seed: int, started_unix_ns: int
) -> list[ArrivedOfEngine]:
    """Build the records of plugins and samplers that belong to no single request.

    They are in the order in which the collector receives them.
    """
    fleet = _Fleet(scenario, seed, started_unix_ns, over_ns(ran.flights))
    made = list(fleet.engine_records(ran, clocks(scenario, faults, started_unix_ns)))
    made.sort(key=lambda one: one.received_unix_ns)
    return made


def over_ns(flights: Sequence[Flight]) -> int:
    """Return when the run is over.

    Its last request has ended. Where some hang, everything else that happens has happened.
    """
    last = max((flight.end_ns for flight in flights if flight.end_ns is not None), default=0)
    last = max([last, *(flight.plan.arrival.at_ns for flight in flights)])
    return last + (_PATIENCE_NS if any(flight.end_ns is None for flight in flights) else 0)


_PATIENCE_NS: Final = 60_000_000_000


@dataclass(slots=True)
class _Request:
    """The ids of one request, which all of its records share."""

    trace_id: str
    edge: str
    prefill_parent: str
    decode_parent: str
    kv: KvParams | None
    at: dict[str, str] = field(default_factory=dict)  # host: span id of the proxy in front of it


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The gaps of one stream."""

    gaps: Gaps | None = None
    stalls: Stalls | None = None


class _Fleet:
    """The processes that report, and their ids."""

    def __init__(self, scenario: Scenario, seed: int, started_unix_ns: int, over_ns: int) -> None:
        self._scenario = scenario
        self._random = Random(f"ids-{seed}")
        self._started_unix_ns = started_unix_ns
        self._over_ns = over_ns
        names = scenario.hosts()
        roles = dict.fromkeys(names.prefill, Role.COLLOCATED if names.collocated else Role.PREFILL)
        roles |= {} if names.collocated else dict.fromkeys(names.decode, Role.DECODE)
        roles |= {"edge": Role.EDGE, "router": Role.ROUTER}
        self._processes: Mapping[str, Process] = {
            host: Process(role=role, instance=f"{host}:8000", host=host, host_name=host, service=f"handrail-{role.value}")
            for host, role in roles.items()
        }
        self._engine_ids = {host: f"{self._random.getrandbits(128):032x}" for host in names.prefill}
        self._published: dict[str, KvParams | None] = {}
        self._last_gaps: tuple[tuple[int, ...], Gaps | None] = ((), None)

    def records(
        self, flight: Flight, statement: Sequence[Observation], by_host: Mapping[str, HostClock]
    ) -> Iterator[TimedRecord]:
        request = self._request(flight)
        for one in statement:
            if isinstance(one, ProxyObservation):
                yield self._arrives(one.reported_ns, PROXY_EVERY_NS, self._exchange(flight, one, request))
            elif isinstance(one, EngineObservation):
                yield self._arrives(one.reported_ns, ENGINE_EVERY_NS, self._engine(one, request))
            else:
                yield self._arrives(one.reported_ns, ENGINE_EVERY_NS, self._call(one, request))

    def plugin_records(self, flight: Flight, by_host: Mapping[str, HostClock]) -> Iterator[TimedRecord]:
        """Build the plugin's records of a flight.

        Call it after ``records`` of all flights, so that their ids are the same with and without a plugin.
        """
        made = PluginRecords(self._processes, self._engine_ids, self._span_id)
        for one in observe_plugin(self._scenario, flight, by_host, self._over_ns):
            yield self._arrives(one.reported_ns, PROXY_EVERY_NS, made.record(one, self._published[flight.id]))

    def engine_records(self, ran: Ran, by_host: Mapping[str, HostClock]) -> Iterator[ArrivedOfEngine]:
        """Build the engine records that belong to no single request."""
        for reported_reported_ns, record in engine_records(ran, self._processes, by_host, self._over_ns):
            yield ArrivedOfEngine(self._started_unix_ns + (reported_reported_ns // PROXY_EVERY_NS + 1) * PROXY_EVERY_NS, record)

    def _arrives(self, reported_reported_ns: int | None, every_ns: int, record: Item) -> TimedRecord:
        """Send a record with the next batch of its exporter."""
        statement = self._over_ns if reported_reported_ns is None else reported_reported_ns
        return TimedRecord(self._started_unix_ns + (statement // every_ns + 1) * every_ns, record)

    def _span_id(self) -> str:
        return f"{self._random.getrandbits(64) or 1:016x}"

    def _request(self, flight: Flight) -> _Request:
        edge, split = self._span_id(), flight.plan.prefill_host != flight.plan.decode_host
        calls = [self._span_id() for _ in range(3)] if self._scenario.router_traces else []
        published = None
        if split:
            published = KvParams(
                do_remote_prefill=True,
                do_remote_decode=False,
                remote_engine_id=self._engine_ids[flight.plan.prefill_host],
                remote_request_id=f"cmpl-{flight.id}-0-{self._random.getrandbits(32):08x}",
                remote_num_tokens=flight.plan.arrival.prompt_tokens,
                transfer_mode="pull",
            )
        prefill, decode = calls[1:] or (edge, edge)
        self._published[flight.id] = published
        request = _Request(derive_trace_id(flight.id), edge, prefill, decode, published)
        if calls:
            request.at |= {"server": calls[0], "prefill": calls[1], "decode": calls[2]}
        return request

    def _exchange(self, flight: Flight, proxy_observation: ProxyObservation, request: _Request) -> Exchange:
        process = self._processes[proxy_observation.host]
        prefills, decodes = process.role is Role.PREFILL, process.role is Role.DECODE
        failed = proxy_observation.error or proxy_observation.status >= 400
        gaps = _Gaps()
        if process.role is Role.EDGE:
            span, parent = request.edge, ""
        else:
            span, parent = self._span_id(), request.prefill_parent if prefills else request.decode_parent
            request.at[proxy_observation.host] = span
        duration_ns = proxy_observation.end_ns
        if duration_ns is None:
            duration_ns = max(
                proxy_observation.first_token_ns or 0,
                self._over_ns + self._started_unix_ns - proxy_observation.arrival_unix_ns,
                0,
            )
        if not prefills:
            gaps = self._gaps(proxy_observation, duration_ns)
        return Exchange(
            process=process,
            source=Source.PROXY,
            ids=SpanIds(trace_id=request.trace_id, span_id=span, parent_span_id=parent, flags=1),
            arrival_unix_ns=proxy_observation.arrival_unix_ns,
            duration_ns=duration_ns,
            outcome=_outcome(proxy_observation),
            error_type="InternalServerError" if failed else None,
            path=_PATH,
            operation="text_completion",
            trace_origin="derived" if process.role is Role.EDGE else "inbound",
            request_id=proxy_observation.request_id,
            response_id=f"cmpl-{proxy_observation.request_id}" if proxy_observation.end_ns is not None and not failed else None,
            model=self._scenario.model,
            choices=1,
            stream=not prefills,
            stream_requested=not prefills,
            status=proxy_observation.status,
            ttfb_ns=proxy_observation.end_ns if prefills else proxy_observation.first_token_ns,
            ttft_token_ns=proxy_observation.first_token_ns if not proxy_observation.error else None,
            ttft_text_ns=proxy_observation.first_token_ns if not proxy_observation.error else None,
            gaps=gaps.gaps,
            stalls=gaps.stalls,
            prompt_tokens=proxy_observation.prompt_tokens,
            output_tokens=proxy_observation.completion_tokens,
            cached_tokens=proxy_observation.cached_tokens,
            finish_reasons=("length",) if proxy_observation.end_ns is not None and not failed else (),
            kv_in=request.kv if decodes else None,
            kv_out=request.kv if prefills and proxy_observation.end_ns is not None and not failed else None,
        )

    def _gaps(self, proxy_observation: ProxyObservation, duration_ns: int) -> _Gaps:
        """Sketch the gaps of a stream.

        The edge and D see the same gaps unless their clocks drift, so they share one sketch.
        """
        gaps = proxy_observation.gaps_ns
        if not gaps:
            return _Gaps()
        known, made = self._last_gaps
        if known != gaps or made is None:
            sketch = GapSketch()
            sketch.extend(list(gaps))
            made = Gaps(
                unit="chunk",
                count=len(gaps),
                sum_ns=sketch.sum_ns,
                max_ns=max(gaps),
                max_at_ns=0,
                sketch=sketch.encode(),
            )
            self._last_gaps = gaps, made
        ends = list(accumulate(gaps, initial=proxy_observation.first_token_ns or 0))[1:]
        watch = StallWatch()
        watch.extend(gaps, ends)
        stalls = watch.stalls()
        largest_at_ns = min(ends[gaps.index(made.max_ns)], duration_ns)
        return _Gaps(
            replace(made, max_at_ns=largest_at_ns), marked(stalls, proxy_observation.held_ns, ()) if stalls is not None else None
        )

    def _engine(self, engine_observation: EngineObservation, request: _Request) -> EngineRequest:
        """Build the record that the reader of vLLM's spans would make.

        The figures of a request without a token are left out, since they mean nothing.
        """
        scheduled = engine_observation.queue_ns >= 0
        made = scheduled and engine_observation.completion_tokens > 0
        return EngineRequest(
            process=self._processes[engine_observation.host],
            source=Source.OTLP,
            ids=SpanIds(
                trace_id=request.trace_id, span_id=self._span_id(), parent_span_id=request.at[engine_observation.host], flags=1
            ),
            engine="vllm",
            request_id=f"cmpl-{engine_observation.request_id}-0",
            start_unix_ns=engine_observation.arrival_unix_ns,
            end_unix_ns=engine_observation.end_unix_ns,
            ttft_ns=engine_observation.ttft_ns if made else None,
            e2e_ns=engine_observation.end_unix_ns - engine_observation.arrival_unix_ns,
            queue_ns=engine_observation.queue_ns if made else None,
            prefill_ns=engine_observation.prefill_ns if made else None,
            decode_ns=engine_observation.decode_ns if made else None,
            prompt_tokens=engine_observation.prompt_tokens,
            output_tokens=engine_observation.completion_tokens,
            outcome=(Outcome.OK if engine_observation.completion_tokens else Outcome.UNKNOWN) if scheduled else Outcome.ABORTED,
            dropped_attributes=() if scheduled else NEVER_SCHEDULED,
        )

    def _call(self, router_observation: RouterObservation, request: _Request) -> RouterCall:
        server = router_observation.leg == "server"
        return RouterCall(
            process=self._processes[router_observation.host],
            source=Source.OTLP,
            ids=SpanIds(
                trace_id=request.trace_id,
                span_id=request.at[router_observation.leg],
                parent_span_id=request.edge if server else request.at["server"],
                flags=1,
            ),
            router="vllm-router",
            kind="server" if server else "client",
            start_unix_ns=router_observation.start_unix_ns,
            end_unix_ns=router_observation.end_unix_ns if server else None,  # the ends of its calls are wrong
            phase=None if server else Role(router_observation.leg),
            request_id=router_observation.request_id,
            peer=self._processes[router_observation.peer].instance if router_observation.peer else None,
            path=_PATH,
            status=200,
        )


def _outcome(proxy_observation: ProxyObservation) -> Outcome:
    if proxy_observation.status >= 400:
        return Outcome.HTTP_ERROR
    if proxy_observation.error:
        return Outcome.STREAM_ERROR
    return Outcome.OK if proxy_observation.end_ns is not None else Outcome.CLIENT_DISCONNECT
