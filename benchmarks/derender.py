"""What derendering costs: CPU per token, whether it grows with the output, and the size of the carried state.

    python benchmarks/derender.py [--runs 5]

An output of the default model's vocabulary (the marks added as tokens): 60 % thinking, then text, then one hermes call;
one token a chunk. Four ways, all on one core:

- `native`: the decode stream of the `tokenizers` package, which does nothing else and cannot move to another call.
- `plain`: `Derenderer` without parsers. `parsers`: the same with qwen3 and hermes.
- `call`: a whole call of the derender endpoint without HTTP, the client's JSON included (request, prompt and state are
  resent each time).

Figures are the lowest of the runs, in microseconds of CPU per token. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.decoders import DecodeStream

from fourhop.checkpoint import DEFAULT_MODEL, find
from fourhop.frontend.context import Context, chat_context
from fourhop.frontend.derender import Derenderer
from fourhop.frontend.derender_checks import Limits
from fourhop.frontend.derender_endpoints import Served, derender_chat
from fourhop.frontend.model import Model, SamplingDefaults
from fourhop.frontend.parsers import find as find_parsers
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.derender import ChatDerenderRequest, StreamState
from fourhop.wire.generate import ChunkChoice, GenerateChunk
from fourhop.wire.openai_chat import ChatCompletionRequest

SIZES = (250, 2000)
NUM_PROMPT = 500
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "search_documents", "parameters": {"type": "object", "properties": {}}}}
]
CALL = (
    '<tool_call>\n{"name": "search_documents", "arguments": {"query": "who holds must release", "limit": 25}}\n'
    "</tool_call>"
)


def vocabulary() -> tuple[NativeTokenizer, Tokenizer]:
    """The default model's tokenizer with the marks as tokens, native and ours."""
    native = NativeTokenizer.from_file(str(find(DEFAULT_MODEL).folder / "tokenizer.json"))
    native.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return native, Tokenizer(native, vocab_size=native.get_vocab_size(), special_tokens={})


def output(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    prose = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    text = tokenizer.encode(prose, add_special_tokens=False)
    think, call = (
        tokenizer.encode("<think>", add_special_tokens=False),
        tokenizer.encode(CALL, add_special_tokens=False),
    )
    end = tokenizer.encode("</think>", add_special_tokens=False)
    num_text = num_tokens - len(think + end + call)
    num_thinking = int(num_text * 0.6)
    return [*think, *text[:num_thinking], *end, *text[num_thinking:num_text], *call]


def in_process(context: Context, chunks: list[ChunkChoice]) -> None:
    derenderer = Derenderer.start(context, 0)
    for chunk in chunks:
        derenderer.feed(chunk)


def call_by_call(served: Served, request: ChatCompletionRequest, prompt: list[int], chunks: list[ChunkChoice]) -> int:
    """The client's loop without HTTP. Returns the size of the largest state."""
    fixed = {"stream": True, "chat_request": request, "prompt_token_ids": prompt, "prompt_tokens": len(prompt)}
    state: StreamState | None = None
    largest = 0
    for chunk in chunks:
        body = {**fixed, "generate_chunk": GenerateChunk(request_id="r", choices=[chunk]), "stream_state": state}
        data = msgspec.json.encode(body)
        answer = derender_chat(msgspec.json.decode(data, type=ChatDerenderRequest), served, created=0)
        msgspec.json.encode(answer)
        state = answer.stream_state  # type: ignore[union-attr]
        largest = max(largest, len(msgspec.json.encode(state)))
    return largest


def native_stream(native: NativeTokenizer, ids: list[int]) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    for token_id in ids:
        stream.step(native, token_id)


def cpu_us_per_token(run: Callable[[], object], num_tokens: int, num_runs: int) -> float:
    times = []
    for _ in range(num_runs):
        start = time.process_time_ns()
        run()
        times.append(time.process_time_ns() - start)
    return min(times) / num_tokens / 1000


def measure(num_runs: int) -> dict[int, dict[str, float]]:
    native, tokenizer = vocabulary()
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x" * 2000}], tools=TOOLS, stream=True)
    prompt = output(tokenizer, NUM_PROMPT)
    parsers = find_parsers("qwen3", "hermes", tokenizer)
    parsed = chat_context(request, prompt, tokenizer, parsers)
    plain = chat_context(request, prompt, tokenizer, find_parsers(None, None, tokenizer))
    served = Served(
        model=Model(names=("m",), max_model_len=8192, eos_token_ids=frozenset(), defaults=SamplingDefaults()),
        tokenizer=tokenizer,
        parsers=parsers,
        prompt_of=lambda _: prompt,
        limits=Limits(max_model_len=8192, vocab_size=tokenizer.vocab_size, max_num_choices=1, max_logprobs=0),
    )
    results = {}
    for size in SIZES:
        ids = output(tokenizer, size)
        chunks = [ChunkChoice(token_ids=[token_id]) for token_id in ids]
        ways: dict[str, Callable[[], object]] = {
            "native": partial(native_stream, native, ids),
            "plain": partial(in_process, plain, chunks),
            "parsers": partial(in_process, parsed, chunks),
            "call": partial(call_by_call, served, request, prompt, chunks),
        }
        results[size] = {name: cpu_us_per_token(run, size, num_runs) for name, run in ways.items()}
        results[size]["state_bytes"] = call_by_call(served, request, prompt, chunks)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each way (default: %(default)s)")
    results = measure(parser.parse_args().runs)
    table = Table("CPU µs per token", *(f"{size:,} tokens" for size in SIZES), "growth")
    for name in ("native", "plain", "parsers", "call"):
        first, last = (results[size][name] for size in SIZES)
        table.add_row(name, f"{first:.2f}", f"{last:.2f}", f"{last / first:.2f}")
    table.add_row("largest state, bytes", *(f"{results[size]['state_bytes']:.0f}" for size in SIZES), "")
    Console(width=100).print(table)
    small, large = (results[size] for size in SIZES)
    figures = {
        "derender_growth": large["call"] / small["call"],
        "derender_call_us": large["call"],
        "state_bytes": large["state_bytes"],
        "parse_over_detok": large["parsers"] / large["plain"],
        "parse_over_native": large["parsers"] / large["native"],
        "derender_tokens_per_s": 1e6 / large["parsers"],
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
