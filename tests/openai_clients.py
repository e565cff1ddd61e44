"""The official OpenAI client, sync or async, behind one way to call it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai


class BothClients:
    """``ask(lambda client: client.models.list())``: the answer; a stream's events as a list."""

    def __init__(self, base_url: str, is_async: bool) -> None:
        self.is_async = is_async
        self._settings: dict[str, Any] = {"base_url": base_url, "api_key": "x", "max_retries": 0}

    def __call__(self, call: Callable[[Any], Any]) -> Any:
        if self.is_async:
            return asyncio.run(self._ask(call))
        with openai.OpenAI(**self._settings) as client:
            answer = call(client)
            return list(answer) if isinstance(answer, openai.Stream) else answer

    async def _ask(self, call: Callable[[Any], Any]) -> Any:
        async with openai.AsyncOpenAI(**self._settings) as client:
            answer = await call(client)
            if isinstance(answer, openai.AsyncStream):
                return [event async for event in answer]
            return answer
