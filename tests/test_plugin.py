"""The plugin is found, complete or nothing, and leaves SGLang alone when it is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from precache_sglang.launch.process import ServerError, ServerProcess
from reference import ReferenceEngine, Weights
from standins import quiet_imports

from precache_sglang import plugin
from precache_sglang.methods import METHODS

FLAGS = (
    "--precache-method",
    "--precache-schedule",
    "--precache-lr-tokens",
    "--precache-team",
    "--precache-max-neutral-wait",
)
SMALL = ["--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "2048"]
SMALL += ["--max-running-requests", "4", "--max-loras-per-batch", "3", "--log-level", "warning"]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments, as a user would in a terminal."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def serve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "precache_sglang.launch.cli", "serve", *args, **env)


# -- found -------------------------------------------------------------------


def test_both_entry_points_are_installed() -> None:
    for group, value in (
        ("sglang.srt.plugins", "precache_sglang.plugin:install"),
        ("sglang.srt.platforms", "precache_sglang.platform:activate"),
    ):
        (found,) = [entry for entry in entry_points(group=group) if entry.value == value]
        with quiet_imports():
            assert callable(found.load())


@pytest.mark.parametrize("command", ["sglang.launch_server", "precache_sglang.launch.cli"])
def test_the_flags_are_in_the_servers_help(command: str) -> None:
    serve_command = ["serve"] if command.endswith("cli") else []
    result = run("-m", command, *serve_command, "--help")
    assert result.returncode == 0, result.stderr
    for flag in FLAGS:
        assert flag in result.stdout
    for method in METHODS:
        assert f"{method}:" in " ".join(result.stdout.split())


# -- complete or nothing -----------------------------------------------------


def test_another_version_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda _package: "0.6.0")
    with pytest.raises(SystemExit) as error:
        plugin.install()
    for part in ("SGLang 0.6.0", plugin.SGLANG_VERSION, "install sglang=="):
        assert part in str(error.value)


def test_a_plugin_that_cannot_register_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("no such registry")

    monkeypatch.setattr(plugin, "_register_seams", fail)
    with pytest.raises(SystemExit, match=r"could not install itself.*no such registry"):
        plugin.install()


def test_being_filtered_out_ends_serve_with_the_reason(model: Path) -> None:
    result = serve("--model-path", str(model), SGLANG_PLUGINS="somebody-else")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("precache-sglang: these hooks did not take effect")
    assert "SGLANG_PLUGINS" in last


# Stands for an SGLang that has lost a method, and for a plugin that puts one back.
VANISHED = """
from sglang.srt.managers.scheduler import Scheduler
del Scheduler.get_output_streamer_class
"""
RESET = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers.tokenizer_manager import TokenizerManager
hooked = TokenizerManager.update_request_meta_info
TokenizerManager.update_request_meta_info = hooked.__wrapped__
"""
SERVE = """
import sys
from precache_sglang.launch.cli import main
main(["serve", *sys.argv[1:]])
"""
LAUNCH_SERVER = """
import runpy, sys
sys.argv[0] = "launch_server"
runpy.run_module("sglang.launch_server", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("change", "start", "target"),
    [
        (VANISHED, SERVE, "Scheduler.get_output_streamer_class"),
        (RESET, LAUNCH_SERVER, "TokenizerManager.update_request_meta_info"),
    ],
    ids=["target vanished", "hook was reset"],
)
def test_a_missing_hook_ends_the_start_with_its_name(
    change: str, start: str, target: str, model: Path, adapters: dict[str, Path]
) -> None:
    paths = [f"{role}={path}" for role, path in adapters.items()]
    result = run("-c", change + start, "--model-path", str(model), "--lora-paths", *paths)
    assert result.returncode != 0
    assert "these hooks did not take effect" in result.stderr
    assert target in result.stderr.strip().splitlines()[-1]


def test_a_hook_missing_in_the_scheduler_process_alone_ends_the_server(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Another plugin takes away what we hook, but not in the process that was started."""
    (tmp_path / "thief.py").write_text(
        "import multiprocessing\n"
        "def install():\n"
        "    if multiprocessing.parent_process() is not None:\n"
        "        from sglang.srt.managers.schedule_batch import ScheduleBatch\n"
        "        del ScheduleBatch.check_decode_mem\n"
    )
    info = tmp_path / "thief-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thief\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nthief = thief:install\n")
    # SGLang's command spawns its processes: each looks for plugins.
    env = {"PYTHONPATH": str(tmp_path)}
    server = ServerProcess(model, adapters, SMALL, env, own_command=False)
    with pytest.raises(ServerError, match="The server ended with status"), server:
        pass
    assert "ScheduleBatch.check_decode_mem" in server.log()
    assert "these hooks did not take effect" in server.log()


# -- which method ------------------------------------------------------------

RESOLVE = """
import json, sys
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
from precache_sglang.config import Settings
load_plugins()
for argv in json.loads(sys.argv[1]):
    try:
        args = prepare_server_args(argv)
        args.resolve_once()
        view = resolving_view(args)
        print("=>", json.dumps([Settings.of(args).method, view.radix_cache_backend,
                                view.attention_backend]))
    except ValueError as error:
        print("=>", json.dumps([type(error).__name__, str(error)]))
"""


