"""The server that the conformance program (tests/tests/libraries) drives: an application behind the middleware, and a control
port. The control port replays traces of arrivals and departures on a virtual clock. docs/guide/libraries.md defines its
replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from pathlib import Path
from urllib.parse import parse_qs

import uvicorn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prequal import Load, Middleware, Outcome, Request  # noqa: E402


async def application(scope, receive, send):
    assert scope["type"] == "http"
    ms = parse_qs(scope["query_string"].decode()).get("ms", ["0"])[0]
    await asyncio.sleep(int(ms) / 1000)
    path = scope["raw_path"].decode()

    async def head(status, *headers):
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def body(data, more=False):
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def until_gone():
        while (await receive())["type"] != "http.disconnect":
            pass

    match path:
        case "/ok":
            await head(200)
            await body(b"ok")
        case "/empty":
            await head(200)
            await body(b"")
        case "/missing":
            await head(404)
            await body(b"missing")
        case "/error":
            await head(500)
            await body(b"error")
        case "/panic":
            raise RuntimeError("no answer, on purpose")
        case "/break":
            await head(200, (b"content-length", b"10"))
            await body(b"half", more=True)
            raise RuntimeError("broken off, on purpose")
        case "/hang":
            await until_gone()
        case "/events":
            await head(200, (b"content-type", b"text/event-stream"))
            await body(b"data: 1\n\n", more=True)
            await until_gone()
        case "/large":
            await head(200, (b"content-length", str(32 << 20).encode()))
            part = bytes(1 << 16)
            for left in reversed(range(32 << 4)):
                await body(part, more=left > 0)
        case "/lies":
            names = (b"x-prequal-load", b"Endpoint-Load-Metrics", b"endpoint-load-metrics-bin")
            await head(200, *((name, b"a lie") for name in names))
            await body(b"lies")
        case _:
            await head(418)
            await body(b"the application's")


def play(trace: str) -> str:
    """Replays a trace. Returns a line for each report that the trace asks for."""
    now = 0
    load: Load
    requests: dict[str, tuple[Request, Outcome]] = {}
    reports = []
    for line in trace.splitlines():
        at, what, *fields = line.split()
        now = int(at)
        match what:
            case "begin":
                form, limit, window_us, endpoint = fields
                load = Load(
                    endpoint, orca=form, orca_limit=int(limit), orca_window=int(window_us) / 1e6, clock=lambda: now
                )
            case "probe":
                reports.append(probe(load))
            case "start":
                requests[fields[0]] = (load.start(), Outcome.SUCCESS)
            case "head":
                number, kind = fields
                request, outcome = requests[number]
                leaving = request
                if kind == "fail":
                    outcome = Outcome.FAILURE
                elif kind == "stream":
                    outcome, leaving = Outcome.STREAMING, None
                    request.stream()
                requests[number] = (request, outcome)
                report = load.report(leaving)
                reports.append(f"{report.header()}\t{report.orca(load.orca)}")
            case "wait":
                requests[fields[0]][0].client_waits()
            case "back":
                requests[fields[0]][0].client_is_back()
            case "finish":
                request, outcome = requests.pop(fields[0])
                request.finish(outcome)
            case "abort":
                requests.pop(fields[0])[0].finish(Outcome.ABORTED)
            case _:
                raise ValueError(line)
    return "".join(f"{line}\n" for line in reports)


def probe(load: Load) -> str:
    """Returns the report in the middleware's reply to a probe. The middleware answers without waiting for anything."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/prequal/probe", "headers": []}
    with contextlib.suppress(StopIteration):
        Middleware(application, load)(scope, None, send).send(None)
    return dict(sent[0]["headers"])[b"x-prequal-load"].decode()


def control(load: Load):
    async def answer(scope, receive, send):
        assert scope["type"] == "http"
        data, more = b"", True
        while more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] == "/trace":
            text = await asyncio.to_thread(play, data.decode())
        else:
            text = " ".join(str(load.ended(outcome)) for outcome in Outcome)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    return answer


async def main():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    service, controls = ("{}:{}".format(*each.getsockname()) for each in sockets)
    load = Load(service, orca="text")
    print(f"listening service={service} control={controls}", flush=True)
    apps = [Middleware(application, load), control(load)]
    servers = [uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical")) for app in apps]
    await asyncio.gather(*(server.serve(sockets=[each]) for server, each in zip(servers, sockets)))


asyncio.run(main())
