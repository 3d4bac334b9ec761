"""ASGI middleware: answers probes, counts every other request, and puts the load on responses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .load import Load, Request
from .tracker import Outcome

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PREFIX = b"/prequal/"
PROBE_PATH = b"/prequal/probe"
#: Content-Length above which a response is a large download, bytes.
LARGE_BODY = 1 << 20
OURS = (b"x-prequal-load",)
ORCA = (b"endpoint-load-metrics", b"endpoint-load-metrics-bin")


class Middleware:
    """Wraps an application so that it reports its load. WebSockets count as streams."""

    def __init__(self, app: App, load: Load) -> None:
        self._app = app
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            path = scope.get("raw_path") or scope["path"].encode()
            path = path.partition(b"?")[0]
            if not path.startswith(PREFIX):
                await Call(self._load, receive, send).run(self._app, scope)
            elif path != PROBE_PATH:
                await plain(send, 404, b"not found\n")
            elif scope["method"] not in ("GET", "HEAD"):
                await plain(send, 405, b"probes use GET or HEAD\n", (b"allow", b"GET, HEAD"))
            else:
                await self._answer(scope, send)

    async def _answer(self, scope: Scope, send: Send) -> None:
        report = self._load._report(None, False)
        headers = [
            (b"x-prequal-load", report.header().encode()),
            (b"x-prequal-rif", str(report.rif).encode()),
            (b"cache-control", b"no-store"),
        ]
        if report.latency_us is not None:
            headers.append((b"x-prequal-latency-us", str(report.latency_us).encode()))
        body = b""
        if any(name == b"accept" and b"application/json" in value for name, value in scope["headers"]):
            headers.append((b"content-type", b"application/json"))
            body = report.json(time.time_ns() // 1_000_000).encode()
        await reply(send, 200, headers, body)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._load.start()
        request.stream()
        outcome = Outcome.STREAMING
        try:
            await self._app(scope, receive, send)
        except Exception:
            outcome = Outcome.FAILURE
            raise
        finally:
            request.finish(outcome)


class Call:
    """One request on its way through the application."""

    def __init__(self, load: Load, receive: Receive, send: Send) -> None:
        self._load = load
        self._receive_from = receive
        self._send_to = send
        self._request: Request = load.start()
        #: Outcome according to the head of the response; None before the head.
        self._verdict: Outcome | None = None
        self._gone = False

    async def run(self, app: App, scope: Scope) -> None:
        # Remains the outcome if the task is cancelled.
        outcome = Outcome.ABORTED
        try:
            await app(scope, self._receive, self._send)
            # If the response has not ended by now, the request has failed, unless its client has left.
            outcome = Outcome.FAILURE
        except Exception:
            outcome = Outcome.FAILURE
            raise
        finally:
            if self._verdict == Outcome.STREAMING:
                outcome = Outcome.STREAMING
            elif self._gone:
                outcome = Outcome.ABORTED
            self._request.finish(outcome)

    async def _receive(self) -> Message:
        message = await self._receive_from()
        if message["type"] == "http.disconnect":
            self._gone = True
        return message

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = self._head(message)
            await self._send_to(message)
            return
        self._request.client_waits()
        try:
            await self._send_to(message)
        finally:
            self._request.client_is_back()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            gone = self._gone and self._verdict != Outcome.STREAMING
            self._request.finish(Outcome.ABORTED if gone else self._verdict or Outcome.SUCCESS)

    def _head(self, message: Message) -> Message:
        headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
        known = dict(headers)
        failed = message["status"] >= 500
        stream = known.get(b"content-type", b"").startswith(b"text/event-stream")
        self._verdict = Outcome.FAILURE if failed else Outcome.STREAMING if stream else Outcome.SUCCESS
        if stream:
            self._request.stream()
        length = known.get(b"content-length", b"0")
        large = length.isdigit() and int(length) > LARGE_BODY
        load = self._load
        if load.probe_only and load.orca is None:
            return message
        leaving = None if large or self._verdict == Outcome.STREAMING else self._request
        report = load._report(leaving, load.orca is not None)
        replaced: tuple[bytes, ...] = ()
        added: list[tuple[bytes, bytes]] = []
        if not load.probe_only:
            replaced += OURS
            added.append((b"x-prequal-load", report.header().encode()))
        if load.orca is not None:
            # Two reports would contradict each other.
            replaced += ORCA
            added.append((b"endpoint-load-metrics", report.orca(load.orca).encode()))
        kept = [(name, value) for name, value in headers if name not in replaced]
        return {**message, "headers": kept + added}


async def plain(send: Send, status: int, text: bytes, *headers: tuple[bytes, bytes]) -> None:
    await reply(send, status, [(b"content-type", b"text/plain; charset=utf-8"), *headers], text)


async def reply(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
