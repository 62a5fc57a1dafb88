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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from handrail.security.tokens import OPEN, Access
from handrail_cli.access import COLLECTOR, NoRedirects, access, add_access_flags
from handrail_cli.errors import EXIT_USAGE, CliError
from handrail_collector.api.events import Happened, HappenedFilter, happened_from_json
from handrail_collector.api.schema import RequestAnswer, fetch_from_json, row_from_json
from handrail_collector.compare.report import Comparison, from_plain
from handrail_collector.explain.period.question import Question
from handrail_collector.links.question import LinksQuestion
from handrail_collector.rows import FetchRow, RequestRow
from handrail_collector.store.filters import FetchFilter, RequestFilter

DEFAULT_API: Final = "http://127.0.0.1:4380"
API_VARIABLE: Final = "HANDRAIL_API"
ApiQuery = RequestFilter | FetchFilter | HappenedFilter | LinksQuestion | Question
T = TypeVar("T")
_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 256 * 2**20  # no answer is that large; a wrong server might not stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """Answer to one id: one request, several candidates, or similar ids."""

    found: RequestAnswer | None = None
    candidates: Sequence[RequestRow] = ()
    nearest: Sequence[str] = ()


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
        return self._ask("requests", query, lambda answer: [row_from_json(row) for row in answer["requests"]])

    def find(self, any_id: str) -> RequestView:
        status, answer = self._get(f"/api/v1/requests/{urllib.parse.quote(any_id, safe='')}", (200, 300, 404))
        if status == 404:
            return RequestView(nearest=tuple(answer.get("error", {}).get("nearest", ())))
        if status == 300:
            return self._decoded(answer, lambda a: RequestView(candidates=[row_from_json(row) for row in a["candidates"]]))
        return self._decoded(answer, lambda a: RequestView(found=RequestAnswer.from_json(a)))

    def fetches(self, query: FetchFilter) -> list[FetchRow]:
        return self._ask("fetches", query, lambda answer: [fetch_from_json(row) for row in answer["fetches"]])

    def happened(self, wanted: HappenedFilter, now_unix_ns: int) -> list[Happened]:
        return self._ask("events", wanted, lambda answer: [happened_from_json(one) for one in answer["events"]])

    def explain(self, question: Question, now_unix_ns: int) -> Mapping[str, Any]:
        return self._ask("explain", question, dict)

    def links(self, question: LinksQuestion, now_unix_ns: int) -> Mapping[str, Any]:
        return self._ask("links", question, dict)

    def compare(self, parameters: Mapping[str, str]) -> Comparison:
        """Return the answer of ``GET /api/v1/compare``."""
        _, answer = self._get(f"/api/v1/compare?{urllib.parse.urlencode(parameters)}", (200,))
        return self._decoded(answer, lambda a: from_plain(Comparison, a))

    def _ask(self, what: str, query: ApiQuery, decode: Callable[[Any], T]) -> T:
        _, answer = self._get(f"/api/v1/{what}?{urllib.parse.urlencode(query_parameters(query))}", (200,))
        return self._decoded(answer, decode)

    def _decoded(self, answer: Any, decode: Callable[[Any], T]) -> T:
        """Return the decoded answer.

        Raises ``CliError`` if it has another shape, as the answer of another version may.
        """
        try:
            return decode(answer)
        except (ValueError, KeyError, TypeError) as error:
            what = f"the collector's answer is not understood: {error}"
            valid = "a collector of the same version as this command (handrail --version)"
            raise CliError(what=what, where=self._url, valid=valid) from None

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
                what = f"the collector closed the connection ({reason}); it probably does not accept the client certificate"
                raise CliError(what=what, where=self._url, valid=COLLECTOR.let_in(403)) from None
            if isinstance(reason, ConnectionResetError):
                what = f"the collector closed the connection ({reason})"
                raise CliError(what=what, where=self._url, valid="https:// if the collector uses TLS") from None
            valid = f"the address that 'handrail collector' printed, by --api or {API_VARIABLE}; or --data DIR to read its folder"
            raise CliError(what=f"no collector answers: {reason}", where=self._url, valid=valid) from None
        try:
            answer = json.loads(body)
        except ValueError:
            raise CliError(what=f"HTTP {status} without JSON: this server is no Handrail collector", where=self._url) from None
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
        from handrail_collector.explain.devices.timeline_samples import tracked
        from handrail_collector.explain.period.request_comparison import compared

        with self._translate_damage():
            rows = self._reader.find(any_id)
            if not rows:
                return RequestView(nearest=self._reader.near(any_id))
            if len(rows) > 1:
                return RequestView(candidates=rows)
            spans = self._reader.spans(rows[0])
            answer = RequestAnswer(
                row=rows[0],
                fetches=self._reader.fetches_of(rows[0]),
                stalls=self._reader.stalls_of(rows[0]),
                spans=spans,
                baseline=compared(self._reader, rows[0]),
                hardware=tracked(self._reader, rows[0], spans),
            )
            return RequestView(found=answer)

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
        what = "this folder holds no store" if folder.is_dir() else "no such folder"
        raise CliError(what=what, where=str(folder), valid="the --data folder of 'handrail collector', or a copy of it")
    return inside[0]


def not_found(any_id: str, where: str, nearest: Sequence[str]) -> CliError:
    """Return the error for an id that no request has."""
    valid = "a client's X-Request-Id, a response id, an engine's or router's id, a trace id, or the first 6 characters of one"
    return CliError(what=f"no request has the id {any_id!r}", where=where, valid=valid, nearest=tuple(nearest))


def query_parameters(query: ApiQuery) -> dict[str, str]:
    """Encode the query as the API's parameters.

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
    source.add_argument("--api", metavar="URL", help=f"collector to query (default: ${API_VARIABLE}, else {DEFAULT_API})")
    source.add_argument("--data", metavar="DIR", type=Path, help="read the data folder of a collector, or a copy of it, instead")
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
