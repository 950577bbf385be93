"""What text work costs: render, a growing conversation, derender in a stream and at once, memory and start.

    python benchmarks/frontend.py [--vllm-python PYTHON]

One `fourhop frontend` with Qwen3's tokenizer and the parsers qwen3 and hermes, alone on one core; the client is on
another. With `--vllm-python` (a Python that has vLLM) `vllm launch render` gets the same requests after it. Figures are
processor time of the server (from /proc, all its threads and children), the lowest of some rounds, so that they hold on
a busy machine; only the start is by the clock. Every answer is checked for its status. The last line is JSON.

- `render`: chats of about 9,000 tokens, each of new text. `again`: the same chats a second time.
- `turn k`: conversations that grow by 400 + 100 tokens a turn and are sent whole, as clients do.
- `derender`: one token a call, the request, 500 prompt ids and the state sent each time: 60 % thinking, text, one call.
- `batch`: 4,000 tokens with five alternatives each in one call.
- `parsers` against `plain` and `native`: the same output without HTTP, one token a chunk: with parsers, without, and
  the decode stream of the `tokenizers` package, which does nothing else and cannot move to another call.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.decoders import DecodeStream

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fakes.checkpoints import qwen3_folder
from fourhop.frontend.context import Context, chat_context
from fourhop.frontend.derender import Derenderer
from fourhop.frontend.parsers import find as find_parsers
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.service import ServerConfig, bind
from fourhop.wire.generate import ChunkChoice
from fourhop.wire.openai_chat import ChatCompletionRequest

NUM_RENDER, NUM_TURNS, NUM_PROMPT, NUM_BATCH = 9000, 20, 500, 4000
SIZES = (250, 1000, 2000)
READY_S, SETTLE_S = 300.0, 30
FLAGS = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "search_documents", "parameters": {"type": "object", "properties": {}}}}
]
CALL = (
    '\n<tool_call>\n{"name": "search_documents", "arguments": {"query": "who holds must release", "limit": 25}}\n'
    "</tool_call><|im_end|>"
)

Results = dict[str, float]


class Prose:
    """English from Python's own manual, in an order that differs each time it is asked."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        paragraphs = {" ".join(part.split()) for text in topics.topics.values() for part in text.split("\n\n")}
        plain = sorted(text for text in paragraphs if len(text) > 120 and sum(map(str.isalpha, text)) > 0.7 * len(text))
        self._ids = [tokenizer.encode(f"{text}\n\n", add_special_tokens=False) for text in plain]
        self._decode = tokenizer.decode
        self._random = random.Random(1)

    def ids(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            found += self._random.choice(self._ids)
        return found[:count]

    def text(self, num_tokens: int) -> str:
        return self._decode(self.ids(num_tokens))


# Servers.


@dataclass
class Server:
    """A server process and one connection to it, on which requests follow each other."""

    pid: int
    connection: http.client.HTTPConnection
    start_s: float = 0.0

    def post(self, path: str, body: object) -> dict[str, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {answer[:400]!r}")
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def cpu_ms(self, work: Callable[[], object], count: int = 1) -> float:
        """Processor time of the server for each of `count` things that `work` asks of it."""
        before = cpu_ns(self.pid)
        work()
        spent = sum(ns - before.get(task, 0) for task, ns in cpu_ns(self.pid).items())
        return spent / count / 1e6

    def settle(self) -> None:
        """Until it works at nothing: what it does beside its first requests is done. Some never rest."""
        quiet_s = 0
        for _ in range(SETTLE_S):
            quiet_s = quiet_s + 1 if self.cpu_ms(lambda: time.sleep(1.0)) < 20 else 0
            if quiet_s == 3:
                return


@contextmanager
def serving(command: Sequence[str], port: int, core: int) -> Iterator[Server]:
    """A server that answers, pinned to a core; ended at the end."""
    started_s = time.perf_counter()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # Python keeps compiled modules, as it does unless told otherwise.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, env=environment, preexec_fn=lambda: os.sched_setaffinity(0, {core}), **quiet)
    try:
        while not is_healthy(port):
            if process.poll() is not None or time.perf_counter() - started_s > READY_S:
                raise SystemExit(f"did not start: {' '.join(command)}")
            time.sleep(0.01)
        start_s = time.perf_counter() - started_s
        yield Server(process.pid, http.client.HTTPConnection("127.0.0.1", port, timeout=600), start_s)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in read(task / "children").split()]
    return [pid, *(member for child in children for member in family(child))]


def cpu_ns(pid: int) -> dict[Path, int]:
    """Processor time of each thread so far (Linux, /proc)."""
    tasks = [task for member in family(pid) for task in Path(f"/proc/{member}/task").iterdir()]
    return {task: int((read(task / "schedstat") or "0").split()[0]) for task in tasks}


def rss_mb(pid: int) -> float:
    lines = [line for member in family(pid) for line in read(Path(f"/proc/{member}/status")).splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # gone meanwhile


def free_port() -> int:
    with bind(ServerConfig(port=0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def frontend(port: int) -> list[str]:
    return [sys.executable, "-m", "fourhop", "frontend", str(qwen3_folder()), "--port", str(port), *FLAGS]


def vllm(python: str, port: int) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    return [python, "-m", "vllm.entrypoints.cli.main", "launch", "render", str(qwen3_folder()), *address, *FLAGS]


# Loads.


def chat(contents: Sequence[str], **fields: Any) -> dict[str, Any]:
    """A chat of a system message, then user and assistant in turns."""
    messages = [{"role": "system", "content": "Answer from the given text and say when you are not sure."}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, "max_tokens": 256, "temperature": 0.7, **fields}


def render(server: Server, prose: Prose, count: int, rounds: int) -> Results:
    """Milliseconds for a chat of new text, and for one that came before."""
    path, new, again = "/v1/chat/completions/render", [], []
    for _ in range(rounds):
        chats = [json.dumps(chat([prose.text(NUM_RENDER // 9) for _ in range(9)])).encode() for _ in range(count)]
        new.append(server.cpu_ms(lambda chats=chats: [server.post(path, body) for body in chats], count))  # type: ignore[misc]
        again.append(server.cpu_ms(lambda chats=chats: [server.post(path, body) for body in chats], count))  # type: ignore[misc]
    return {"render_ms": min(new), "render_again_ms": min(again)}


def turns(server: Server, prose: Prose, count: int, rounds: int) -> Results:
    """Milliseconds for the second and the last turn of conversations that grow side by side."""
    path, second, last = "/v1/chat/completions/render", [], []
    for _ in range(rounds):
        conversations: list[list[str]] = [[] for _ in range(count)]
        spent = []
        for _ in range(NUM_TURNS):
            for conversation in conversations:
                conversation += [prose.text(100)] if conversation else []
                conversation.append(prose.text(400))
            bodies = [json.dumps(chat(conversation)).encode() for conversation in conversations]
            spent.append(server.cpu_ms(lambda bodies=bodies: [server.post(path, body) for body in bodies], count))  # type: ignore[misc]
        second.append(spent[1])
        last.append(spent[-1])
    return {"turn2_ms": min(second), f"turn{NUM_TURNS}_ms": min(last)}


def output(tokenizer: Tokenizer, prose: Prose, num_tokens: int) -> list[int]:
    start, end, call = (tokenizer.encode(t, add_special_tokens=False) for t in ("<think>\n", "\n</think>\n\n", CALL))
    num_text = num_tokens - len(start + end + call)
    num_thinking = int(num_text * 0.6)
    return [*start, *prose.ids(num_thinking), *end, *prose.ids(num_text - num_thinking), *call]


def derender(server: Server, tokenizer: Tokenizer, prose: Prose, sizes: Sequence[int]) -> Results:
    """Milliseconds a token, and the largest state in bytes."""
    request = chat(["x"], tools=TOOLS, stream=True)
    prompt = prose.ids(NUM_PROMPT)
    fixed = {"stream": True, "chat_request": request, "prompt_token_ids": prompt, "prompt_tokens": len(prompt)}
    states: list[int] = []

    def stream(ids: Sequence[int]) -> None:
        state = None
        for place, token_id in enumerate(ids):
            finish = "stop" if place == len(ids) - 1 else None
            choice = {"index": 0, "token_ids": [token_id], "finish_reason": finish, "stop_reason": None}
            piece = {"request_id": "chatcmpl-1", "output_mode": "tokens", "choices": [{**choice, "logprobs": None}]}
            body = {**fixed, "generate_chunk": piece, "stream_state": state}
            state = server.post("/v1/chat/completions/derender", body)["stream_state"]
            states.append(len(json.dumps(state)))

    results = {}
    for size in sizes:
        ids = output(tokenizer, prose, size)
        results[f"derender_{size}_ms"] = server.cpu_ms(lambda ids=ids: stream(ids), size)  # type: ignore[misc]
    return {**results, "state_bytes": max(states)}


def batch(server: Server, tokenizer: Tokenizer, prose: Prose, rounds: int) -> Results:
    """Milliseconds for a whole output with its alternatives."""
    ids = output(tokenizer, prose, NUM_BATCH)
    others = prose.ids(5 * NUM_BATCH)
    logprobs = [
        {
            "token_id": token_id,
            "logprob": -0.1,
            "rank": 1,
            "top_logprobs": [
                {"token_id": other, "logprob": -1.0 - n, "rank": n + 1}
                for n, other in enumerate(others[5 * place : 5 * place + 5])
            ],
        }
        for place, token_id in enumerate(ids)
    ]
    choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "stop_reason": None}
    prompt = prose.ids(NUM_PROMPT)
    times = {}
    for name, content in (("batch_ms", {"content": logprobs}), ("batch_plain_ms", None)):
        asked = {"logprobs": True, "top_logprobs": 5} if content else {}
        whole = {"request_id": "chatcmpl-1", "model": "m", "created": 1, "choices": [{**choice, "logprobs": content}]}
        body = {"generate_response": whole, "chat_request": chat(["x"], tools=TOOLS, **asked)}
        data = json.dumps({**body, "prompt_token_ids": prompt, "prompt_tokens": len(prompt)}).encode()
        spent = [server.cpu_ms(lambda: server.post("/v1/chat/completions/derender", data)) for _ in range(rounds)]  # noqa: B023
        times[name] = min(spent)
    return times


def in_process(tokenizer: Tokenizer, prose: Prose, rounds: int) -> Results:
    """Microseconds a token without HTTP."""
    ids = output(tokenizer, prose, max(SIZES))
    chunks = [ChunkChoice(token_ids=[token_id]) for token_id in ids]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS, stream=True)
    native = NativeTokenizer.from_file(str(qwen3_folder() / "tokenizer.json"))
    ways = {"native_us": lambda: decode(native, ids)}
    for name, reasoning, tool in (("plain_us", None, None), ("parsers_us", "qwen3", "hermes")):
        parsers = find_parsers(reasoning, tool, tokenizer)
        context = chat_context(request, prose.ids(NUM_PROMPT), tokenizer, parsers)
        ways[name] = lambda context=context: feed(context, chunks)  # type: ignore[misc]
    return {name: min(own_cpu_s(way) for _ in range(rounds)) / len(ids) * 1e6 for name, way in ways.items()}


def decode(native: NativeTokenizer, ids: Sequence[int]) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    for token_id in ids:
        stream.step(native, token_id)


def feed(context: Context, chunks: Sequence[ChunkChoice]) -> None:
    derenderer = Derenderer.start(context, 0)
    for chunk in chunks:
        derenderer.feed(chunk)


def own_cpu_s(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


# All of it.


def measure_ours(tokenizer: Tokenizer, core: int) -> Results:
    prose = Prose(tokenizer)
    starts = []
    for _ in range(3):
        with serving(frontend(port := free_port()), port, core) as server:
            starts.append(server.start_s)
    with serving(frontend(port := free_port()), port, core) as server:
        server.settle()
        results = {"start_s": min(starts), "rss_start_mb": rss_mb(server.pid)}
        results |= render(server, prose, count=40, rounds=3) | turns(server, prose, count=24, rounds=3)
        results |= derender(server, tokenizer, prose, SIZES) | batch(server, tokenizer, prose, rounds=5)
        results["rss_mb"] = rss_mb(server.pid)
    return results | in_process(tokenizer, prose, rounds=5)


def measure_vllm(python: str, tokenizer: Tokenizer, core: int) -> Results:
    """The same requests, fewer of them."""
    prose = Prose(tokenizer)
    with serving(vllm(python, port := free_port()), port, core) as server:
        server.settle()
        results = {"start_s": server.start_s, "rss_start_mb": rss_mb(server.pid)}
        results |= render(server, prose, count=10, rounds=2) | turns(server, prose, count=2, rounds=1)
        results |= derender(server, tokenizer, prose, SIZES[:2]) | batch(server, tokenizer, prose, rounds=3)
        return results | {"rss_mb": rss_mb(server.pid)}


def keys(ours: Results, theirs: Results | None) -> Results:
    """The figures that this project promises, by name."""
    last = f"turn{NUM_TURNS}"
    named = {
        "render_9k_per_core_s": 1000 / ours["render_ms"],
        f"{last}_over_turn2": ours[f"{last}_ms"] / ours["turn2_ms"],
        "derender_growth": ours["derender_2000_ms"] / ours["derender_250_ms"],
        "state_bytes": ours["state_bytes"],
        "parse_over_detok": ours["parsers_us"] / ours["plain_us"],
        "derender_tokens_per_s": 1e6 / ours["parsers_us"],
        "batch_4000_ms": ours["batch_ms"],
        "rss_mb": ours["rss_mb"],
        "start_s": ours["start_s"],
    }
    if theirs is not None:
        named["render_over_vllm"] = theirs["render_ms"] / ours["render_ms"]
        named["derender_1000_over_vllm"] = theirs["derender_1000_ms"] / ours["derender_1000_ms"]
    return {name: round(value, 3) for name, value in named.items()}


def show(ours: Results, theirs: Results | None) -> None:
    table = Table("", "fourhop", *(["vLLM", "vLLM / fourhop"] if theirs else []))
    for name, value in ours.items():
        other = (theirs or {}).get(name)
        cells = [] if theirs is None else ["", ""] if other is None else [f"{other:,.2f}", f"{other / value:,.1f}"]
        table.add_row(name, f"{value:,.2f}", *cells)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="a Python with vLLM, for its figures in the same run")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    tokenizer = Tokenizer.load(qwen3_folder())
    load = os.getloadavg()[0]
    ours = measure_ours(tokenizer, cores[0])
    theirs = measure_vllm(arguments.vllm_python, tokenizer, cores[0]) if arguments.vllm_python else None
    show(ours, theirs)
    print(f"load average of the last minute: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    print(json.dumps(keys(ours, theirs)))


if __name__ == "__main__":
    main()
