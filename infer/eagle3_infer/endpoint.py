"""An OpenAI-compatible server over HTTP: its models, its metrics pages, and chat completions as they stream in.

Knows the wire and the clock, nothing of prompts' files or reports. A key in $OPENAI_API_KEY is sent along.
"""

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eagle3.errors import ConfigError, Eagle3Error
from eagle3_infer.metrics_page import MOST_COUNT

CHAT, MODELS = "/v1/chat/completions", "/v1/models"
# TensorRT-LLM alone has the first one; its other one is JSON, and forgets what it has told
METRICS = ("/prometheus/metrics", "/metrics")
# without a byte for so long, a request has failed
IDLE_SECONDS = 600.0
HUNG_UP = "the server hung up in the middle of a reply"
_SHOWN = 200
# generated as well, but no part of the reply; either name, by the server's age
_THOUGHTS = ("reasoning_content", "reasoning")


class ServerError(Eagle3Error):
    """A request that the server refused, broke off or never answered."""


@dataclass(frozen=True)
class Reply:
    """One streamed reply.

    Args:
        first, seconds: from the request to the first text and to the end; first is None where no text came.
        tokens, prompt_tokens: as the server's `usage` says; None where it does not, or says what cannot be.
    """

    text: str
    finish_reason: str
    first: float | None
    seconds: float
    tokens: int | None = None
    prompt_tokens: int | None = None

    @property
    def only_thoughts(self) -> bool:
        """Whether something was generated, and none of it is the reply."""
        return self.first is not None and not self.text


class Endpoint:
    """A server's address; every request has a connection of its own, so that threads may share this.

    Args:
        url: http(s)://host:port, with or without /v1 behind it.
        idle_seconds: longest silence that is waited for.
    """

    def __init__(self, url: str, idle_seconds: float = IDLE_SECONDS):
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"--server {url}: {error}, expected http://host:port or https://...") from None
        if parts.username is not None or parts.query:
            # the command and its settings stand in reports
            raise ConfigError("--server holds a user or a query, which are not sent: give a key in $OPENAI_API_KEY")
        if parts.scheme not in ("http", "https") or not self.host:
            raise ConfigError(f"--server is {url}, expected http://host:port or https://...")
        self.secure, self.idle_seconds = parts.scheme == "https", idle_seconds
        root = parts.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        self.root = root.removesuffix("/v1").rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{self.root}"
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self.aborted = False

    def model(self) -> str:
        """The first model that the server lists. Raises ConfigError where it lists none, ServerError unreachable."""
        status, body = self.get(MODELS)
        try:
            name = json.loads(body)["data"][0]["id"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            name = None
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{self.url}{MODELS} answered {status} and no list of models; is it an OpenAI-compatible server? "
                "Name its model with --server-model"
            )
        return name

    def page(self, path: str) -> str | None:
        """The text of a metrics page; None where none answers."""
        with suppress(ServerError):
            status, body = self.get(path)
            if status == 200:
                return body.decode("utf-8", errors="replace")
        return None

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises ServerError where there is no answer."""
        with self._request("GET", path, None) as response:
            return response.status, response.read()

    def chat(self, body: Mapping[str, Any]) -> Reply:
        """Send a chat completion, and time its stream.

        Raises:
            ServerError: refused, broken off, or silent for too long.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        with self._request("POST", CHAT, json.dumps(body).encode()) as response:
            if response.status != 200:
                raise ServerError(f"{self.url}{CHAT} answered {response.status}: {_told(response.read())}")
            try:
                return _collect(_events(response), began)
            except (ConnectionError, http.client.HTTPException):
                raise ServerError(HUNG_UP) from None

    def abort(self) -> None:
        """End all chats that are going, from another thread; those to come end at once."""
        with self._lock:
            self.aborted = True
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _request(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.idle_seconds)
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
            if self.aborted and method == "POST":
                raise ServerError("the run was ended")
            connection.request(method, self.root + path, body, _headers(body))
            yield connection.getresponse()
        except TimeoutError:
            raise ServerError(f"{self.url}{path} was silent for {self.idle_seconds:g} s") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            what = str(error) or type(error).__name__
            raise ServerError(f"{self.url}{path}: {what}; is the server running?") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _headers(body: bytes | None) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    typed = {} if body is None else {"Content-Type": "application/json"}
    return typed | ({"Authorization": f"Bearer {key}"} if key else {})


def _told(body: bytes) -> str:
    """What an error's body says, on one line and cut short."""
    text = body.decode("utf-8", errors="replace")
    with suppress(ValueError, AttributeError, TypeError, RecursionError):
        found = json.loads(text)
        inner = found.get("error", found)
        text = str(inner.get("message", text)) if isinstance(inner, dict) else str(inner)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The JSON of each server-sent event, up to `[DONE]`; comments and other fields are passed over."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            # None tells a stream that ended from one that was cut
            yield None
            return
        if data:
            try:
                yield json.loads(data)
            except (ValueError, RecursionError):
                raise ServerError(f"the stream holds an event that is no JSON: {_told(data)}") from None


def _collect(events: Iterator[Any], began: float) -> Reply:
    """A reply from its events; the first text's arrival is the time to the first token."""
    parts: list[str] = []
    first, reason, usage, whole = None, "", {}, False
    for event in events:
        if event is None:
            whole = True
            break
        if not isinstance(event, dict) or event.get("error"):
            raise ServerError(f"the stream holds an error: {_told(json.dumps(event).encode())}")
        usage = _object("usage", event.get("usage")) or usage
        choices = event.get("choices") or ()
        if not isinstance(choices, list | tuple):
            raise ServerError(f"the stream holds choices that are no list: {_told(json.dumps(choices).encode())}")
        for choice in choices:
            choice = _object("choice", choice)
            delta = _object("delta", choice.get("delta"))
            if first is None and any(delta.get(name) for name in ("content", *_THOUGHTS)):
                first = time.perf_counter() - began
            parts.append(_text("content", delta.get("content")))
            reason = _text("finish_reason", choice.get("finish_reason")) or reason
    if not (whole or reason):
        raise ServerError(HUNG_UP)
    ended = time.perf_counter() - began
    tokens, prompt_tokens = (_count(usage.get(f"{name}_tokens")) for name in ("completion", "prompt"))
    if first is not None:
        # something came, so that 0 cannot be
        tokens = tokens or None
    return Reply("".join(parts), reason, first, ended, tokens, prompt_tokens)


def _object(name: str, value: Any) -> dict[str, Any]:
    """Nothing as an empty one. Raises ServerError for what is no object."""
    if value is not None and not isinstance(value, dict):
        raise ServerError(f"the stream holds a {name} that is no object: {_told(json.dumps(value).encode())}")
    return value or {}


def _text(name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ServerError(f"the stream holds a {name} that is no text: {_told(json.dumps(value).encode())}")
    return value or ""


def _count(value: Any) -> int | None:
    """A count of tokens; what cannot be one is not told."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value <= MOST_COUNT else None
