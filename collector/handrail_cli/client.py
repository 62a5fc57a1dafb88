"""Read rows from a collector's HTTP API, or offline from a store's folder.

Both answer the same questions, so the commands do not know which one they use.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol

from handrail.security.tokens import OPEN, Access
from handrail_cli.access import COLLECTOR, NoRedirects, access, add_access_flags
from handrail_cli.errors import EXIT_USAGE, CliError
from handrail_cli.render.waterfall import SpanView
from handrail_collector.api.events import Happened, HappenedFilter
from handrail_collector.explain.period.question import Question
from handrail_collector.links.question import LinksQuestion
from handrail_collector.rows import FetchRow, RequestRow, StallRow
from handrail_collector.store.filters import FetchFilter, RequestFilter

DEFAULT_API: Final = "http://127.0.0.1:4380"
API_VARIABLE: Final = "HANDRAIL_API"
_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 256 * 2**20  # no answer is that large; a wrong server might not stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """Answer to one id: the row with its spans, several candidates, or similar ids."""

    row: RequestRow | None = None
    provisional: bool = False  # the row may still change
    spans: Sequence[SpanView] = ()
    fetches: Sequence[FetchRow] = ()
    stalls: Sequence[StallRow] = ()
    baseline: Mapping[str, Any] | None = None  # how it compares with the requests around it; None: nothing to compare
    hardware: Mapping[str, Any] | None = None  # activity of GPUs and links meanwhile; None: the source does not know
    candidates: Sequence[RequestRow] = ()
    nearest: Sequence[str] = ()
    answer: Mapping[str, Any] | None = None  # as plain data, for --json


class Backend(Protocol):
    """Source of rows; ``where`` names it in messages.

    Every question raises ``CliError`` when it cannot answer.
    """

    @property
    def where(self) -> str: ...

    def requests(self, query: RequestFilter) -> list[RequestRow]: ...

    def find(self, any_id: str) -> RequestView: ...

    def fetches(self, query: FetchFilter) -> list[FetchRow]: ...

    def happened(self, wanted: HappenedFilter, now_unix_ns: int) -> list[Happened]: ...

    def explain(self, question: Question, now_unix_ns: int) -> Mapping[str, Any]:
        """Explain a period as JSON, see docs/http-api.md."""

    def links(self, question: LinksQuestion, now_unix_ns: int) -> Mapping[str, Any]:
        """Answer the links of a period as JSON, see docs/http-api.md."""

    def close(self) -> None:
        """Release its resources; works twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSpan:
    """Span from JSON, reduced to what is shown."""

    name: str
    role: str
    instance: str
    start_unix_ns: int
    end_unix_ns: int
    status: int
    span_id: str
    parent_span_id: str


