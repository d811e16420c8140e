"""``vtserve generate`` as a person runs it: real processes on a small checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from app.cli import main

Generate = Callable[..., subprocess.CompletedProcess[str]]
ALLOC_LINE = r"\[host-alloc\] "


@pytest.fixture
def model(shared_checkpoints: Path) -> Path:
    return shared_checkpoints / "llama-tied" / "NVFP4-modelopt"


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """This process's, without what would change vtserve; failure records go to `tmp_path`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VT_", "VTSERVE_"))}
    return {**kept, "XDG_STATE_HOME": str(tmp_path / "state"), **variables}


def command(model: Path, *arguments: str) -> list[str]:
    flags = ["--model", str(model), "--device", "cpu", "--kv-cache-memory", "1MiB", "--threads", "1"]
    return [sys.executable, "-m", "app.cli", "generate", *flags, *arguments]


@pytest.fixture
def generate(model: Path, tmp_path: Path) -> Generate:
    """Run the command to its end: ``generate(*arguments, input=None, model=…, env={})``."""

    def run(
        *arguments: str,
        input: str | bytes | None = None,
        model: Path = model,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        data = input.encode() if isinstance(input, str) else input
        done = subprocess.run(
            command(model, *arguments),
            input=data if data is not None else b"",
            capture_output=True,
            timeout=120,
            check=False,
            env=environment(tmp_path, **(env or {})),
        )
        text = done.stdout.decode(), done.stderr.decode()
        assert "Traceback" not in text[1]
        return subprocess.CompletedProcess(done.args, done.returncode, *text)

    return run


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(
        done.stdout.splitlines()[-1] if done.stdout[1] != "\n" else done.stdout
    )
    return document


# -- results -----------------------------------------------------------------------------------------------


def test_the_reference_command(model: Path, tmp_path: Path) -> None:
    reference = (
        f"vtserve generate --model {model} --device cpu --kv-cache-dtype fp8 --max-num-seqs 1 "
        "--kv-cache-memory 1000000000 --max-tokens 4 --temperature 0"
    )
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *reference.split()[1:], "--prompt", "The capital of France is"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(tmp_path, VT_CUDA_ALLOC_TRACE="1"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith(("[host-alloc] #", "[host-free]  ")) for line in lines)
    kv = [line for line in lines if " tag=kv/" in line]
    assert kv
    assert all("size=" in line and "live=" in line and "free=" in line for line in kv)


def test_streamed_json_ends_in_the_same_document(generate: Generate) -> None:
    arguments = ["--prompt", "a b", "--prompt", "c", "--output", "json", "--n", "2", "--logprobs", "3"]
    arguments += [
        "--max-tokens",
        "6",
        "--temperature",
        "0.8",
        "--seed",
        "11",
        "--top-p",
        "0.9",
        "--top-k",
        "50",
    ]
    arguments += ["--min-p", "0.01", "--repetition-penalty", "1.1", "--presence-penalty", "0.1"]
    arguments += ["--frequency-penalty", "0.1", "--stop", "@never@", "--stop", "#neither#"]
    whole, streamed = generate(*arguments), generate(*arguments, "--stream")
    document = json_of(whole)
    assert document == json_of(streamed)
    assert [result["prompt"] for result in document["results"]] == ["a b", "c"]
    texts: dict[tuple[int, int], str] = {}
    for piece in map(json.loads, streamed.stdout.splitlines()[:-1]):
        key = (piece["prompt_index"], piece["index"])
        texts[key] = texts.get(key, "") + piece["text"]
    outputs = {(r["prompt_index"], o["index"]): o for r in document["results"] for o in r["outputs"]}
    assert sorted(outputs) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert texts == {key: output["text"] for key, output in outputs.items()}
    for output in outputs.values():
        assert len(output["token_ids"]) == len(output["logprobs"])
        assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
        assert all(len(entry["top"]) == 3 for entry in output["logprobs"])
    assert outputs[0, 0]["token_ids"] != outputs[0, 1]["token_ids"]


def test_prompts_from_standard_input_come_out_in_order_and_as_alone(generate: Generate) -> None:
    lines = ["first prompt", "second, longer than the first", "third"]
    batch = json_of(
        generate("--prompt-file", "-", "--output", "json", "--max-tokens", "5", input="\n".join(lines))
    )
    assert [result["prompt"] for result in batch["results"]] == lines
    alone = json_of(generate("--prompt", lines[1], "--output", "json", "--max-tokens", "5"))
    assert alone["results"][0]["outputs"] == batch["results"][1]["outputs"]
    assert batch["usage"]["completion_tokens"] == sum(
        len(result["outputs"][0]["token_ids"]) for result in batch["results"]
    )


def test_chat_asks_through_the_template(generate: Generate) -> None:
    document = json_of(generate("--chat", "--prompt", "Why?", "--output", "json", "--max-tokens", "1"))
    prompt = document["results"][0]["prompt"]
    assert "Why?" in prompt
    assert "assistant" in prompt


def test_text_is_utf8_whatever_the_locale(generate: Generate) -> None:
    done = generate(
        *("--prompt", "Grüße", "--prompt", "☂", "--max-tokens", "2", "--stream"),
        env={"LC_ALL": "C", "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "1"},
    )
    assert done.returncode == 0
    assert done.stdout.startswith("==> 1/2: Grüße\n")
    assert "\n\n==> 2/2: ☂\n" in done.stdout


def test_statistics_come_last_on_stderr(generate: Generate) -> None:
    done = generate("--prompt", "a", "--max-tokens", "2", "--alloc-stats")
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("plan against actual: ")]
    heading, *rows, total, peak = lines
    assert heading.startswith("memory by tag")
    assert {"weights", "workspace", "kv"} <= {row.split()[0] for row in rows}
    assert sum(int(row.split()[1].replace(",", "")) for row in rows) == int(total.split()[1].replace(",", ""))
    assert peak.startswith("peak: ")


def test_trace_flags_win_over_variables(generate: Generate, tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    shown = ["--prompt", "a", "--max-tokens", "1", "--alloc-trace", "--alloc-trace-min-mib", "0"]
    done = generate(*shown, "--alloc-trace-file", str(ring), env={"VT_CUDA_ALLOC_TRACE": "0"})
    assert done.stderr.startswith("[host-alloc] #1 ")
    assert ring.stat().st_size > 0
    silent = generate(
        "--prompt", "a", "--max-tokens", "1", "--no-alloc-trace", env={"VT_CUDA_ALLOC_TRACE": "1"}
    )
    assert silent.stderr == ""
    assert silent.stdout == done.stdout


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_memory", ["100KiB", "600KiB"])
def test_out_of_memory_tells_what_failed_and_leaves_a_record(
    generate: Generate, tmp_path: Path, device_memory: str
) -> None:
    arguments = ["--prompt", "a", "--device-memory", device_memory, "--no-plan"]
    done = generate(*arguments, env={"VT_CUDA_ALLOC_TRACE": "on"})
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    failed = [line for line in lines if line.startswith("[host-alloc] FAILED #")]
    assert len(failed) == 1
    assert "why=full" in failed[0]
    fatal = next(number for number, line in enumerate(lines) if line.startswith("engine-fatal: "))
    assert lines.index(failed[0]) < fatal
    assert "--device-memory" in done.stderr
    [path] = (tmp_path / "state" / "vtserve" / "failures").iterdir()
    assert lines[-1].startswith("Error: ")
    assert lines[-1].endswith(str(path))
    record = json.loads(path.read_text())
    assert record["fatal"] is True
    assert f" #{record['allocation']['sequence']} " in failed[0]
    assert record["allocation"]["why"] == "full"
    assert record["levers"]
    assert record["trace"]


def test_the_failed_line_needs_no_trace(generate: Generate) -> None:
    done = generate("--prompt", "a", "--device-memory", "100KiB", "--no-plan")
    failed, fatal, *_, last = done.stderr.splitlines()
    assert failed.startswith("[host-alloc] FAILED size=")
    assert " tag=weights/" in failed
    assert fatal.startswith("engine-fatal: loading ")
    assert last.startswith("Error: ")


def test_the_lever_that_is_named_works(generate: Generate, tmp_path: Path) -> None:
    generate("--prompt", "a", "--device-memory", "600KiB", "--no-plan")
    [path] = (tmp_path / "state" / "vtserve" / "failures").iterdir()
    lever = next(lever for lever in json.loads(path.read_text())["levers"] if lever["enough"])
    arguments = ["--prompt", "a", "--max-tokens", "1", "--device-memory", "600KiB"]
    assert generate(*arguments, lever["flag"], lever["value"]).returncode == 0


def test_what_does_not_fit_is_not_loaded(generate: Generate, tmp_path: Path) -> None:
    """The plan names the request that fails when it is tried, and leaves a record as a failure does."""
    arguments = ["--prompt", "a", "--device-memory", "600KiB"]
    refused = generate(*arguments)
    assert refused.returncode == 1
    assert refused.stdout == ""
    failed, what, levers, last = refused.stderr.splitlines()
    assert failed.startswith("[host-alloc] FAILED #")
    assert failed.endswith(" planned=yes")
    assert what.startswith("engine-fatal: loading ")
    assert " would fail: out of memory" in what
    assert levers.startswith("engine-fatal: to make it fit: --device-memory ")
    said, _, written = last.partition("; failure record: ")
    assert said == "Error: nothing was loaded: it does not fit, as planned; --no-plan loads it all the same"
    [path] = (tmp_path / "state" / "vtserve" / "failures").iterdir()
    assert str(path) == written
    record = json.loads(path.read_text())
    assert record["doing"].startswith("planning to load ")
    assert record["trace"] == [failed]
    assert f"why={record['allocation']['why']}" in failed
    assert record["ledger"]["segments"]["weights"] > 0
    assert str(record["levers"][0]["value"]) in levers
    tried = generate(*arguments, "--no-plan", env={"VT_CUDA_ALLOC_TRACE": "on"})
    [real] = [line for line in tried.stderr.splitlines() if "FAILED" in line]
    assert real == failed.removesuffix(" planned=yes")


def test_plan_and_load_agree_to_the_byte(generate: Generate) -> None:
    done = generate("--prompt", "a", "--max-tokens", "1", "--alloc-stats")
    found = [line.split() for line in done.stderr.splitlines() if line.startswith("plan against actual: ")]
    assert {fields[3] for fields in found} == {"weights", "workspace", "io", "kv"}
    assert all(fields[4] == fields[5] and fields[6] == "+0" for fields in found)


def spoil_nothing(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


def spoil_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def spoil_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Perceptron"]}))


def spoil_weights(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


def spoil_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)


def spoil_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_bytes(b"\x00\xff{}")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_nothing, "config.json"),
        (spoil_config, "config.json"),
        (spoil_architecture, "Perceptron"),
        (spoil_weights, "model.safetensors"),
        (spoil_header, "model.safetensors"),
        (spoil_tokenizer, "tokenizer.json"),
    ],
)
def test_a_damaged_model_is_one_line(
    generate: Generate, model: Path, tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    copy.chmod(0o755)
    for file in copy.iterdir():
        file.chmod(0o644)
    spoil(copy)
    done = generate("--prompt", "a", model=copy)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_prompt_that_does_not_fit_is_one_line(generate: Generate) -> None:
    done = generate("--prompt", "ok", "--prompt", "word " * 200, "--max-model-len", "64")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: prompt 2: ")
    assert done.stderr.count("\n") == 1


def test_a_bad_variable_is_a_usage_error(generate: Generate) -> None:
    done = generate("--prompt", "a", env={"VT_CUDA_ALLOC_TRACE": "maybe"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: VT_CUDA_ALLOC_TRACE='maybe'")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--kv-cache-memory", "lots"],
            "'lots' is not a size in bytes; write it like 1000000000, 200MiB or 1.5G",
        ),
        (["--kv-cache-memory-bytes", "-1"], "'--kv-cache-memory-bytes'"),
        (["--device-memory", "1e9"], "'--device-memory'"),
        (["--temperature", "nan"], "'--temperature'"),
        (["--temperature", "-0.1"], "'--temperature'"),
        (["--top-p", "0"], "'--top-p'"),
        (["--max-tokens", "0"], "'--max-tokens'"),
        (["--n", "none"], "'--n'"),
        (["--device", "tpu"], "'cuda'"),
        (["--kv-cache-dtype", "int8"], "'fp8'"),
        (["--prompt-file", "/nonexistent/prompts"], "/nonexistent/prompts: No such file"),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "--max-num-batched-tokens 4"),
        (["stray"], "stray"),
    ],
)
def test_usage_errors_name_the_flag(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["generate", "--model", "m", "--prompt", "a", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_a_model_without_a_prompt_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["generate", "--model", "m"])
    assert result.exit_code == 2
    assert "--prompt" in result.stderr.splitlines()[-1]


def test_without_a_home_a_model_of_a_directory_runs(
    model: Path, no_home: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = [*command(model, "--prompt", "a", "--max-tokens", "2")[3:]]
    result = CliRunner().invoke(main, flags)
    assert (result.exit_code, result.stderr) == (0, "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = CliRunner().invoke(main, [*flags, "--device-memory", "1MiB"])
    assert result.exit_code == 1
    [record] = tmp_path.glob("vtserve-*/failures/*.json")
    assert str(record) in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["generate"], 2, "Error: there is no home directory; set VTSERVE_CACHE "),
        (["generate", "--model", "owner/name", "--prompt", "a"], 1, "; set HF_HOME to a folder"),
        (["plan", "owner/name"], 1, "; set HF_HOME to a folder"),
    ],
)
def test_without_a_home_the_variable_to_set_is_named(
    arguments: list[str], status: int, said: str, no_home: None
) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


# -- signals and pipes -------------------------------------------------------------------------------------


def test_interrupt_is_quiet(model: Path, tmp_path: Path) -> None:
    arguments = command(model, "--prompt", "a", "--stream", "--output", "json", "--max-tokens", "100000")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("{")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == ""
    assert process.returncode == 130


def test_a_closed_pipe_is_quiet(model: Path, tmp_path: Path) -> None:
    arguments = command(model, "--prompt", "a", "--stream", "--output", "json", "--max-tokens", "100000")
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("{")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
