"""`moe-runtime status`: a table for people, JSON for programs, one line if nobody answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moe_runtime.cli import main

MEMBER: dict[str, Any] = {
    "incarnation": "0123456789abcdef",
    "rank": 3,
    "role": "both",
    "node": "somewhere-17",
    "address": "127.0.0.1:4000",
    "pid": 4321,
    "open_requests": 2,
    "said_hello": True,
    "running": 2,
    "waiting": 0,
    "free_pages": 200,
    "num_pages": 256,
    "epoch": 7,
    "counters": {"tokens_generated": 991.0},
}
UNKNOWN: dict[str, Any] = dict.fromkeys(MEMBER) | {
    "incarnation": "fedcba9876543210",
    "open_requests": 0,
    "said_hello": False,
    "counters": {},
}
STATUS: dict[str, Any] = {
    "model": "some-model",
    "healthy": True,
    "unhealthy_reason": None,
    "epoch": 7,
    "members": [MEMBER, UNKNOWN],
    "draining": False,
    "open_requests": 2,
    "queued_requests": 1,
    "journal": {},
}


@contextmanager
def answering(content: bytes, code: int = 200) -> Iterator[str]:
    """A server that always gives the same answer; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            del arguments

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", *arguments])


def test_members_are_shown() -> None:
    with answering(json.dumps(STATUS).encode()) as address:
        result = run(f"http://{address}/")
    assert result.exit_code == 0, result.output
    first, *table = result.stdout.splitlines()
    assert first == ("some-model: healthy; view 7, 2 members, 2 open requests, 1 of them queued")
    (row,) = [line for line in table if "0123456789abcdef" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "3", "0123456789abcdef", "both", "somewhere-17", "4321", "2", "56/256", "991",
    ]  # fmt: skip
    (row,) = [line for line in table if "fedcba9876543210" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "-", "fedcba9876543210", "joining", "-", "-", "0", "-", "0",
    ]  # fmt: skip


def test_json_is_the_answer_itself_and_the_scheme_may_be_left_out() -> None:
    with answering(json.dumps(STATUS).encode()) as address:
        result = run(address, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == STATUS


def test_a_server_that_can_not_generate_is_status_1() -> None:
    sick = STATUS | {"healthy": False, "unhealthy_reason": "no workers", "draining": True}
    with answering(json.dumps(sick).encode()) as address:
        result = run(address)
    assert result.exit_code == 1
    assert "draining, NOT healthy: no workers" in result.stdout


@pytest.mark.parametrize(
    ("content", "code", "complaint"),
    [
        (b"<html>", 200, "no JSON"),
        (b"[]", 200, "another kind of answer"),
        (b'{"epoch": 1}', 200, "another kind of answer"),
        (b"{}", 404, "404"),
    ],
)
def test_something_else_answers(content: bytes, code: int, complaint: str) -> None:
    with answering(content, code) as address:
        result = run(address)
    assert_one_line(result, complaint)


def test_nobody_answers() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening
        assert_one_line(run(f"127.0.0.1:{held.getsockname()[1]}"), "no answer from http://127.0.0")
    assert_one_line(run("http://["), "no answer from")


def assert_one_line(result: Result, complaint: str) -> None:
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert complaint in line