def test_adapters_decide_what_the_method_is_when_none_is_given(
    model: Path, adapters: dict[str, Path]
) -> None:
    base = ["--model-path", str(model), "--skip-tokenizer-init"]
    paths = ["--lora-paths", *(f"{role}={path}" for role, path in adapters.items())]
    later = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"]
    method = ["--precache-method", "prelrshared"]
    cases = [
        base,
        [*base, *paths],
        [*base, *later],
        [*base, *paths, *method],
        [*base, *paths, "--precache-method", "off"],
        [*base, *method],
    ]
    result = run("-c", RESOLVE, json.dumps(cases))
    assert result.returncode == 0, result.stderr
    lines = [line[3:] for line in result.stdout.splitlines() if line.startswith("=> ")]
    without, default, loaded_later, explicit, off, refused = map(json.loads, lines)
    assert without[:2] == ["off", None] and without[2] != "precache"
    assert default == loaded_later == ["rebaseown", "precache", "precache"]
    assert explicit == ["prelrshared", "precache", "precache"]
    assert off == without
    assert refused[0] == "SettingsError"
    assert "--precache-method prelrshared" in refused[1] and "--lora-paths" in refused[1]


@pytest.fixture(scope="module")
def launch_server(model: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    """SGLang's own command, with nothing of ours on it."""
    with ServerProcess(model, adapters, SMALL, own_command=False) as server:
        yield server


def test_sglangs_own_command_shares_by_the_default_method(launch_server: ServerProcess) -> None:
    context = list(range(20, 60))
    assert launch_server.state()["method"] == "rebaseown"
    first = generate(launch_server, context, "plan")
    launch_server.wait_for_backlog()
    second = generate(launch_server, context + first["output_ids"], "action")
    counts = second["meta_info"]["precache"]
    # All but the last sampled token was fed by the first role.
    assert counts == {"shared": len(context) + 3, "own": 0, "replayed": 0, "computed": 1}
    assert launch_server.state()["problems"] == []


# -- off ---------------------------------------------------------------------


def generate(server: ServerProcess, tokens: list[int], role: str | None) -> dict[str, Any]:
    answer: dict[str, Any] = server.post(
        "/generate",
        {
            "input_ids": tokens,
            "lora_path": role,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        },
    )
    return answer


def test_off_leaves_sglang_as_it_was(model: Path, adapters: dict[str, Path]) -> None:
    """Stock attention and prefix cache; adapters are served as nonshared serves them."""
    reference = ReferenceEngine(Weights.load(model), "nonshared", adapters)
    with ServerProcess(model, adapters, [*SMALL, "--precache-method", "off"]) as server:
        info = server.get("/server_info")
        assert info["attention_backend"] == "torch_native"
        assert info["radix_cache_backend"] is None
        assert not server.has_precache()
        with pytest.raises(ServerError, match=r"404 .*precache is off"):
            server.state()
        context = list(range(30, 70))
        for role in ("plan", "action", "plan", None):
            answer = generate(server, context, role)
            assert "precache" not in answer["meta_info"]
            output = answer["output_ids"]
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            expected = reference.turn(role, context, output).logprobs.tolist()
            assert logprobs == pytest.approx(expected, abs=1e-3)
            context += output
        # SGLang's own answer to a bad role, not ours.
        with pytest.raises(ServerError, match=r"400 .*nobody"):
            generate(server, context, "nobody")


# -- commands ----------------------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "bench", "doctor", "model"])
def test_every_command_explains_itself_and_does_nothing_else(command: str, tmp_path: Path) -> None:
    result = run(
        *("-m", "precache_sglang.launch.cli", command, "--help"), XDG_CACHE_HOME=str(tmp_path)
    )
    assert result.returncode == 0
    assert f"usage: precache-sglang {command}" in result.stdout
    assert not list(tmp_path.rglob("*.gguf")) and not list(tmp_path.rglob("*.safetensors"))


# -- doctor ------------------------------------------------------------------


def test_doctor_finds_no_problem_here(model: Path) -> None:
    result = run("-m", "precache_sglang.launch.cli", "doctor", "--json", "--model-path", str(model))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert report["versions"]["sglang"] == plugin.SGLANG_VERSION
    assert len(report["hooks"]) > 20 and all(report["hooks"].values())
    assert set(report["methods"]) == set(METHODS)
    assert report["platform"]["system"] and report["platform"]["sglang platform"]
    # 3 layers, 2 KV heads of 16, float32; 3 adapters of rank 8.
    assert report["model"]["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert report["model"]["lr_bytes_per_token"] == 3 * 8 * 3 * 4


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(
        *("-m", "precache_sglang.launch.cli", "doctor", "--model-path", str(tmp_path)),
        SGLANG_PLUGINS="somebody-else",
    )
    assert result.returncode == 1
    text = " ".join(result.stdout.split())
    assert "hooks did not take effect. Remedy: unset SGLANG_PLUGINS=somebody-else" in text
    assert "architecture GPT2LMHeadModel is not supported. Remedy: use one of Llama" in text


def test_doctor_names_a_model_folder_that_is_not_there(tmp_path: Path) -> None:
    from precache_sglang.launch import doctor

    with quiet_imports():
        report = doctor.Report()
        doctor._examine_model(report, str(tmp_path / "nowhere"))
    (problem,) = report.problems
    assert "nowhere is not a folder" in problem.what and "config.json" in problem.remedy
