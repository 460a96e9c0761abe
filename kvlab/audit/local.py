"""Engines in this process: our pools, and transformers in three ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
)

from kvlab.audit.engine import Answer, Ask, EngineError, Prompt
from kvlab.decode import recompute
from kvlab.models import LoadedModel
from kvlab.pools import TieredCachePool
from kvlab.pools.contract import CachePool, PoolFull
from kvlab.request import Request, Run
from kvlab.schedule import Executor, run

Logits = Float[Tensor, " V"]


def ids_of(prompt: Prompt) -> tuple[int, ...]:
    """The token ids of a prompt; engines in this process take nothing else."""
    if isinstance(prompt, str):
        raise EngineError("engines in this process are asked in token ids; give a tokenizer")
    return prompt


class Speaker:
    """A model that can be asked, and how to turn what it says into answers.

    Args:
        loaded: Without a tokenizer, as tiny models are, the answers have no text.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.model, self.loaded = loaded.model, loaded
        self.stop = loaded.stop_tokens if loaded.tokenizer is not None else ()

    def answer(self, tokens: Sequence[int], logits: Sequence[Logits], **rest: Any) -> Answer:
        """An answer with log-probabilities and margins from the logits of each step."""
        told = [torch.log_softmax(x.float(), -1) for x in logits]
        best = [x.topk(2).values for x in told]
        return Answer(
            pieces=tuple(tokens),
            text=self.loaded.text(list(tokens)) if self.loaded.tokenizer is not None else "",
            margins=tuple(float(b[0] - b[1]) for b in best) or None,
            logprobs=tuple(float(x[t]) for x, t in zip(told, tokens, strict=True)) or None,
            **rest,
        )

    def of_run(self, ran: Run, **rest: Any) -> Answer:
        """The answer of a run of our own scheduler."""
        return self.answer(
            ran.tokens, [s.logits for s in ran.steps if s.logits is not None], **rest
        )

    def recompute(self, prompt: Prompt, max_tokens: int) -> Answer:
        """The reference of references: everything anew at every step, without any cache."""
        request = Request("cold", ids_of(prompt), max_tokens, self.stop)
        return self.of_run(recompute(self.model, request))


class PoolEngine:
    """One of our pools, or anybody's behind the same contract, kept for all requests."""

    cold: str | None = None

    def __init__(self, name: str, loaded: LoadedModel, pool: CachePool) -> None:
        self.name, self.pool, self.speaker = name, pool, Speaker(loaded)
        self.tenant_knob = "context" if isinstance(pool, TieredCachePool) else None
        self.sent = 0

    def _request(self, ask: Ask) -> Request:
        self.sent += 1
        context = () if ask.tenant is None else (("tenant", ask.tenant),)
        stop = self.speaker.stop
        return Request(f"r{self.sent}", ids_of(ask.prompt), ask.max_tokens, stop, context)

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        requests = [self._request(a) for a in asks]
        try:
            runs = run(self.speaker.model, requests, self.pool, "round_robin", len(requests))
        except (PoolFull, ValueError, RuntimeError, LookupError, ArithmeticError) as error:
            return [Answer(error=f"{type(error).__name__}: {error}")] * len(requests)
        return [
            self.speaker.of_run(r, cached=r.num_cached_tokens, first_token=r.time_to_first_token)
            for r in (runs[q.id] for q in requests)
        ]

    def abort(self, ask: Ask) -> None:
        ran = Run(self._request(ask))
        executor = Executor(self.speaker.model, self.pool)
        for _ in range(3):
            executor.step([ran])
        executor.release_all()

    def check(self) -> None:
        answer = self.complete([Ask((5, 6, 7), 2)])[0]
        if answer.error:
            raise EngineError(f"the pool does not serve a short request: {answer.error}")

    def close(self) -> None:
        pass


class HangUp(StoppingCriteria):
    """Stops after three tokens, as a client that leaves."""

    def __init__(self, prompt: int) -> None:
        self.end = prompt + 3

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.end)