class HttpBackend:
    """Backend that queries a running collector."""

    def __init__(self, url: str, access: Access = OPEN) -> None:
        self._url = url.rstrip("/")
        self._headers = dict(access.headers)
        # A proxy of the environment is for the outside world; a collector is near, and the proxy would answer in its place.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), NoRedirects(), urllib.request.HTTPSHandler(context=access.context)
        )

    @property
    def where(self) -> str:
        return self._url

    def requests(self, query: RequestFilter) -> list[RequestRow]:
        from handrail_collector.api.schema import row_from_json

        _, answer = self._get(f"/api/v1/requests?{urllib.parse.urlencode(query_parameters(query))}", (200,))
        return [row_from_json(row) for row in answer["requests"]]

    def find(self, any_id: str) -> RequestView:
        from handrail_collector.api.schema import fetch_from_json, row_from_json, stall_from_json

        status, answer = self._get(f"/api/v1/requests/{urllib.parse.quote(any_id, safe='')}", (200, 300, 404))
        if status == 404:
            return RequestView(nearest=tuple(answer.get("error", {}).get("nearest", ())))
        if status == 300:
            return RequestView(candidates=[row_from_json(row) for row in answer["candidates"]], answer=answer)
        spans = [ShownSpan(**{each.name: span[each.name] for each in fields(ShownSpan)}) for span in answer["spans"]]
        row, provisional = row_from_json(answer["request"]), bool(answer["request"].get("provisional"))
        fetches, baseline = [fetch_from_json(fetch) for fetch in answer.get("fetches", ())], answer.get("baseline")
        stalls = [stall_from_json(stall) for stall in answer.get("stalls", ())]
        hardware = answer.get("hardware")
        return RequestView(
            row=row,
            provisional=provisional,
            spans=spans,
            fetches=fetches,
            stalls=stalls,
            baseline=baseline,
            hardware=hardware,
            answer=answer,
        )

    def fetches(self, query: FetchFilter) -> list[FetchRow]:
        from handrail_collector.api.schema import fetch_from_json

        _, answer = self._get(f"/api/v1/fetches?{urllib.parse.urlencode(query_parameters(query))}", (200,))
        return [fetch_from_json(row) for row in answer["fetches"]]

    def happened(self, wanted: HappenedFilter, now_unix_ns: int) -> list[Happened]:
        from handrail_collector.api.events import happened_from_json

        _, answer = self._get(f"/api/v1/events?{urllib.parse.urlencode(query_parameters(wanted))}", (200,))
        return [happened_from_json(one) for one in answer["events"]]

    def explain(self, question: Question, now_unix_ns: int) -> Mapping[str, Any]:
        given = {name: value for name, value in asdict(question).items() if value is not None and value is not False}
        query = {name: str(value).lower() if value is True else str(value) for name, value in given.items()}
        _, answer = self._get(f"/api/v1/explain?{urllib.parse.urlencode(query)}", (200,))
        found: Mapping[str, Any] = answer
        return found

    def links(self, question: LinksQuestion, now_unix_ns: int) -> Mapping[str, Any]:
        _, answer = self._get(f"/api/v1/links?{urllib.parse.urlencode(query_parameters(question))}", (200,))
        found: Mapping[str, Any] = answer
        return found

    def compare(self, parameters: Mapping[str, str]) -> Any:
        """Return the answer of ``GET /api/v1/compare`` as plain data."""
        return self._get(f"/api/v1/compare?{urllib.parse.urlencode(parameters)}", (200,))[1]

    def close(self) -> None:
        """Release nothing: a connection lives for one question."""

    def _get(self, path: str, wanted: tuple[int, ...]) -> tuple[int, Any]:
        """Return status and JSON body.

        Raises ``CliError`` for any status that is not in ``wanted``, no answer, or no JSON.
        """
        try:
            request = urllib.request.Request(self._url + path, headers=self._headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                status, body = response.status, response.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                status, body = error.code, error.read(_MAX_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, ssl.SSLError):
                raise COLLECTOR.no_tls(self._url, reason) from None
            if isinstance(reason, ConnectionResetError) and self._url.startswith("https://"):
                what = f"it hangs up before it answers ({reason}), as a collector that does not accept our certificate does"
                raise CliError(what=what, where=self._url, valid=COLLECTOR.let_in(403)) from None
            if isinstance(reason, ConnectionResetError):
                what = f"it hangs up before it answers ({reason})"
                raise CliError(what=what, where=self._url, valid="https:// where the collector speaks TLS") from None
            valid = f"the address that 'handrail collector' printed, by --api or {API_VARIABLE}; or --data DIR to read its folder"
            raise CliError(what=f"no collector answers: {reason}", where=self._url, valid=valid) from None
        try:
            answer = json.loads(body)
        except ValueError:
            raise CliError(what=f"HTTP {status} without JSON: that is no Handrail collector", where=self._url) from None
        if status in wanted:
            return status, answer
        report = answer.get("error", {}) if isinstance(answer, dict) else {}
        raise CliError(
            what=str(report.get("what") or f"the collector answered HTTP {status}"),
            where=str(report.get("where") or self._url),
            valid=COLLECTOR.let_in(status) or str(report.get("valid") or ""),
            nearest=tuple(report.get("nearest") or ()),
            exit_code=EXIT_USAGE if status == 400 else 1,
        )


class StoreBackend:
    """Backend that reads a collector's data folder without the collector.

    The folder may also be the store inside it, or a copy.
    Rows that the collector has not flushed yet are missing.
    """

    def __init__(self, folder: Path) -> None:
        # Only here: the store imports pyarrow and DuckDB, which a query to an API does not need.
        from handrail_collector.store.read import StoreReader

        self._folder = folder
        self._reader = StoreReader(store_root(folder))

    def close(self) -> None:
        self._reader.close()

    @property
    def where(self) -> str:
        return str(self._folder)

    def requests(self, query: RequestFilter) -> list[RequestRow]:
        with self._translate_damage():
            return self._reader.requests(query)

    def find(self, any_id: str) -> RequestView:
        from handrail_collector.api.schema import fetch_to_json, row_to_json, span_to_json, stall_to_json
        from handrail_collector.explain.devices.timeline_samples import tracked
        from handrail_collector.explain.period.compare_request import compared

        with self._translate_damage():
            rows = self._reader.find(any_id)
            if not rows:
                return RequestView(nearest=self._reader.near(any_id))
            if len(rows) > 1:
                plain = {"candidates": [row_to_json(row) for row in rows], "matches": len(rows)}
                return RequestView(candidates=rows, answer=plain)
            spans = self._reader.spans(rows[0])
            fetches = self._reader.fetches_of(rows[0])
            stalls = self._reader.stalls_of(rows[0])
            baseline = compared(self._reader, rows[0])
            hardware = tracked(self._reader, rows[0], spans)
        answer = {
            "request": row_to_json(rows[0]),
            "fetches": [fetch_to_json(fetch) for fetch in fetches],
            "stalls": [stall_to_json(stall) for stall in stalls],
            "spans": [span_to_json(span) for span in spans],
            "matches": 1,
            "baseline": baseline,
            "hardware": hardware,
        }
        return RequestView(
            row=rows[0], spans=spans, fetches=fetches, stalls=stalls, baseline=baseline, hardware=hardware, answer=answer
        )

    def fetches(self, query: FetchFilter) -> list[FetchRow]:
        with self._translate_damage():
            return self._reader.fetches(query)

    def happened(self, wanted: HappenedFilter, now_unix_ns: int) -> list[Happened]:
        from handrail_collector.store.queries.events import happened

        with self._translate_damage():
            return happened(self._reader, wanted, now_unix_ns)

    def explain(self, question: Question, now_unix_ns: int) -> Mapping[str, Any]:
        from handrail_collector.explain.period.answer import answered

        with self._translate_damage():
            return answered(self._reader, question, now_unix_ns)

    def links(self, question: LinksQuestion, now_unix_ns: int) -> Mapping[str, Any]:
        from handrail_collector.links.answer import answered

        with self._translate_damage():
            return answered(self._reader, question, now_unix_ns)

    @contextmanager
    def _translate_damage(self) -> Iterator[None]:
        from handrail_collector.store.manifest import StoreDamagedError

        try:
            yield
        except StoreDamagedError as error:
            raise CliError(what=str(error), where=self.where) from None


def store_root(folder: Path) -> Path:
    """Return the store in a collector's data folder, or the folder if it is one.

    Raises ``CliError``.
    """
    from handrail_collector.store.manifest import MANIFEST, StoreDamagedError, require_new

    inside = [root for root in (folder / "store", folder) if (root / MANIFEST).is_file()]
    if not inside:
        try:
            require_new(folder / "store")
            require_new(folder)
        except StoreDamagedError as error:
            raise CliError(what=str(error), where=str(folder)) from None
        what = "no store here (yet)" if folder.is_dir() else "no such folder"
        raise CliError(what=what, where=str(folder), valid="the --data folder of 'handrail collector', or a copy of it")
    return inside[0]


def not_found(any_id: str, where: str, nearest: Sequence[str]) -> CliError:
    """Return the error for an id that no request has."""
    valid = "a client's X-Request-Id, a response id, an engine's or router's id, a trace id, or the first 6 characters of one"
    return CliError(what=f"no request is known by {any_id!r}", where=where, valid=valid, nearest=tuple(nearest))


def query_parameters(query: RequestFilter | FetchFilter | HappenedFilter | LinksQuestion) -> dict[str, str]:
    """Encode the filter as the API's query parameters.

    Only values that differ from the defaults appear.
    """
    defaults = type(query)()
    found: dict[str, str] = {}
    for each in fields(query):
        value = getattr(query, each.name)
        if value != getattr(defaults, each.name) and value is not None:
            found[each.name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--api``, ``--data`` and the access flags for a collector."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--api", metavar="URL", help=f"collector to ask (default: ${API_VARIABLE}, else {DEFAULT_API})")
    source.add_argument("--data", metavar="DIR", type=Path, help="read a collector's data folder instead, or a copy of it")
    add_access_flags(parser)


def row_source(arguments: argparse.Namespace) -> Backend:
    """Return the source that the flags name.

    Raises ``CliError``.
    """
    if arguments.data is not None:
        return StoreBackend(arguments.data)
    url = arguments.api or os.environ.get(API_VARIABLE) or DEFAULT_API
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    return HttpBackend(url, access(arguments, url))
