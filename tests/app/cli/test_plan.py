"""``vtserve plan``: its lines, its JSON, its statuses; for directories, ids, and GPUs that are not here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from benchmarks.plan_27b import write_sparse_checkpoint
from engine.planning.plan import LoadPlan
from tests.checkpoints import CHECKPOINTS
from tests.model.fake_hub import serving

Plan = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def model() -> str:
    return str(CHECKPOINTS / "llama-untied" / "NVFP4-FP8KV-ct")


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("large")
    write_sparse_checkpoint(directory)
    return str(directory)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "app.cli", "plan", *arguments],
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_what_fits(plan: Plan, model: str) -> None:
    done = plan(
        model, "--device", "cpu", "--device-memory", "64MiB", "--at-length", "100", "--at-length", "500"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("NVFP4-FP8KV-ct on the cpu device of 64.0 MiB, of which 57.6 MiB may be used")
    assert any(line.startswith("weights ") for line in lines)
    assert any(line.startswith("  model.layers.*.mlp.gate_up_proj ") for line in lines)
    assert any(line.startswith("KV cache: ") for line in lines)
    [at_once] = [line for line in lines if line.startswith("sequences at once")]
    assert " of 100, " in at_once
    assert " of 500 " in at_once
    assert any(line.startswith("not at four bits: ") for line in lines)
    assert any(line.startswith("peak while weights load: ") for line in lines)
    assert lines[-1].startswith("fits: ")


def test_what_does_not_fit(plan: Plan, model: str) -> None:
    done = plan(model, "--device", "cpu", "--device-memory", "9MiB")
    assert done.returncode == 3, done.stderr
    *_, verdict, failed, levers = done.stdout.splitlines()
    assert verdict == "does not fit:"
    assert failed.startswith("[host-alloc] FAILED #")
    assert failed.endswith(" planned=yes")
    assert levers.startswith("to make it fit: --device-memory ")
    assert levers.endswith("(each planned again)")
    flag, value = levers.removeprefix("to make it fit: ").split(",")[0].split()
    assert plan(model, "--device", "cpu", "--device-memory", "9MiB", flag, value).returncode == 0


@pytest.mark.parametrize(("memory", "status"), [("64MiB", 0), ("9MiB", 3)])
def test_json_has_everything_and_is_read_back(plan: Plan, model: str, memory: str, status: int) -> None:
    done = plan(model, "--device", "cpu", "--device-memory", memory, "--json", "--at-length", "64")
    assert done.returncode == status
    facts = json.loads(done.stdout)
    schema: dict[str, Any] = msgspec.json.schema(LoadPlan)
    jsonschema_rs.validate(schema, facts)
    read = msgspec.convert(facts, LoadPlan)
    assert read.fits is (status == 0)
    blocks = 0 if read.kv_cache is None else read.kv_cache.num_blocks
    assert (blocks > 0) is (status == 0), "it fails before the cache is sized"
    assert facts["sequences_at"] == {"64": blocks // 4}
    assert sum(read.tags.values()) == sum(read.ledger["segments"].values())
    assert bool(read.failure) is bool(read.levers) is (status == 3)
    if read.failure is not None:
        assert {"size", "tag", "site", "sequence", "why"} <= set(read.failure.request)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--gpu", "abacus"], 2, "--gpu abacus: expected one of "),
        (["--gpu", "l4"], 2, "--gpu l4: expected --device-memory SIZE"),
        (["--gpu", "l4", "--device", "cpu"], 2, "--gpu l4: --device is cpu"),
        (["--device-memory", "lots"], 2, "--device-memory"),
        (["--at-length", "0"], 2, "--at-length"),
        (["--max-model-len", "1000000", "--device", "cpu"], 2, "--max-model-len 1000000: the model has "),
        (["--model", "other"], 2, "--model is other"),
        (["--block-size", "8", "--gpu", "l4", "--device-memory", "1GiB"], 2, "--block-size 8: the CUDA"),
    ],
)
def test_flags_that_cannot_be_used(
    plan: Plan, model: str, arguments: list[str], status: int, said: str
) -> None:
    done = plan(model, *arguments)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_or_not_sound(plan: Plan, model: str, tmp_path: Path) -> None:
    missing = plan(str(tmp_path / "nothing"))
    assert missing.returncode == 1
    assert "no such directory" in missing.stderr
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = plan(str(broken), "--device", "cpu")
    assert done.returncode == 1
    assert "not a sound safetensors file" in done.stderr


def test_no_device_is_no_secret(plan: Plan, model: str) -> None:
    done = plan(model, "--device", "cuda", CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --device cuda: ")
    assert done.stderr.endswith("; --gpu NAME plans for one that is not here\n")


def test_a_gpu_that_is_not_here(plan: Plan, large_model: str) -> None:
    done = plan(large_model, "--gpu", "rtx-4090", "--device-memory", "23.6GiB", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["device"], facts["description"]) == ("cuda", "rtx-4090")
    assert facts["needed"]["weights"] == 16_780_120_320
    assert facts["load_peak"]["tag"].startswith("repack/")
    assert 0 < facts["load_peak"]["over_resident"] <= 16 << 20
    wide = {tensor["name"]: tensor for tensor in facts["wide"]["tensors"]}
    assert wide["lm_head"]["bytes"] == 151_936 * 5120 * 2
    assert wide["lm_head"]["over_four_bits"] == 151_936 * 5120 * 2 - 151_936 * 5120 * 9 // 16
    assert wide["model.layers.*.self_attn.q_proj"]["count"] == 64
    assert facts["estimates"]


def test_a_large_plan_takes_little_memory(large_model: str) -> None:
    script = (
        "import re, sys; from app.cli import main\n"
        "try: main(sys.argv[1:], prog_name='vtserve')\n"
        "except SystemExit as end: status = end.code\n"
        # Not getrusage's figure: that begins with the parent's.
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", large_model, "--gpu", "l4", "--device-memory", "18.5GiB"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "to make it fit: " in done.stdout
    assert int(done.stderr) < 300 * 1024, "KiB"


def test_an_id_of_the_hub(model: str, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in Path(model).iterdir() if path.is_file()}
    with serving(files) as hub:
        command = [sys.executable, "-m", "app.cli", "plan", "owner/name", "--device", "cpu", "--json"]
        done = hub.run(command, tmp_path)
        assert done.returncode == 0, done.stderr
        asked = {path.rpartition("/")[2] for path in hub.requests}
    assert "tokenizer.json" not in asked
    local = subprocess.run(
        [sys.executable, "-m", "app.cli", "plan", model, "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    of_hub, of_directory = json.loads(done.stdout), json.loads(local.stdout)
    assert of_hub.pop("model") == "owner/name"
    of_directory.pop("model")
    assert of_hub == of_directory
