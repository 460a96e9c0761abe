"""Engines over HTTP: whatever speaks OpenAI's protocol, and llama.cpp's own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx

from kvlab.audit.engine import Answer, Ask, EngineError, Prompt
from kvlab.audit.prompts import Encode

API_KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key; it goes into a header and nowhere else."""


class Refused(Exception):
    """An answer of the server that is no completion; the message is what it said."""


class HttpEngine:
    """What both protocols have in common: threads, streams, time limits, and errors in words.

    Args:
        base_url: Where the server is, such as `http://localhost:8000/v1`.
        timeout: Seconds without a byte after which a request counts as stuck.
        encode: Turns text into the server's token ids, where it shall be asked in ids.
    """

    cold: str | None = None
    tenant_knob: str | None = None
    path = ""

    def __init__(self, base_url: str, timeout: float = 60.0, encode: Encode | None = None) -> None:
        self.encode = encode
        key = os.environ.get(API_KEY)
        self.base_url = base_url.rstrip("/")
        self.root = self.base_url.removesuffix("/v1")
        self.timeout = timeout
        self.client = httpx.Client(
            base_url=self.base_url,
            timeout=httpx.Timeout(timeout, connect=min(5.0, timeout)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=64),
            trust_env=False,  # a proxy must not stand between us and a server on loopback
        )
        self.name = self.base_url
        self.sent = 0
        self._counting = threading.Lock()

    # What a protocol has to say.

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request as the protocol writes it."""
        raise NotImplementedError

    def read(self, events: Iterator[tuple[float, dict[str, Any]]], began: float) -> Answer:
        """The answer out of the events of a stream, each with its time."""
        raise NotImplementedError

    # What both do.

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at once: each in a thread, and none before all are ready."""
        ready = threading.Barrier(len(asks))

        def one(ask: Ask) -> Answer:
            ready.wait()
            return self._one(ask)

        with ThreadPoolExecutor(len(asks)) as threads:
            return list(threads.map(one, asks))

    def _one(self, ask: Ask) -> Answer:
        self._count()
        began = time.perf_counter()
        try:
            return self.read(self._stream(self.body(ask)), began)
        except Refused as refused:
            return Answer(error=str(refused))
        except httpx.TimeoutException:
            return Answer(error=f"no byte within {self.timeout:g} s")
        except httpx.HTTPError as error:
            return Answer(error=f"the connection broke ({type(error).__name__})")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return Answer(error="the server answered something that is not this protocol")

    def _stream(self, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        with self.client.stream("POST", self.path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise Refused(f"status {response.status_code}: {_message(response)}")
            began = time.perf_counter()
            for line in response.iter_lines():
                if time.perf_counter() - began > 10 * self.timeout:
                    raise Refused("the stream does not end")
                if not line or line.startswith(":"):
                    continue
                if not line.startswith("data:"):
                    raise ValueError("not a stream of events")
                text = line[5:].strip()
                if text == "[DONE]":
                    return
                yield time.perf_counter(), json.loads(text)

    def _count(self) -> None:
        with self._counting:
            self.sent += 1

    def abort(self, ask: Ask) -> None:
        """Hang up after the first tokens of the answer."""
        self._count()
        try:
            with self.client.stream("POST", self.path, json=self.body(ask)) as response:
                for i, line in enumerate(response.iter_lines()):
                    if line and i >= 4:
                        break
        except httpx.HTTPError:
            pass

    def check(self) -> None:
        """One short request, and the usual reasons why it does not work.

        Raises:
            EngineError: In one line, what is wrong and what to do.
        """
        answer = self._one(self.probe())
        if answer.error is None:
            return
        if "ConnectError" in answer.error or "ConnectTimeout" in answer.error:
            raise EngineError(
                f"nobody listens at {self.base_url}: is the server up, the port right?"
            )
        if "status 401" in answer.error or "status 403" in answer.error:
            raise EngineError(f"the server refused the key: set {API_KEY} in the environment")
        if "no byte" in answer.error:
            raise EngineError(f"the server took a request and then kept silent: {answer.error}")
        hint = "; if it takes no token ids, leave out --tokenizer and --reference"
        raise EngineError(
            f"{self.base_url}{self.path}: {answer.error}{hint if self.encode else ''}"
        )

    def _told(self, path: str, field: str) -> str:
        """A field of a page of the server, for the report; empty where there is no such page."""
        try:
            return str(self.client.get(self.root + path).json()[field])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""

    def probe(self) -> Ask:
        """A short request for `check`."""
        return Ask(self.written("Hello"), 2)

    def written(self, text: str) -> Prompt:
        """Text as this server is asked."""
        return tuple(self.encode(text)) if self.encode else text

    def close(self) -> None:
        self.client.close()


class OpenAIEngine(HttpEngine):
    """Any server with OpenAI's completions, or chat completions where it has no others.

    Which optional fields it takes, and whether vLLM's `cache_salt` works, is found out by asking.

    Args:
        model: Name of the model at the server.
    """

    def __init__(
        self, base_url: str, model: str, timeout: float = 60.0, encode: Encode | None = None
    ) -> None:
        super().__init__(base_url, timeout, encode)
        self.model = model
        self.path = "/completions"
        self.chat = False
        self.plain: set[str] = set()  # optional fields that the server refused

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # vLLM's; others leave it alone or refuse it
        }
        if self.chat:
            body |= {"messages": [{"role": "user", "content": ask.prompt}], "logprobs": True}
            body["top_logprobs"] = 2
        else:
            body |= {"prompt": _plain(ask.prompt), "logprobs": 2}
        if self.cold == "salt":
            salt = f"cold-{uuid4().hex}" if ask.cold else ask.tenant
            if salt:
                body["cache_salt"] = salt
        return {k: v for k, v in body.items() if k not in self.plain}

    def read(self, events: Iterator[tuple[float, dict[str, Any]]], began: float) -> Answer:
        text, first, cached, ended = "", None, None, False
        pieces: list[str] = []
        ids: list[int] = []
        chosen: list[float] = []
        margins: list[float] = []
        for at, event in events:
            if "error" in event:
                raise Refused(str(event["error"])[:200])
            usage = event.get("usage") or {}
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens", cached)
            if usage and cached is None and "prompt_tokens_details" in usage:
                cached = 0
            for choice in event["choices"]:
                part = choice["delta"].get("content") if self.chat else choice["text"]
                told = choice.get("logprobs")
                ended = ended or choice.get("finish_reason") is not None
                if part or told:
                    first = first if first is not None else at - began
                text += part or ""
                ids += choice.get("token_ids") or []
                for piece, logprob, margin in _told(told, self.chat):
                    pieces.append(piece)
                    chosen.append(logprob)
                    margins.append(margin)
        if first is None and not ended:
            raise ValueError("an empty stream")
        whole: tuple[int | str, ...] = tuple(ids or pieces) or (text,)
        return Answer(whole, text, tuple(margins) or None, tuple(chosen) or None, cached, first)

    def check(self) -> None:
        try:
            names = [m["id"] for m in self.client.get("/models").json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            names = []  # not every server has the list; a request will tell
        if names and self.model not in names:
            raise EngineError(
                f"no model {self.model!r} at {self.base_url}; it has {', '.join(names)}"
            )
        self._find_protocol()
        super().check()
        if version := self._told("/version", "version"):
            self.name = f"{self._told('/version', 'engine') or 'vLLM'} {version}"
        self._find_salt()

    def _find_protocol(self) -> None:
        """Leave out what the server refuses: unknown fields, log-probabilities, completions."""
        optional: tuple[set[str], ...] = (
            set(),
            {"return_token_ids"},
            {"return_token_ids", "stream_options"},
            {"return_token_ids", "stream_options", "logprobs", "top_logprobs"},
        )
        refusals = tuple(f"status {code}" for code in (400, 404, 405, 422, 501))
        for chat in (False, True):
            self.chat, self.path = chat, "/chat/completions" if chat else "/completions"
            for plain in optional:
                self.plain = plain
                error = self._one(self.probe()).error
                if error is None or not error.startswith(refusals):
                    return  # it works, or it is no question of fields: `check` says it
        self.chat, self.path, self.plain = False, "/completions", set()

    def _find_salt(self) -> None:
        """Whether equal salts share and different ones do not, by the server's own count."""
        text = self.written(" ".join(f"{uuid4().int % 10**9} is a number." for _ in range(12)))
        self.cold = "salt"
        same = [self._one(Ask(text, 1, tenant="a")) for _ in range(2)]
        other = self._one(Ask(text, 1, tenant="b"))
        again = self._one(Ask(text, 1, tenant="a"))
        counts = [a.cached for a in (same[0], same[1], other, again)]
        works = None not in counts and counts[1] and not counts[2] and counts[3]
        if works:
            self.tenant_knob = "cache_salt"
        else:
            self.cold = None


class LlamaCppEngine(HttpEngine):
    """llama.cpp's own `/completion`, which takes token ids and counts what it had cached."""

    cold: str | None = "cache off"
    tenant_knob: str | None = "id_slot"
    path = "/completion"

    def __init__(self, base_url: str, timeout: float = 60.0, encode: Encode | None = None) -> None:
        super().__init__(base_url, timeout, encode)
        self.slots: dict[str, int] = {}  # each tenant is pinned to a slot of its own

    def check(self) -> None:
        super().check()
        self.name = f"llama.cpp {self._told('/props', 'build_info')}"

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": _plain(ask.prompt),
            "n_predict": ask.max_tokens,
            "temperature": 0,
            "top_k": 1,
            "n_probs": 2,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": not ask.cold,
        }
        if ask.tenant is not None:
            body["id_slot"] = self.slots.setdefault(ask.tenant, len(self.slots))
        return body

    def read(self, events: Iterator[tuple[float, dict[str, Any]]], began: float) -> Answer:
        text, first, cached, ended = "", None, None, False
        tokens: list[int] = []
        chosen: list[float] = []
        margins: list[float] = []
        for at, event in events:
            if "error" in event:
                raise Refused(str(event["error"])[:200])
            text += event["content"]
            ended = ended or bool(event.get("stop"))
            if event.get("tokens") and not event.get("stop"):
                first = first if first is not None else at - began
                tokens += event["tokens"]
            for told in event.get("completion_probabilities") or []:
                if len(chosen) < len(tokens):
                    top = sorted((t["logprob"] for t in told["top_logprobs"]), reverse=True)
                    chosen.append(told["logprob"])
                    margins.append(top[0] - top[1] if len(top) > 1 else float("inf"))
            cached = event.get("timings", {}).get("cache_n", cached)
        if first is None and not ended:
            raise ValueError("an empty stream")
        told_all = bool(tokens) and len(chosen) == len(tokens)
        return Answer(
            tuple(tokens),
            text,
            tuple(margins) if told_all else None,
            tuple(chosen) if told_all else None,
            cached,
            first,
        )


def _plain(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _told(logprobs: Any, chat: bool) -> Iterator[tuple[str, float, float]]:
    """Token, log-probability and margin of each token that a choice tells about."""
    if not logprobs:
        return
    if chat:
        for entry in logprobs.get("content") or []:
            yield (
                entry["token"],
                entry["logprob"],
                _margin([t["logprob"] for t in entry.get("top_logprobs") or []]),
            )
        return
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
    ):
        yield token, logprob, _margin(list((top or {}).values()))


def _margin(logprobs: list[float]) -> float:
    """Between the two best; a lone one has no rival that was worth telling."""
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def _message(response: httpx.Response) -> str:
    """What an error page says, in short."""
    try:
        told = response.json()
        told = told.get("error", told)
        told = told.get("message", told) if isinstance(told, dict) else told
        return str(told)[:200]
    except (ValueError, AttributeError):
        return response.text[:100] or "no message"
