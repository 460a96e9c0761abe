"""Audit the isolation of an inference engine.

  python -m kvlab.audit --base-url http://localhost:8000/v1 --model NAME
  python -m kvlab.audit --engine llama.cpp --base-url http://localhost:8080
  python -m kvlab.audit --engine transformers --model FOLDER

Exit status: 0 isolated, 1 leak or contamination, 2 could not run, 3 cannot tell.
The key of a server is read from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers import AutoTokenizer

from kvlab.audit.audit import SAYS, Audit, Result
from kvlab.audit.engine import Engine, EngineError
from kvlab.audit.http import LlamaCppEngine, OpenAIEngine
from kvlab.audit.local import ContinuousEngine, GenerateEngine, PoolEngine, Speaker
from kvlab.audit.prompts import Writer
from kvlab.audit.report import write
from kvlab.faults import CATALOGUE, make_pool
from kvlab.models import BUNDLED, LoadedModel, load_model
from kvlab.pools import TieredCachePool

ENGINES = (
    "openai", "llama.cpp", "transformers", "transformers-static", "transformers-continuous", "pool",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python -m kvlab.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--engine", choices=ENGINES, help="default: openai, where a URL is given")
    parse.add_argument("--base-url", help="where the server is, such as http://localhost:8000/v1")
    parse.add_argument("--model", help="name at the server; in process: a folder, or 'bundled'")
    parse.add_argument("--fault", help="with --engine pool: a fault of the catalogue, as a control")
    parse.add_argument(
        "--tokenizer", help="folder with the server's tokenizer: ask in token ids, not in text"
    )
    parse.add_argument(
        "--reference", help="folder with the server's weights: compare with a run without any cache"
    )
    parse.add_argument("--concurrency", type=int, default=4, help="requests at once (4)")
    parse.add_argument("--max-requests", type=int, default=400, help="send no more (400)")
    parse.add_argument("--max-tokens", type=int, default=16, help="tokens of an answer (16)")
    parse.add_argument("--sentences", type=int, default=8, help="of a shared beginning (8)")
    parse.add_argument("--timeout", type=float, default=60, help="seconds without a byte (60)")
    parse.add_argument("--seed", type=int, default=0, help="of prompts and passphrases (0)")
    parse.add_argument("--name", help="of the engine in the report, where it does not tell")
    parse.add_argument("--report", type=Path, help="write audit.json and audit.html there")
    return parse


def in_process(options: argparse.Namespace) -> tuple[Engine, Writer, Speaker]:
    """An engine in this process, what it is asked, and who knows the right answers."""
    loaded: LoadedModel = load_model(options.model or "bundled")
    speaker = Speaker(loaded)
    engine: Engine
    if options.engine == "pool":
        if options.fault and options.fault not in CATALOGUE:
            raise EngineError(f"no fault {options.fault!r}; there are: {', '.join(CATALOGUE)}")
        if options.fault:
            kind = CATALOGUE[options.fault]
            tiered = issubclass(kind, TieredCachePool)
            sizes = {"num_blocks": 512} if tiered else {"num_slots": 10, "max_seq_len": 512}
            pool = make_pool(kind, loaded.model.config, **sizes)
        else:
            pool = TieredCachePool.for_model(loaded.model.config, 256)
        engine = PoolEngine(f"kvlab pool, {options.fault or 'without a fault'}", loaded, pool)
    elif options.engine == "transformers-continuous":
        folder = str(BUNDLED) if loaded.name == "bundled" else loaded.name
        engine = ContinuousEngine(loaded, folder)
    else:
        cache = "static" if options.engine.endswith("static") else "dynamic"
        engine = GenerateEngine(loaded, cache)
    writer = Writer(loaded.tokenizer.encode, options.seed)
    return engine, writer, speaker


def over_http(options: argparse.Namespace) -> tuple[Engine, Writer, Speaker | None]:
    """An engine behind a URL, asked in ids where a tokenizer is given."""
    speaker, encode = None, None
    if options.reference:
        speaker = Speaker(load_model(options.reference))
        encode = speaker.loaded.tokenizer.encode
    elif options.tokenizer:
        encode = AutoTokenizer.from_pretrained(options.tokenizer).encode
    engine: Engine
    if options.engine == "llama.cpp":
        engine = LlamaCppEngine(options.base_url, options.timeout, encode)
    else:
        engine = OpenAIEngine(options.base_url, options.model, options.timeout, encode)
    return engine, Writer(encode, options.seed), speaker


def summary(result: Result) -> str:
    """The last lines on the screen."""
    lines = ["", f"{result.verdict.upper()}: {result.explanation}"]
    lines.append(f"reference: {result.reference}; cannot rule out {result.cannot_rule_out}")
    lines.append(f"reuse of prefixes: {result.reuse}; requests sent: {result.requests}")
    for name, told in result.timing.items():
        lines.append(f"side channel, {name}: {SAYS[told['leaks']]}")
    return "\n".join([*lines, *(f"note: {n}" for n in result.notes)])


def main(arguments: list[str] | None = None) -> int:
    parse = parser()
    options = parse.parse_args(arguments)
    options.engine = options.engine or ("openai" if options.base_url else None)
    if options.engine is None:
        parse.error("give --base-url URL for a server, or --engine for one in this process")
    served = options.engine in ("openai", "llama.cpp")
    if served and not options.base_url:
        parse.error(f"--engine {options.engine} needs --base-url")
    if options.engine == "openai" and not options.model:
        parse.error("--model NAME: the name that the server gives its model")
    if options.concurrency < 2:
        parse.error("--concurrency must be at least 2: one request alone mixes nothing up")
    if options.max_requests < 20:
        parse.error("--max-requests must be at least 20: finding out how to ask takes some already")
    if options.report:
        try:
            options.report.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parse.error(f"--report {options.report}: cannot be written ({error.strerror})")
    engine: Engine | None = None
    try:
        engine, writer, speaker = (over_http if served else in_process)(options)
        print(f"auditing {engine.name} with at most {options.max_requests} requests", flush=True)
        audit = Audit(
            engine,
            writer,
            options.concurrency,
            options.max_requests,
            options.max_tokens,
            options.sentences,
            speaker.recompute if speaker else None,
            speaker.stop if speaker else (),
            lambda line: print(f"  {line}", flush=True),
        )
        result = audit.run()
        result.engine = options.name or result.engine
    except (EngineError, OSError, ValueError) as error:
        print(f"could not run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("could not run: interrupted before the first arm", file=sys.stderr)
        return 2
    finally:
        if engine is not None:
            engine.close()
    print(summary(result))
    if options.report:
        for path in write(result, options.report):
            print(f"written: {path}")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
