"""``precache-sglang bench``: what is compared, and a whole small comparison on real servers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from precache_sglang.launch.bench import bench
from precache_sglang.launch.variants import Variant, rotated


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("prelrshared", ["--precache-method", "prelrshared"]),
        ("off", ["--precache-method", "off"]),
        (
            "rebaseshared:db",
            ["--precache-method", "rebaseshared", "--precache-schedule", "db"],
        ),
        (
            "rebaseshared:auto:0",
            [
                *("--precache-method", "rebaseshared", "--precache-schedule", "auto"),
                *("--precache-max-neutral-wait", "0"),
            ],
        ),
    ],
)
def test_a_variant_is_its_text_and_its_flags(text: str, flags: list[str]) -> None:
    variant = Variant.parse(text)
    assert str(variant) == text
    assert variant.flags() == flags


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is unknown"),
        ("rebase", "'rebase' is unknown; choose one of nonshared"),
        ("rebaseshared:", "--precache-schedule '' is unknown"),
        ("rebaseshared:now", "--precache-schedule 'now' is unknown"),
        ("rebaseshared:lp:soon", "soon"),
        ("rebaseshared:lp:-2", "--precache-max-neutral-wait -2"),
        ("rebaseshared:lp:5:6", "expected METHOD"),
    ],
)
def test_a_bad_variant_is_refused_before_a_server_starts(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        Variant.parse(text)
    assert message in str(refusal.value)
    assert repr(text) in str(refusal.value)


def test_every_variant_comes_first_once() -> None:
    turns = [rotated("abc", by) for by in range(4)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_single_stream_over_two_traces_and_more_variants_than_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    short.write_text("agent,prefill_len,decode_len\nplan,60,3\naction,10,3\n")
    long.write_text("agent,prefill_len,decode_len\nplan,200,3\naction,10,3\nplan,5,3\n")
    bench(
        [
            *("single-stream", "--traces", str(short), str(long), "--out", str(tmp_path)),
            *("--variants", "rebaseshared:db", "nonshared", "prelrshared"),
            *("--repeats", "2", "--servers-at-once", "2"),
        ]
    )
    saved = json.loads((tmp_path / "single_stream.json").read_text())["traces"]
    assert list(saved) == ["short", "long"]
    for by_variant in saved.values():
        assert set(by_variant) == {"rebaseshared:db", "nonshared", "prelrshared"}
        assert all(result["runs"] == 2 for result in by_variant.values())
        assert by_variant["nonshared"]["shared_share"] == 0
        for sharing in ("rebaseshared:db", "prelrshared"):
            # All of the context before the role switch but the token it ended with.
            turns = by_variant[sharing]["turns"]
            assert turns[1]["shared"] == turns[0]["prompt_tokens"] + 2
    for plot in ("ttft_short.png", "ttft_long.png", "ttft_by_trace.png"):
        assert (tmp_path / plot).exists()
    assert "(nonshared / this), by trace" in capsys.readouterr().out
