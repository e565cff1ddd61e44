"""Answers say where the prompt came from: every endpoint, streams, the offline engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from precache_sglang.launch.bench import bench
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerProcess

CONTEXT = "Question: Why is the sky blue?\n\nThought: \n### Response:\n" * 6


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    args = ["--max-total-tokens", "6000", "--max-loras-per-batch", "4", "--context-length", "4096"]
    args += ["--served-model-name", "smollm2", "--max-running-requests", "8", "--enable-metrics"]
    with ServerProcess(ensure_demo_model(), demo_adapters(), args) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    server.wait_for_backlog()
    server.post("/flush_cache?timeout=30")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_default_method_is_rebaseown(server: ServerProcess) -> None:
    state = server.state()
    assert state["method"] == "rebaseown"
    assert state["schedule"] == "auto"
    assert state["teams"] == {"default": ["plan", "action", "reflect"]}


def test_prometheus_has_what_is_owed_and_the_totals(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    client.completions.create(model="smollm2:plan", prompt=CONTEXT, max_tokens=4)
    server.wait_for_backlog()

    def metric(name: str) -> float:
        lines = [
            line for line in server.get("/metrics").splitlines() if line.startswith(f"{name}{{")
        ]
        assert lines and all('model_name="smollm2"' in line for line in lines), lines
        return sum(float(line.split()[-1]) for line in lines)

    state = server.state()
    assert state["total_neutral"] > 0
    deadline = time.monotonic() + 10  # they are renewed once a second
    while metric("precache_neutral_total") != state["total_neutral"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for name in ("backlog_tokens", "backlog_age_s", "provisional_tokens", "base_tokens"):
        assert metric(f"precache_{name}") == state[name]


def test_completions_report_shared_tokens_after_a_role_switch(client: openai.OpenAI) -> None:
    first = client.completions.create(model="smollm2:plan", prompt=CONTEXT, max_tokens=4)
    second = client.completions.create(model="smollm2:action", prompt=CONTEXT, max_tokens=4)
    for answer in (first, second):
        assert answer.usage is not None
        counts = answer.usage.model_extra["precache"]
        assert sum(counts.values()) == answer.usage.prompt_tokens
    assert first.usage.model_extra["precache"]["computed"] == first.usage.prompt_tokens
    assert second.usage.model_extra["precache"]["shared"] == second.usage.prompt_tokens - 1
    assert second.usage.model_extra["precache"]["replayed"] == 1  # for its logits


def test_n_choices_count_their_prompt_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2:plan", prompt=CONTEXT, max_tokens=4, n=2)
    counts = answer.usage.model_extra["precache"]
    assert sum(counts.values()) == answer.usage.prompt_tokens


def test_chat_streams_end_with_the_counts(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": CONTEXT}]
    chunks = list(
        client.chat.completions.create(
            model="smollm2:reflect",
            messages=messages,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    usage = chunks[-1].usage
    assert usage is not None
    assert sum(usage.model_extra["precache"].values()) == usage.prompt_tokens


def test_native_streams_carry_the_counts(server: ServerProcess) -> None:
    body = {
        "text": CONTEXT,
        "lora_path": "plan",
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
    }
    for event in server.stream("/generate", body):
        meta = event["meta_info"]
        assert sum(meta["precache"].values()) == meta["prompt_tokens"]


def test_tenants_never_share(client: openai.OpenAI, server: ServerProcess) -> None:
    """No value that a caller can send reaches rows under another salt or key."""

    def ask(**namespace: str) -> dict[str, int]:
        answer = server.post(
            "/generate",
            {
                "text": CONTEXT,
                "lora_path": "plan",
                "sampling_params": {"max_new_tokens": 2, "temperature": 0},
                **namespace,
            },
        )
        server.wait_for_backlog()
        counts: dict[str, int] = answer["meta_info"]["precache"]
        return counts

    assert ask(cache_salt="a")["own"] == 0
    assert ask(cache_salt="a")["own"] > 0
    for other in (
        {"cache_salt": "b"},
        {"extra_key": "a"},
        {"extra_key": "t0:"},
        {"extra_key": "t0:a"},
        {"extra_key": ":"},
        {"cache_salt": "t0:a"},
        {},
    ):
        counts = ask(**other)
        assert counts["own"] == counts["shared"] == 0, other


def test_memory_reports_agree(server: ServerProcess) -> None:
    state = server.state()
    (internal,) = server.get("/server_info")["internal_states"]
    reported = internal["memory_usage"]["kvcache"]
    allocated = (state["base_pool_bytes"] + state["lr_pool_bytes"]) / (1 << 30)
    assert reported == pytest.approx(allocated, abs=0.011)  # SGLang rounds to two decimals
    slots, width, layers, itemsize = state["lr_pool_slots"], 8, 30, 2
    assert state["lr_pool_bytes"] == (slots + 1) * width * layers * itemsize


ENGINE = """
from precache_sglang import Engine
if __name__ == "__main__":
    import sys
    model, *adapters = sys.argv[1:]
    engine = Engine(
        model_path=model, enable_lora=True, lora_paths=dict(a.split("=") for a in adapters),
        max_loras_per_batch=4, max_total_tokens=4000, context_length=2048,
        precache_method="prelrshared", skip_tokenizer_init=True,
    )
    ids = list(range(100, 300))
    params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
    for role in ("plan", "action"):
        meta = engine.generate(input_ids=ids, sampling_params=params, lora_path=role)["meta_info"]
        print("COUNTS", role, meta["precache"]["shared"], meta["precache"]["computed"])
    print("METHOD", engine.precache_state()["method"])
    engine.shutdown()