class GenerateEngine:
    """transformers' `generate` on padded batches.

    Args:
        cache: "dynamic", or "static", whose cache `generate` keeps and resets between calls.
    """

    cold: str | None = None
    tenant_knob: str | None = None

    def __init__(self, loaded: LoadedModel, cache: str = "dynamic") -> None:
        self.name = f"transformers {transformers.__version__}, generate, {cache} cache"
        self.cache, self.speaker, self.sent = cache, Speaker(loaded), 0

    @torch.inference_mode()
    def complete(self, asks: Sequence[Ask], hang_up: bool = False) -> list[Answer]:
        self.sent += len(asks)
        prompts = [ids_of(a.prompt) for a in asks]
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(p)) + list(p) for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        model = self.speaker.model
        config = GenerationConfig(
            max_new_tokens=max(a.max_tokens for a in asks),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=list(self.speaker.stop) or None,
            cache_implementation="static" if self.cache == "static" else None,
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
        )
        out = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=config,
            stopping_criteria=[HangUp(longest)] if hang_up else None,
        )
        answers = []
        for b, ask in enumerate(asks):
            tokens = out.sequences[b, longest:].tolist()[: ask.max_tokens]
            end = next((i + 1 for i, t in enumerate(tokens) if t in self.speaker.stop), len(tokens))
            logits = [x[b] for x in out.logits[:end]]
            answers.append(self.speaker.answer(tokens[:end], logits))
        return answers

    def abort(self, ask: Ask) -> None:
        self.complete([ask], hang_up=True)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class ContinuousEngine:
    """transformers' continuous batching with prefix sharing; one manager for all requests.

    It refuses attention functions of others, so it loads a model of its own.
    """

    cold: str | None = None
    tenant_knob: str | None = None

    def __init__(self, loaded: LoadedModel, folder: str, blocks: int = 256) -> None:
        self.name = f"transformers {transformers.__version__}, continuous batching"
        self.speaker = Speaker(loaded)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=loaded.model.dtype, attn_implementation="sdpa"
        ).eval()
        stop = list(self.speaker.stop)
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=stop or -1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=16,
                num_blocks=blocks,
                max_batch_tokens=512,
                allow_block_sharing=True,
                use_cuda_graph=False,
                auto_switch_to_flash=False,
                return_logprobs=True,
            ),
        )
        self.manager.start()
        self.sent = 0

    def _add(self, ask: Ask, streaming: bool = False) -> str:
        self.sent += 1
        name = f"r{self.sent}"
        self.manager.add_request(
            list(ids_of(ask.prompt)),
            name,
            max_new_tokens=ask.max_tokens,
            streaming=streaming,
            record_timestamps=True,
        )
        return name

    def complete(self, asks: Sequence[Ask]) -> list[Answer]:
        names = [self._add(a) for a in asks]
        done: dict[str, Any] = {}
        while len(done) < len(names):
            result = self.manager.get_result(timeout=60)
            if result is None:
                break
            if result.request_id in names and result.is_finished():
                done[result.request_id] = result
        return [self._answer(done.get(name)) for name in names]

    def _answer(self, result: Any) -> Answer:
        if result is None:
            return Answer(error="no result within 60 s")
        if result.error:
            return Answer(error=str(result.error))
        tokens = list(result.generated_tokens)
        first = result.timestamps[0] - result.created_time if result.timestamps else None
        text = self.speaker.loaded.text(tokens)
        return Answer(
            tuple(tokens), text, logprobs=tuple(result.logprobs) or None, first_token=first
        )

    def abort(self, ask: Ask) -> None:
        name = self._add(ask, streaming=True)
        self.manager.get_result(name, timeout=60)  # the first token is out
        self.manager.cancel_request(name)

    def check(self) -> None:
        answer = self.complete([Ask((5, 6, 7), 2)])[0]
        if answer.error:
            raise EngineError(f"continuous batching does not serve: {answer.error}")

    def close(self) -> None:
        self.manager.stop(block=True)
