"""Take Handrail out of a running engine and put it back (a vLLM plugin).

Only ``make bench-overhead`` uses it.
Two processes of one program differ by some per cent because of their memory layout, which is more than the plugin costs. So
both arms use one process.
Off means: the scheduler, the connector and NIXL's objects have their own methods again, the middleware passes every call on,
and the recorder's thread has ended.
One call of that middleware a request remains, and this thread, which waits.
A process listens on ``$OVERHEAD_SWITCHES/<pid>.sock``; it answers "on" and "off" with what it switched.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

FOLDER_ENV = "OVERHEAD_SWITCHES"
_MISSING: Any = object()
_started = False


class Switch:
    """The attributes that Handrail set on this process's objects, and the old values."""

    def __init__(self) -> None:
        self.wrapped: list[tuple[Any, str, Any, Any]] = []  # object, name, its old entry in __dict__, Handrail's value
        self.connectors: list[tuple[Any, type]] = []  # objects with their observed class
        self.middleware: list[tuple[type, Any]] = []
        self.is_on = True

    def note(self, function: Callable[..., Any], objects: Callable[..., list[Any]]) -> Callable[..., Any]:
        """Record what ``function`` sets on ``objects`` when it wraps their methods."""

        def noting(*given: Any, **named: Any) -> Any:
            before = [(each, dict(vars(each))) for each in objects(*given)]
            result = function(*given, **named)
            for each, had in before:
                now = vars(each)
                changed = [name for name in now if callable(now[name]) and now[name] is not had.get(name)]
                self.wrapped += [(each, name, had.get(name, _MISSING), now[name]) for name in changed]
            return result

        return noting

    def turn(self, on: bool, plugin: Any) -> dict[str, Any]:
        if on != self.is_on:
            self.is_on = on
            for each, name, was, with_it in self.wrapped:
                if on:
                    setattr(each, name, with_it)
                elif was is _MISSING:
                    delattr(each, name)
                else:
                    setattr(each, name, was)
            for connector, observed in self.connectors:
                connector.__class__ = observed if on else observed.__mro__[1]
            for kind, call in self.middleware:
                kind.__call__ = call if on else _straight  # type: ignore[method-assign]
            self._recorder(on, plugin.recorder)
        return {
            "pid": os.getpid(),
            "kind": plugin.recorder.kind,
            "on": self.is_on,
            "methods": len(self.wrapped),
            "connectors": len(self.connectors),
            "middleware": len(self.middleware),
            "datagrams": plugin.recorder._sequence,
        }

    @staticmethod
    def _recorder(on: bool, recorder: Any) -> None:
        if not on:
            recorder.stop()
        elif recorder.kind != "unknown":
            recorder._stop = threading.Event()
            recorder.start(recorder.kind)


async def _straight(self: Any, scope: Any, receive: Any, send: Any) -> None:
    await self._app(scope, receive, send)


def _serve(switch: Switch, plugin: Any) -> None:
    path = os.path.join(os.environ[FOLDER_ENV], f"{os.getpid()}.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        while True:
            requested_socket, _ = listening.accept()
            with requested_socket:
                try:
                    answer = switch.turn(requested_socket.recv(16) == b"on", plugin)
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                requested_socket.sendall(json.dumps(answer).encode())


def register() -> None:
    """Register the switch; vLLM calls this in each of its processes."""
    global _started
    if _started or FOLDER_ENV not in os.environ:
        return
    _started = True
    from handrail.plugin import middleware
    from handrail.plugin import mixin as observed
    from handrail.plugin import plugin as installed

    guest: Any = installed
    mixin: Any = observed
    guest.register()
    plugin = guest._installed
    assert plugin is not None, "HANDRAIL_SOCKET is not set"
    switch = Switch()
    begin = mixin._begin

    def began(connector: Any, *given: Any) -> None:
        switch.connectors.append((connector, type(connector)))
        begin(connector, *given)

    mixin._begin = began
    mixin.watch_nixl = switch.note(mixin.watch_nixl, lambda worker, *_: [worker, worker.nixl_wrapper])
    guest.watch_scheduler = switch.note(guest.watch_scheduler, lambda scheduler, *_: [scheduler])
    switch.middleware.append((middleware.Handrail, middleware.Handrail.__call__))

    def listen() -> None:
        threading.Thread(target=_serve, args=(switch, plugin), name="overhead-switch", daemon=True).start()

    os.register_at_fork(after_in_child=listen)
    listen()
