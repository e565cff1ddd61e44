"""``loadtest/``: figures, thresholds, report, scripts and pools; and two small runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import shapes
from client import Client, lost
from precache_sglang.launch.keys import ADMIN_API_KEY, API_KEY
from precache_sglang.launch.trajectories import TrajectoryError, load_trajectories
from report import (
    FIGURES,
    Failure,
    Run,
    Sample,
    Threshold,
    ThresholdError,
    Turn,
    figures,
    page,
    table,
    table_by_role,
    wrong,
)
from traces import Scripts, Step

RUN = Path(__file__).parent.parent / "loadtest" / "run.py"


def turn(role: str, ttft_s: float, shared: int, computed: int, **changes: Any) -> Turn:
    values: dict[str, Any] = {
        "at": 1.0,
        "turn_s": ttft_s + 0.3,
        "gaps_s": [0.1, 0.2],
        "prompt_tokens": shared + computed,
        "output_tokens": 3,
        "own": 0,
        "replayed": 0,
    }
    return Turn(role, ttft_s=ttft_s, shared=shared, computed=computed, **values | changes)


@pytest.fixture
def run() -> Run:
    """A minute: two turns of plan, one of action."""
    return Run(
        duration_s=60.0,
        turns=[turn("plan", 2.0, 0, 300), turn("plan", 1.0, 50, 50), turn("action", 0.5, 90, 10)],
        samples=[Sample(1.0, 0.2, backlog_tokens=7), Sample(3.0, 0.4, backlog_age_s=1.5)],
        pools={"drain_s": 2.0, "problems": [], "after_drain": None},
    )


# -- figures and thresholds --------------------------------------------------


def test_shares_weigh_turns_by_their_tokens(run: Run) -> None:
    found = figures(run)
    assert found["shared_share"] == pytest.approx(140 / 500)
    assert found["computed_share"] == pytest.approx(360 / 500)
    assert figures(run, "plan")["shared_share"] == pytest.approx(50 / 400)
    assert figures(run, "action")["shared_share"] == pytest.approx(0.9)


def test_a_run_has_every_figure_that_a_threshold_can_name(run: Run) -> None:
    found = figures(run)
    assert set(FIGURES) <= set(found)
    assert found["turns"] == found["turns_per_minute"] == 3
    assert (found["ttft_p50_s"], found["ttft_p95_s"]) == (1.0, 2.0)
    assert (found["itl_p50_ms"], found["itl_p95_ms"]) == (100, 200)
    assert found["tokens_per_s"] == pytest.approx(9 / 60)
    assert (found["health_max_s"], found["backlog_max_tokens"]) == (0.4, 7)
    assert (found["backlog_age_max_s"], found["drain_s"]) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ttft_p95_s<=2", True),
        ("ttft_p95_s <= 1.9", False),
        ("shared_share>=0.28", True),
        ("shared_share>=0.29", False),
        ("errors<=0", True),
    ],
)
def test_a_threshold_is_kept_or_broken(text: str, kept: bool, run: Run) -> None:
    threshold = Threshold.parse(text)
    assert threshold.kept(figures(run)) == kept
    assert bool(wrong(run, [threshold])) == (not kept)


@pytest.mark.parametrize("text", ["ttft_p95_s<=8", "shared_share>=0"])
def test_a_run_that_measured_nothing_keeps_no_threshold(text: str) -> None:
    assert math.isnan(figures(Run())["ttft_p95_s"])
    assert wrong(Run(), [Threshold.parse(text)])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ttft_p95_s", "NAME<=NUMBER"),
        ("ttft_p95_s<8", "NAME<=NUMBER"),
        ("ttft_p95_s<=soon", "NAME<=NUMBER"),
        ("ttft_p96_s<=8", "ttft_p95_s"),
    ],
)
def test_a_threshold_that_cannot_be_read_is_refused(text: str, named: str) -> None:
    with pytest.raises(ThresholdError) as refusal:
        Threshold.parse(text)
    assert repr(text) in str(refusal.value) and named in str(refusal.value)


@pytest.mark.parametrize("mix", list(shapes.SHAPES))
def test_a_mix_has_thresholds_and_errors_break_them(mix: str, run: Run) -> None:
    chosen = shapes.thresholds(argparse.Namespace(thresholds=None, mix=mix))
    run.failures.append(Failure("turn: plan", {}, 500, "oops"))
    assert "errors is 1, must be <= 0" in wrong(run, chosen)


def test_lost_slots_fail_a_run_without_thresholds(run: Run) -> None:
    run.pools["problems"] = ["KV slots lost: 3"]
    assert wrong(run, []) == ["pools: KV slots lost: 3"]


# -- report ------------------------------------------------------------------


def test_a_run_is_read_as_it_was_written(run: Run, tmp_path: Path) -> None:
    run.failures.append(Failure("turn: plan", {"model": "m"}, None, "ConnectionError"))
    run.counts["cancelled"] = 4
    run.write(tmp_path / "load.json")
    assert Run.read(tmp_path / "load.json") == run


def test_tables_have_a_line_for_each_run_and_role(run: Run) -> None:
    lines = table({"off": Run(), "prelrshared": run}).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["off", "prelrshared"]
    assert "28%" in lines[3] and "-" in lines[2]
    roles = table_by_role(run).splitlines()[2:]
    assert [line.split()[0] for line in roles] == ["action", "plan"]
    assert "90%" in roles[0] and "12%" in roles[1]


def test_the_page_shows_shares_by_role_and_what_went_wrong(run: Run) -> None:
    run.failures.append(Failure("turn: plan", {"model": "m"}, 500, "<script>oops</script>"))
    text = page(
        {"off": Run(), "prelrshared": run},
        [Threshold.parse("errors<=0"), Threshold.parse("turns>=1")],
        "10 users & 5 min",
    )
    assert "<td>action</td><td>90.0%</td>" in text
    assert "<td>plan</td><td>12.5%</td>" in text
    assert "errors is 1, must be &lt;= 0" in text
    assert "10 users &amp; 5 min" in text
    assert "<script>" not in text and "&lt;script&gt;oops" in text
    assert text.count("<svg") == 1  # a run without turns has no chart


# -- what users send ---------------------------------------------------------


def test_a_trajectory_is_a_script_of_its_texts() -> None:
    (first, *_) = load_trajectories()
    drawn = Scripts.load(None, [], 256)
    assert drawn.roles == ["action", "plan", "reflect"]
    rng = random.Random(1)
    scripts = [drawn.draw(rng) for _ in range(50)]
    assert len({script[0].new for script in scripts}) == len(load_trajectories())
    script = next(s for s in scripts if s[0].new == first.turns[0].input_text_appended)
    assert [step.role for step in script] == [t.role for t in first.turns]
    assert [step.max_tokens for step in script] == [t.n_output_tokens for t in first.turns]
    # Tools are called with arguments; and the end is read by somebody.
    for step, recorded in zip(script[:-1], first.turns, strict=False):
        assert step.pauses == (recorded.role == "action")
    assert script[-1].pauses


def test_a_trajectory_file_takes_the_place_of_the_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    step = {
        "role": "plan",
        "kind": "thought",
        "input_text_appended": "Question: Why?",
        "gold_output": "Because.",
        "n_input_tokens": 3,
        "n_output_tokens": 2,
    }
    texts = dict.fromkeys(("source", "question", "options", "answer", "answer_text"), "x")
    record = {"id": "a", **texts, "n_turns": 1, "n_tokens": 5, "turns": [step]}
    path.write_text(json.dumps(record))
    script = Scripts.load(path, [], 256).draw(random.Random(1))
    assert script == [Step("plan", "Question: Why?", 2, pauses=True)]
    path.write_text(json.dumps(record | {"n_tokens": 6}))
    with pytest.raises(TrajectoryError, match="n_tokens"):
        Scripts.load(path, [], 256)


def test_a_trace_is_a_script_of_new_tokens_each_time(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("agent,prefill_len,decode_len\nplan,60,8\naction,10,6\nplan,5,3\n")
    drawn = Scripts.load(None, [str(path)], 256)
    assert drawn.roles == ["action", "plan"]
    rng = random.Random(1)
    first, second = drawn.draw(rng), drawn.draw(rng)
    for script in (first, second):
        assert [len(step.new) for step in script] == [60, 10, 5]
        assert [step.max_tokens for step in script] == [8, 6, 3]
        assert [step.pauses for step in script] == [False, True, True]
        assert all(20 <= token < 256 for step in script for token in step.new)
    assert first[0].new != second[0].new
    with pytest.raises(ValueError, match="--vocab-size 20"):
        Scripts.load(None, [str(path)], 20)


def test_the_flags_of_a_load_reach_locust(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    shapes.add_arguments(parser)
    given = ["--traces", "1.9k", "3.0k", "--think", "0.5", "--thresholds", "errors<=0", "turns>=9"]
    args = parser.parse_args([*given, "--visitor", str(tmp_path)])
    assert parser.parse_args(shapes.forwarded(args)) == args


# -- pools -------------------------------------------------------------------

AT_REST = {
    "problems": [],
    "base_tokens": 50,
    "base_tokens_in_use": 50,
    "lr_slots_in_use": 90,
    "lr_slots_evictable": 90,
    "lr_slots_pinned": 0,
    "request_rows_in_use": 0,
}


@pytest.mark.parametrize(("keep_alive", "connections"), [(60.0, 1), (0.0, 3)])
def test_no_request_goes_over_a_connection_that_the_server_may_be_closing(
    keep_alive: float, connections: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.add(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr("client.KEEP_ALIVE", keep_alive)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        user = Client(f"http://127.0.0.1:{server.server_port}", run, print, 0.0)
        for _ in range(3):
            assert user.get("/").status_code == 200
        user.close()
        server.shutdown()
    assert len(seen) == connections


def test_what_the_cache_holds_is_lost_only_after_a_flush() -> None:
    assert lost(AT_REST) == []
    assert lost(AT_REST, flushed=True) == ["KV slots in use: 50", "low-rank slots in use: 90"]


@pytest.mark.parametrize(
    "change",
    [
        {"problems": ["node 3"]},
        {"base_tokens_in_use": 51},
        {"lr_slots_in_use": 91},
        {"lr_slots_pinned": 1},
        {"request_rows_in_use": 1},
    ],
    ids=str,
)
def test_every_lost_slot_is_found(change: dict[str, Any]) -> None:
    (problem,) = lost(AT_REST | change)
    assert str(*change.values()) in problem or problem.endswith(": 1")


# -- runs --------------------------------------------------------------------


KEYS = {"--api-key": "of-users", "--admin-api-key": "of-operators"}


def load_test(
    model: Path, adapters: dict[str, Path], out: Path, *args: str
) -> subprocess.CompletedProcess[str]:
    """`run.py` with two users of the tiny model, on a server that asks for keys."""
    trace = out / "trace.csv"
    trace.write_text("agent,prefill_len,decode_len\nplan,60,8\nplan,8,4\naction,10,6\nplan,40,8\n")
    return subprocess.run(
        [
            *(sys.executable, str(RUN), "--users", "2", "--out", str(out), "--traces", str(trace)),
            *("--model", str(model), "--adapters", *(f"{r}={p}" for r, p in adapters.items())),
            *("--think", "0.5", "--cancel-share", "0.3", "--bad-name-share", "0.3", *args),
            *("--", "--skip-tokenizer-init", "--max-total-tokens", "4000"),
            *(text for flag in KEYS.items() for text in flag),
        ],
        env={
            **os.environ,
            API_KEY: KEYS["--api-key"],
            ADMIN_API_KEY: KEYS["--admin-api-key"],
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_a_run_starts_a_server_loads_it_checks_it_and_stops_it(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    kept = ["errors<=0", "turns>=5", "cancelled>=1", "refused>=1", "loads>=1", "shared_share>=0.05"]
    result = load_test(
        model, adapters, tmp_path, "--minutes", "0.33", "--thresholds", *kept, "drain_s<=60"
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    found = Run.read(tmp_path / "load.json")
    assert found.roles == ["action", "plan"]
    for each in found.turns:
        assert each.shared + each.own + each.replayed + each.computed == each.prompt_tokens
        assert 0 < each.ttft_s <= each.turn_s
        assert 0 < len(each.gaps_s) < each.output_tokens
    assert found.samples and found.pools["problems"] == []
    assert found.pools["after_drain"]["base_tokens"] > 0
    assert found.pools["after_flush"]["base_tokens_in_use"] == 0
    assert found.pools["after_flush"]["teams"] == {"agents": ["plan", "action"]}
    text = (tmp_path / "report.html").read_text()
    assert f"<td>action</td><td>{figures(found, 'action')['shared_share']:.1%}</td>" in text
    # Locust's own tables have them, too.
    for metric in ("TTFT", "ITL", "shared %", "cancel", "bad name", "/unload_lora_adapter"):
        assert metric in result.stderr


def test_a_comparison_fails_where_a_threshold_is_broken(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Stock SGLang shares nothing between roles."""
    result = load_test(
        model,
        adapters,
        tmp_path,
        *("--compare", "off", "--minutes", "0.1", "--thresholds", "turns>=1", "shared_share>=0.05"),
    )
    assert result.returncode == 1, result.stdout[-4000:] + result.stderr[-2000:]
    assert "WRONG: shared_share is 0, must be >= 0.05" in result.stdout
    assert result.stdout.count("WRONG") == 1
    assert "Stock SGLang does not report its pools" in result.stdout
    assert figures(Run.read(tmp_path / "off" / "load.json"))["computed_share"] > 0
    assert "<h3>off</h3>" in (tmp_path / "report.html").read_text()
