"""``precache-sglang explain``: where two prompts part, and how they could share more.

Agents share their context as far as its tokens are the same from the first one on. Two chat
bodies that look alike to a reader may part at once, if each role has a system prompt of its own.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from precache_sglang.launch.keys import API_KEY, key_headers

_AROUND = 12  # tokens shown on each side
_WORTH = 16  # tokens more that a change must let prompts share to be proposed
_LEAST_TAIL = 40  # characters that end alike, to be worth a word


class ExplainError(ValueError):
    """A prompt cannot be read or turned into tokens; the message names it and the remedy."""


@dataclass(frozen=True)
class Prompt:
    """One of the two prompts: messages of a chat, a text, or token ids.

    Attributes:
        options: Other fields of a chat body that its template reads.
    """

    name: str
    messages: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def reordered(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        return Prompt(self.name, messages=tuple(messages), options=self.options)


def read_prompt(path: str) -> Prompt:
    """A request body (JSON) or, by any other name than ``*.json``, a text.

    Raises:
        ExplainError: if the file cannot be read or holds no prompt.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExplainError(f"{path}: {error}.") from error
    if not path.endswith(".json"):
        return Prompt(path, text=content)
    try:
        body = json.loads(content)
    except json.JSONDecodeError as error:
        raise ExplainError(f"{path} is no JSON ({error}); name a text otherwise.") from error
    if isinstance(body, list):
        body = {"messages": body}
    if isinstance(body, dict):
        messages = body.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            options = {key: body[key] for key in ("tools", "chat_template_kwargs") if key in body}
            return Prompt(path, messages=tuple(messages), options=options)
        for key in ("prompt", "text"):
            if isinstance(body.get(key), str):
                return Prompt(path, text=body[key])
        ids = body.get("input_ids")
        if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
            return Prompt(path, token_ids=tuple(ids))
    raise ExplainError(
        f"{path} holds no prompt; give a body with messages (each with a role), prompt or text "
        "(one string), or input_ids (one list)."
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def content_of(message: dict[str, Any]) -> str:
    """The text of a message, which may come in parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts = [part.get("text", "") for part in content if isinstance(part, dict)]
    return "".join(parts)


# -- tokens --------------------------------------------------------------------


class Tokenizer(Protocol):
    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens that a server feeds; `ExplainError` if there are none."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens included."""


class LocalTokenizer:
    """The tokenizer and chat template of a model's folder."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ExplainError(f"--model-path {model_path}: {error}") from error

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids:
            return list(prompt.token_ids)
        if prompt.text is not None:
            return list(self._tokenizer.encode(prompt.text))
        try:
            text = self._tokenizer.apply_chat_template(
                list(prompt.messages),
                tools=prompt.options.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
                **prompt.options.get("chat_template_kwargs", {}),
            )
        # Whatever a template raises; its language is not ours.
        except Exception as error:
            raise ExplainError(
                f"{prompt.name}: the model's chat template refuses it: {error}"
            ) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


class ServerTokenizer:
    """A running server's, through its ``/tokenize`` and ``/detokenize``."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids:
            return list(prompt.token_ids)
        if prompt.text is not None:
            body: dict[str, Any] = {"prompt": prompt.text}
        else:
            body = {"messages": list(prompt.messages), **prompt.options}
        try:
            return list(self._post("/tokenize", body)["tokens"])
        except ExplainError as error:
            raise ExplainError(f"{prompt.name}: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        body = {"tokens": list(tokens), "skip_special_tokens": False}
        return str(self._post("/detokenize", body)["text"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", **key_headers(path, self._api_key)}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:400]
            raise ExplainError(f"{self._url}{path} answered {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise ExplainError(f"{self._url}{path}: {error}") from error


# -- comparing -----------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One prompt where the two part.

    Attributes:
        num_tokens: Of the whole prompt.
        place: The part of the prompt that holds the first token which is not shared.
        text: The next tokens, as text; empty if the prompt ends there.
    """

    name: str
    num_tokens: int
    place: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """Where two prompts part.

    Attributes:
        common: Tokens that they share, from the first one on.
        before: The last of these, as text.
        equal_messages: Messages of the first (from 1) that the second has too, behind the end.
        reordered_common: Tokens they would share with these in front; None if it is not
            worth it or the chat template refuses that order.
        equal_tail: Characters that are the same again at the end of the text that parts.
    """

    first: Side
    second: Side
    common: int
    before: str
    equal_messages: tuple[int, ...]
    reordered_common: int | None
    equal_tail: int


def compare(tokenizer: Tokenizer, first: Prompt, second: Prompt) -> Comparison:
    """Compare two prompts. Raises `ExplainError` where one has no tokens."""
    prompts = (first, second)
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    common = _common_len(*tokens)
    before = tokenizer.decode(tokens[0][max(0, common - _AROUND) : common])
    offset = len(tokenizer.decode(tokens[0][:common])) if common else 0
    sides, parting = [], []
    for prompt, ids in zip(prompts, tokens, strict=True):
        place, index = _place(prompt, tokenizer.decode(ids), offset, common == len(ids))
        parting.append(_text_at(prompt, index))
        sides.append(
            Side(prompt.name, len(ids), place, tokenizer.decode(ids[common : common + _AROUND]))
        )
    equal = _equal_messages(first, second)
    gained = None
    if equal and common < min(map(len, tokens)):
        gained = _reordered_common(tokenizer, first, second, equal)
        gained = gained if gained is not None and gained >= common + _WORTH else None
    tail = _common_len(parting[0][::-1], parting[1][::-1])
    return Comparison(
        first=sides[0],
        second=sides[1],
        common=common,
        before=before,
        equal_messages=tuple(index + 1 for index in equal),
        reordered_common=gained,
        equal_tail=tail if tail >= _LEAST_TAIL and parting[0] != parting[1] else 0,
    )


def _common_len(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _place(prompt: Prompt, rendered: str, offset: int, at_end: bool) -> tuple[str, int | None]:
    """Which part of `prompt` stands at `offset` of its rendered text, and which message."""
    if at_end:
        return "its end", None
    if not prompt.messages:
        return f"character {offset}", None
    cursor = 0
    for index, message in enumerate(prompt.messages):
        content = content_of(message).strip()
        start = rendered.find(content, cursor) if content else -1
        if start < 0:
            continue  # a template may leave a message out, or write it its own way
        name = f"message {index + 1} ({message['role']})"
        if offset < start:
            return f"what the chat template puts before {name}", index
        cursor = start + len(content)
        if offset < cursor:
            return name, index
    return "what the chat template puts at the end", None


def _text_at(prompt: Prompt, index: int | None) -> str:
    if prompt.text is not None:
        return prompt.text
    return "" if index is None else content_of(prompt.messages[index])


def _equal_messages(first: Prompt, second: Prompt) -> list[int]:
    """Messages of `first` that `second` has too."""
    left = list(second.messages)
    equal = []
    for index, message in enumerate(first.messages):
        if message in left:
            left.remove(message)
            equal.append(index)
    return equal


def _reordered_common(
    tokenizer: Tokenizer, first: Prompt, second: Prompt, equal: list[int]
) -> int | None:
    """Tokens that the prompts share with their equal messages in front."""
    common = [first.messages[index] for index in equal]
    rests: list[list[dict[str, Any]]] = []
    for prompt in (first, second):
        rest, left = [], list(common)
        for message in prompt.messages:
            if message in left:
                left.remove(message)
            else:
                rest.append(message)
        rests.append(rest)
    try:
        tokens = [
            tokenizer.encode(prompt.reordered([*common, *rest]))
            for prompt, rest in zip((first, second), rests, strict=True)
        ]
    except ExplainError:
        return None  # not in this order, says the template
    return _common_len(*tokens)


# -- the command ---------------------------------------------------------------


def report(found: Comparison) -> str:
    """The comparison for people."""
    first, second = found.first, found.second
    shorter = min(first.num_tokens, second.num_tokens)
    lines = [
        f"first:  {first.name}, {first.num_tokens} tokens",
        f"second: {second.name}, {second.num_tokens} tokens",
        f"shared: {found.common} tokens, {found.common / max(1, shorter):.0%} of the shorter one",
    ]
    if found.common == first.num_tokens == second.num_tokens:
        return "\n".join([*lines, "", "They are the same: roles share all of it."])
    if found.common == shorter:
        longer, shorter_side = (first, second) if second.num_tokens == shorter else (second, first)
        lines += [
            "",
            f"{longer.name} goes on where {shorter_side.name} ends: all of that is shared.",
        ]
        return "\n".join(lines)
    lines += [
        "",
        f"They part at token {found.common}:",
        f"  both    …{found.before!r}",
        f"  first   {first.text!r}, in {first.place}",
        f"  second  {second.text!r}, in {second.place}",
        "",
        f"Nothing behind token {found.common} is shared, however equal it is.",
    ]
    if found.reordered_common is not None:
        numbers = ", ".join(map(str, found.equal_messages))
        if len(found.equal_messages) == 1:
            in_both = f"Message {numbers} of the first is in the second too. With it in front,"
        else:
            in_both = (
                f"Messages {numbers} of the first are in the second too. With these in front, "
                "in the same order,"
            )
        lines += [
            "",
            in_both,
            f"and what belongs to one role behind, {found.reordered_common} tokens would be "
            f"shared instead of {found.common}.",
        ]
    if found.equal_tail:
        lines += [
            "",
            f"The texts that part are the same again in their last {found.equal_tail} characters:",
            "put these first, and what differs behind them.",
        ]
    lines += [
        "",
        "To share, let prompts begin alike: the common system prompt and tools, then the context",
        "that grows, and a role's own instructions last. A role's system prompt in front, a name,",
        "a date or an id there ends sharing at its first token.",
    ]
    return "\n".join(lines)


def explain(argv: list[str]) -> None:
    """The command; ends with status 2 and the reason if a prompt cannot be used."""
    parser = argparse.ArgumentParser(
        prog="precache-sglang explain",
        description="Show where two prompts part, and how they could share more.",
    )
    body = "a request body (*.json: messages, prompt, text or input_ids), or a text"
    parser.add_argument("first", help=body)
    parser.add_argument("second", help="the other one")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-path", help="folder of a model: its tokenizer and chat template")
    source.add_argument("--url", help="a running server, asked for its tokens")
    parser.add_argument("--api-key", help=f"of that server; default: ${API_KEY}")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    try:
        first, second = read_prompt(args.first), read_prompt(args.second)
        tokenizer: Tokenizer = (
            ServerTokenizer(args.url, args.api_key) if args.url else LocalTokenizer(args.model_path)
        )
        found = compare(tokenizer, first, second)
    except ExplainError as error:
        parser.error(str(error))
    print(json.dumps(asdict(found), indent=2) if args.json else report(found))
