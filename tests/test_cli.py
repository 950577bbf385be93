"""The command line: help worth reading, and one clear line for whatever is wrong."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.toy import write_toy_checkpoint
from fourhop import __version__
from fourhop.cli import execute

COMMANDS = ("up", "serve", "frontend", "router", "engine", "fetch")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_sentence_an_example_and_every_default_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Usage: fourhop {command}" in text
    assert f"Example: fourhop {command}" in text
    assert "--log-level" in text and "FOURHOP_LOG_LEVEL" in text


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"│ {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", ["serve", "engine", "up"])
def test_flags_are_named_as_vllm_names_them(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    execute([command, "--help"])
    text = capsys.readouterr().out
    names = ["port", "host", "served-model-name", "max-model-len", "max-num-batched-tokens", "max-num-seqs", "api-key"]
    names += ["no-enable-prefix-caching", "block-size"]
    names += ["kv-transfer-config"] if command == "engine" else []
    names += ["reasoning-parser", "tool-call-parser", "enable-auto-tool-choice"] if command != "engine" else []
    assert [name for name in names if f"--{name}" not in text] == []


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nonsense"], 2, 'Unknown command "nonsense"'),
        (["engine", "--prot", "1"], 2, "Unknown option: --prot"),
        (["engine", "--port", "x"], 2, "--port"),
        (["engine", "--port", "70000"], 2, "port must be 0 to 65535, not 70000"),
        (["engine", "--dtype", "int3"], 2, "--dtype"),
        (["engine", "--kv-transfer-config", '{"kv_connector": "shm", "role": 1}'], 2, "role"),
        (["engine", "--kv-transfer-config", '{"kv_connector": 1}'], 2, "kv_connector: Expected `str`, got `int`"),
        (["engine", "--kv-transfer-config", "shm"], 2, "not JSON"),
        (["router"], 2, "a router needs at least one engine"),
        (["router", "--prefill", "localhost:80"], 2, "not the URL of an engine: localhost:80"),
        (["router", "--prefill", "http://a:99999"], 2, "not the URL of an engine: http://a:99999"),
        (["router", "--decode", "http://[::1"], 2, "not the URL of an engine: http://[::1"),
        (["router", "--decode", "http://a..b"], 2, "not the URL of an engine: http://a..b"),
        (["router", "--engines-file", "/no/such/file"], 1, "cannot read /no/such/file"),
        (["router", "--engines-dns", "engines:80"], 2, "must be prefill=HOST:PORT or decode=HOST:PORT"),
        (["router", "--engines-dns", "prefill=a..b:80"], 2, "not the URL of an engine: http://a..b:80"),
        (["router", "--engines-kubernetes", "engines"], 2, "must be prefill=SERVICE[:PORT]"),
        (["router", "--engines-join", "--kubernetes-url", "here"], 2, "kubernetes_url: not the URL of a server: here"),
        (["router", "--engines-join", "--discovery-interval-s", "0"], 2, "discovery_interval_s must be a positive"),
        (["router", "--engines-join", "--admin-key", ""], 2, "admin_key must not be empty"),
        (["engine", "--join", "http://r"], 2, "--join needs --join-as prefill"),
        (["engine", "--join-as", "prefill"], 2, "need --join URL"),
        (["engine", "--join-key", "k"], 2, "need --join URL"),
        (["router", "--prefill", "http://a", "--otlp-endpoint", "http://a:x"], 2, "not the URL of a collector"),
        (["engine", "--join", "http://r:x", "--join-as", "decode"], 2, "not the URL of a server: http://r:x"),
        (
            ["engine", "--join", "http://r", "--join-as", "decode", "--host", "0.0.0.0", "--port", "0"],
            1,
            "needs --advertise-url",
        ),
        (["check", "transfer", "http://a:99999", "http://b"], 1, "not the URL of a server: http://a:99999"),
        (["check", "transfer", "http://a", "http://a..b"], 1, "not the URL of a server: http://a..b"),
        (["why", "x", "--url", "http://[::1"], 2, "not the URL of a server: http://[::1"),
        (["serve", "--enable-auto-tool-choice", "--tool-call-parser", "none"], 2, "needs a tool_call_parser"),
        (["up", "--decode", "0"], 2, "--decode must be at least 1, not 0"),
        (["engine", "--block-size", "0"], 2, "block_size must be at least 1, not 0"),
        (["up", "--max-num-seqs", "0"], 2, "max_num_seqs must be at least 1, not 0"),
        (["serve", "--num-blocks", "1"], 2, "num_blocks must be at least 2, not 1"),
        (["serve", "--num-threads", "0"], 2, "num_threads must be at least 1, not 0"),
        (["engine", "--stall-timeout-s", "0"], 2, "stall_timeout_s must be positive"),
        (["frontend", "--workers", "0"], 2, "workers must be at least 1, not 0"),
        (["serve", "--workers", "2"], 2, "Unknown option: --workers"),
        (["up", "--workers", "2"], 2, "Unknown option: --workers"),
        (["frontend", "--upstream", "here"], 2, "not the URL of a server: here"),
        (["frontend", "--upstream", "http://a..b"], 2, "not the URL of a server: http://a..b"),
        (["engine", "/no/such/model", "--port", "0"], 1, "no model at /no/such/model"),
        (["frontend", "/no/such/model", "--port", "0"], 1, "no model at /no/such/model"),
        (["fetch", "/no/such/model"], 1, "no model at /no/such/model"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fourhop: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("command", [["engine"], ["serve"], ["frontend"], ["up"], ["router", "--decode", "http://e"]])
def test_a_port_in_use_is_told_before_anything_is_loaded(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert execute([*command, "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"fourhop: port {port} is in use\n"


def test_the_program_ends_with_the_status_and_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fourhop", "engine", "--prot", "1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fourhop: Unknown option: --prot. Did you mean --port?")
    assert done.stderr.count("\n") == 1


def test_no_tier_but_the_engine_imports_torch() -> None:
    program = (
        "import sys, fourhop.cli, fourhop.up.run, fourhop.frontend.app, fourhop.router.app;"
        "sys.exit(', '.join({'torch', 'transformers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_parser_that_is_not_known_is_told_before_an_engine_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no weights: an engine would have failed for that."""
    folder = write_toy_checkpoint(tmp_path)
    (folder / "model.safetensors").touch()
    assert execute([command, str(folder), "--port", "0", "--reasoning-parser", "nope"]) == 1
    assert "fourhop: unknown reasoning parser 'nope'; known: " in capsys.readouterr().err
