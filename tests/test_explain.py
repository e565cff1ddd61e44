"""``precache-sglang explain``: where two prompts part, and how they could share more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from precache_sglang.launch.explain import (
    ExplainError,
    LocalTokenizer,
    Prompt,
    compare,
    explain,
    read_prompt,
    report,
)
from precache_sglang.launch.model import ensure_demo_model

CONTEXT = (
    {"role": "user", "content": "Question: Why is the sky blue?"},
    {"role": "assistant", "content": "Thought: I should look it up. Search[sky]"},
    {"role": "user", "content": "Observation: Short wavelengths scatter more."},
)


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer(str(ensure_demo_model()))


def chat(name: str, *messages: dict[str, Any]) -> Prompt:
    return Prompt(name, messages=messages)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


PLAN = system("You are the planner. Choose a tool.")
ACTION = system("You are the actor. Write the argument of the tool.")


def test_a_roles_system_prompt_in_front_ends_sharing(tokenizer: LocalTokenizer) -> None:
    found = compare(tokenizer, chat("plan", PLAN, *CONTEXT), chat("action", ACTION, *CONTEXT))
    assert found.before.endswith("<|im_start|>system\nYou are the")
    assert found.common < 10
    assert found.first.place == found.second.place == "message 1 (system)"
    assert found.first.text.startswith(" planner. Choose")
    assert found.second.text.startswith(" actor. Write")
    assert found.equal_messages == (2, 3, 4)
    # What it promises is so.
    assert found.reordered_common is not None
    better = compare(tokenizer, chat("plan", *CONTEXT, PLAN), chat("action", *CONTEXT, ACTION))
    assert better.common == found.reordered_common > 40
    assert better.first.place == "message 4 (system)"
    assert better.reordered_common is None
    text = report(found)
    assert f"They part at token {found.common}:" in text
    assert "Messages 2, 3, 4 of the first are in the second too." in text
    assert f"{found.reordered_common} tokens would be shared instead of {found.common}" in text


def test_a_difference_in_front_of_an_equal_text(tokenizer: LocalTokenizer) -> None:
    rest = "Never make up what you could have looked up, and answer in one line."
    found = compare(
        tokenizer,
        chat("a", system(f"Today is Monday. {rest}"), *CONTEXT),
        chat("b", system(f"Today is Friday. {rest}"), *CONTEXT),
    )
    assert found.equal_tail >= len(rest)
    assert f"the same again in their last {found.equal_tail} characters" in report(found)


def test_a_context_that_grew_is_shared_as_far_as_it_goes(tokenizer: LocalTokenizer) -> None:
    found = compare(tokenizer, Prompt("a", text="one two"), Prompt("b", text="one two three"))
    assert found.common == found.first.num_tokens < found.second.num_tokens
    assert found.first.place == "its end"
    assert "b goes on where a ends" in report(found)
    found = compare(tokenizer, Prompt("a", text="one"), Prompt("b", text="one"))
    assert "the same: roles share all of it" in report(found)
    found = compare(tokenizer, Prompt("a", text="uno dos"), Prompt("b", text="one two"))
    assert (found.common, found.before) == (0, "")
    assert "They part at token 0" in report(found)


def test_tools_and_the_end_of_the_template_have_a_place(tokenizer: LocalTokenizer) -> None:
    one = chat("a", PLAN, *CONTEXT)
    found = compare(tokenizer, one, chat("b", PLAN, *CONTEXT, CONTEXT[0]))
    assert found.common < found.first.num_tokens  # the generation prompt
    assert found.first.place == "what the chat template puts at the end"
    assert found.second.place == "what the chat template puts before message 5 (user)"


def test_a_chat_template_that_refuses_a_body_is_named(tokenizer: LocalTokenizer) -> None:
    parts = [{"type": "text", "text": "Question: "}, {"type": "text", "text": "Why?"}]
    prompt = Prompt("a", messages=({"role": "user", "content": parts},))
    with pytest.raises(ExplainError, match="a: the model's chat template refuses it"):
        compare(tokenizer, prompt, prompt)  # SmolLM2's template joins strings only


def test_files_of_every_kind(tmp_path: Path) -> None:
    def write(name: str, content: Any) -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    body = {"model": "x:plan", "messages": [PLAN], "tools": [], "max_tokens": 5}
    assert read_prompt(write("chat.json", body)).messages == (PLAN,)
    assert read_prompt(write("list.json", [PLAN])).messages == (PLAN,)
    assert read_prompt(write("completion.json", {"prompt": "one"})).text == "one"
    assert read_prompt(write("generate.json", {"text": "one"})).text == "one"
    assert read_prompt(write("ids.json", {"input_ids": [1, 2]})).token_ids == (1, 2)
    assert read_prompt(write("prompt.txt", "one")).text == "one"
    for name, content in (
        ("a.json", "{"),
        ("b.json", {"messages": []}),
        ("c.json", {"messages": ["one"]}),
        ("d.json", {"prompt": ["one", "two"]}),
        ("e.json", 5),
    ):
        with pytest.raises(ExplainError, match=name):
            read_prompt(write(name, content))
    with pytest.raises(ExplainError, match=r"nowhere\.txt"):
        read_prompt(str(tmp_path / "nowhere.txt"))


def test_the_command_prints_both_ways_and_fails_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, first in (("plan.json", PLAN), ("action.json", ACTION)):
        files.append(str(tmp_path / name))
        (tmp_path / name).write_text(json.dumps({"messages": [first, *CONTEXT]}))
    model = ["--model-path", str(ensure_demo_model())]
    explain([*files, *model])
    assert "They part at token" in capsys.readouterr().out
    explain([*files, *model, "--json"])
    assert json.loads(capsys.readouterr().out)["equal_messages"] == [2, 3, 4]

    def failing(args: Sequence[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            explain(list(args))
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "--model-path" in failing(files)
    assert "nowhere" in failing([*files, "--model-path", str(tmp_path / "nowhere")])
    assert "http://127.0.0.1:9" in failing([*files, "--url", "http://127.0.0.1:9"])
