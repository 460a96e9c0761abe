"""A small server on loopback that speaks OpenAI's completions, in front of one of our pools."""

from __future__ import annotations

import json
import queue
import select
import socket
import sys
import threading
import zlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from kvlab.models import tiny_model
from kvlab.pools import PoolFull
from kvlab.request import Request, Run
from kvlab.schedule import Executor

VOCAB = 800


def encode(text: str) -> tuple[int, ...]:
    """One token a word, by a hash: enough for a model that knows no words."""
    return tuple(3 + zlib.crc32(w.encode()) % (VOCAB - 3) for w in text.split())


class Job:
    def __init__(self, request: Request) -> None:
        self.run = Run(request)
        self.tokens: queue.Queue = queue.Queue()
        self.gone = threading.Event()


class Loop(threading.Thread):
    """Serves whoever is there, one step of all after another, on one pool."""

    def __init__(self, pool) -> None:
        super().__init__(daemon=True)
        self.executor = Executor(tiny_model(), pool)
        self.arrived: queue.Queue = queue.Queue()
        self.jobs: list[Job] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        torch.set_num_threads(1)
        sys.setswitchinterval(0.0005)
        fresh = False  # somebody has just come: wait whether others come too
        while not self.stopping.is_set():
            try:
                # Where two have come together there may be more: let all of them in first.
                wait = 0.03 if len(self.jobs) > 1 else 0.005
                waiting = fresh or not self.jobs
                self.jobs.append(
                    self.arrived.get(timeout=wait) if waiting else self.arrived.get(False)
                )
                fresh = True
            except queue.Empty:
                fresh = False
                self.step()

    def step(self) -> None:
        for job in [j for j in self.jobs if j.gone.is_set()]:
            self.jobs.remove(job)
            if job.run.request.id in self.executor.leases:
                self.executor.release(job.run)
        before = {j.run.request.id: len(j.run.steps) for j in self.jobs}
        try:
            if self.jobs:
                self.executor.step([j.run for j in self.jobs])
        except (PoolFull, ValueError, RuntimeError, LookupError, ArithmeticError) as error:
            for job in self.jobs:
                job.tokens.put(error)
                if job.run.request.id in self.executor.leases:
                    self.executor.leases.pop(job.run.request.id)
            self.jobs = []
        for job in list(self.jobs):
            for step in job.run.steps[before[job.run.request.id] :]:
                job.tokens.put(step)
            if job.run.finished:
                job.tokens.put(None)
                self.jobs.remove(job)


class Handler(BaseHTTPRequestHandler):
    """`behave(handler, body)` may answer in its place, and says whether it did."""

    loop: Loop
    behave = None
    count = 0
    salted = True

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        cls.count += 1
        if cls.behave is not None and cls.behave(self, body):
            return
        prompt = body["prompt"]
        tokens = encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        salt = body.get("cache_salt") if self.salted else None
        request = Request(
            f"r{cls.count}",
            tokens,
            body["max_tokens"],
            context=(("salt", salt),) if salt else (),
        )
        self.answer(Job(request))

    def reply(self, status: int, told: dict) -> None:
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, told: dict) -> None:
        self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
        self.wfile.flush()

    def answer(self, job: Job) -> None:
        self.loop.arrived.put(job)
        first = job.tokens.get(timeout=30)
        if isinstance(first, Exception):
            return self.reply(500, {"error": {"message": str(first)}})
        self.begin()
        try:
            step = first
            while step is not None:
                if self.hung_up():
                    raise BrokenPipeError
                if isinstance(step, Exception):
                    self.event({"error": str(step)})
                    return None
                self.event({"choices": [self.choice(step)]})
                step = job.tokens.get(timeout=30)
            cached = {"cached_tokens": job.run.num_cached_tokens}
            self.event({"choices": [], "usage": {"prompt_tokens_details": cached}})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            job.gone.set()

    def hung_up(self) -> bool:
        """Whether the client has closed: then there is something to read, and it is nothing."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def choice(self, step) -> dict:
        told = torch.log_softmax(step.logits, -1).topk(2)
        top = {f" w{i}": float(v) for v, i in zip(told.values, told.indices, strict=True)}
        word = f" w{step.token}"
        logprobs = {"tokens": [word], "token_logprobs": [top[word]], "top_logprobs": [top]}
        return {"text": word, "token_ids": [step.token], "logprobs": logprobs}


@contextmanager
def serving(pool, behave=None, salted=True):
    """A server on a free port; gives its base URL."""
    loop = Loop(pool)
    loop.start()
    handler = type("H", (Handler,), {"loop": loop, "behave": behave, "count": 0, "salted": salted})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        loop.stopping.set()
        loop.join(5)