"""


def test_the_offline_engine_shares(tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    script.write_text(ENGINE)
    adapters = [f"{role}={path}" for role, path in demo_adapters().items()]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(ensure_demo_model()), *adapters],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "COUNTS plan 0 200" in result.stdout, result.stderr[-2000:]
    assert "COUNTS action 199 0" in result.stdout
    assert "METHOD prelrshared" in result.stdout


def test_bench_serving_replays_trajectories_against_a_running_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    trace = tmp_path / "two.csv"
    trace.write_text("agent,prefill_len,decode_len\nplan,40,4\naction,10,3\nplan,5,3\n")
    bench(
        [
            *("serving", "--url", server.url, "--trace", str(trace), "--out", str(tmp_path)),
            *("--rates", "6", "--concurrency", "2", "--num-trajectories", "3", "--seeds", "2"),
        ]
    )
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    assert [row["load"] for row in rows] == ["6 req/s x3", "2 clients x3"]
    for row in rows:
        assert (row["requests"], row["errors"]) == (9, 0)
        assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"]
        # Every token that a turn feeds, once; the last sampled one it never feeds.
        assert row["neutral_tokens"] == 3 * (40 + 3 + 11 + 2 + 6 + 2)
        assert row["shared_share"] > 0.3
    assert (tmp_path / "serving.png").exists()


def test_bench_serving_fails_where_requests_do(server: ServerProcess, tmp_path: Path) -> None:
    trace = tmp_path / "long.csv"
    trace.write_text("agent,prefill_len,decode_len\nplan,40,4\nplan,5000,3\n")
    with pytest.raises(SystemExit, match="1 requests failed"):
        bench(
            [
                *("serving", "--url", server.url, "--trace", str(trace), "--out", str(tmp_path)),
                *("--concurrency", "1", "--num-trajectories", "1", "--seeds", "1"),
            ]
        )
    trace.write_text("agent,prefill_len,decode_len\nnobody,40,4\n")
    with pytest.raises(SystemExit, match="nobody"):
        bench(["serving", "--url", server.url, "--trace", str(trace), "--concurrency", "1"])
