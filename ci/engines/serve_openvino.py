"""OpenVINO GenAI's continuous batching behind OpenAI's completions: serve_openvino.py FILE PORT

The package is a library, so this is the smallest server that passes prompts and tokens through.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openvino as ov
import openvino_genai as genai

scheduler = genai.SchedulerConfig()
scheduler.enable_prefix_caching = True
scheduler.num_kv_blocks = 512
scheduler.max_num_batched_tokens = 512
pipeline = genai.ContinuousBatchingPipeline(
    sys.argv[1], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
)
tokenizer = pipeline.get_tokenizer()
lock, count = threading.Lock(), 0


def stepping() -> None:
    """The pipeline moves all requests together; somebody has to turn the handle."""
    while True:
        with lock:
            busy = pipeline.has_non_finished_requests()
            if busy:
                pipeline.step()
        if not busy:
            time.sleep(0.002)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        version = {"engine": "OpenVINO GenAI", "version": genai.__version__.split("-")[0]}
        told = version if self.path == "/version" else {"data": [{"id": "m"}]}
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        global count
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.logprobs = body["max_tokens"], False, 1
        config.eos_token_id = 2
        prompt = body["prompt"]
        ids = (
            ov.Tensor(np.array([prompt], dtype=np.int64))
            if isinstance(prompt, list)
            else tokenizer.encode(prompt).input_ids
        )
        with lock:
            count += 1
            handle = pipeline.add_request(count, ids, config)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            while handle.get_status() == genai.GenerationStatus.RUNNING or handle.can_read():
                if not handle.can_read():
                    time.sleep(0.001)
                    continue
                for output in handle.read().values():
                    self.tokens(list(output.generated_ids), list(output.generated_log_probs))
            self.event({"choices": [{"text": "", "finish_reason": "stop"}]})
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:  # the client has hung up
            handle.cancel()

    def tokens(self, ids: list[int], logprobs: list[float]) -> None:
        text = tokenizer.decode(ids)
        told = {"tokens": [str(i) for i in ids], "token_logprobs": logprobs}
        self.event({"choices": [{"text": text, "token_ids": ids, "logprobs": told}]})

    def event(self, told: dict) -> None:
        self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
        self.wfile.flush()


threading.Thread(target=stepping, daemon=True).start()
server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
server.daemon_threads = True
server.serve_forever()
