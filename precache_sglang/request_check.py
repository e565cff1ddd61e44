"""What the front end refuses of a request, so that it cannot end the scheduler's process.

SGLang validates the type of each field, not whether its values can be served. What gets past it
fails where the scheduler takes the request in, and ends the server for everybody.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

# Of one prompt, as at OpenAI. Each is a request of its own, made before any limit on the queue.
MAX_SAMPLES = 128
_MAX_INT32 = 2**31 - 1

# What SGLang looks up by the number of the prompt, without a check of its own.
_VALUE_PER_PROMPT = (
    "bootstrap_host",
    "bootstrap_pair_key",
    "bootstrap_port",
    "bootstrap_room",
    "custom_logit_processor",
    "decode_tp_size",
    "logprob_start_len",
    "return_logprob",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "sampling_params",
    "top_logprobs_num",
)
_LIST_PER_PROMPT = (
    "audio_data",
    "modalities",
    "multi_item_delimiter_indices",
    "token_ids_logprob",
    "token_indices_to_pool",
    "video_data",
)


def check_before_counting(request: GenerateReqInput) -> None:
    """Check what SGLang reads to find out how many prompts there are.

    Raises:
        ValueError: with the field, its value and the remedy.
    """
    hidden = request.return_hidden_states
    modes = hidden if isinstance(hidden, list) else [hidden]
    for name, given in (
        ("session_params", request.session_params is not None),
        ("session_id", request.session_id is not None),
        ("input_embeds", request.input_embeds is not None),
        ("positional_embed_overrides", request.positional_embed_overrides is not None),
        ("return_hidden_states", not modes or any(modes)),
    ):
        if given:
            raise ValueError(
                f"{name} is not supported by precache-sglang; leave it out of the request."
            )
    if request.text is not None and request.input_ids is not None:
        raise ValueError("text and input_ids are both given; give one.")
    if request.text == []:
        raise ValueError("text lists no prompts; give at least one.")
    if request.lora_id is not None:
        raise ValueError("lora_id is SGLang's own; name the role in lora_path instead.")
    _check_logprobs(request.logprob_start_len)
    _check_labels(request.custom_labels)
    sampling = request.sampling_params
    if sampling is None:
        return
    each = sampling if isinstance(sampling, list) else [sampling]
    if not each or not all(isinstance(params, dict) for params in each):
        raise ValueError(
            f"sampling_params {sampling!r:.100} is neither an object nor a list with one for each "
            "prompt; send one, or leave it out."
        )
    for params in each:
        samples = params.get("n", 1)
        if not isinstance(samples, int) or not 1 <= samples <= MAX_SAMPLES:
            raise ValueError(f"n {samples!r:.100} is not a whole number from 1 to {MAX_SAMPLES}.")
        top_k = params.get("top_k")
        if isinstance(top_k, int) and top_k > _MAX_INT32:
            raise ValueError(f"top_k {top_k} is too large; give -1 for the whole vocabulary.")
        _check_stop_regex(params.get("stop_regex"))


def check_per_prompt(request: GenerateReqInput) -> None:
    """Check the fields with one value for each prompt, once SGLang has counted these.

    Raises:
        ValueError: like `check_before_counting`.
    """
    _check_ids(request.rid, request.is_single)
    _check_roles(request)
    if request.is_single:
        for name in _VALUE_PER_PROMPT:
            if isinstance(getattr(request, name), list):
                raise ValueError(f"{name} is a list, but there is one prompt; give one value.")
        return
    samples = request.parallel_sample_num
    for name in (*_VALUE_PER_PROMPT, *_LIST_PER_PROMPT):
        values = getattr(request, name)
        if name == "modalities" and not values:
            continue  # the chat route sends an empty list for a prompt without any
        if values is not None and len(values) != request.batch_size * samples:
            raise ValueError(
                f"{name} lists {len(values) // samples} values for {request.batch_size} prompts; "
                "give one for each prompt."
            )


def _check_logprobs(start: Any) -> None:
    for position in start if isinstance(start, list) else [start]:
        if isinstance(position, int) and position < -1:
            raise ValueError(
                f"logprob_start_len {position} is no position; give 0 or more, or -1 for none of "
                "the prompt's."
            )


def _check_labels(given: dict[str, str] | None) -> None:
    """Prometheus fails on a label it was not told of, and with it the whole front end."""
    from sglang.srt.runtime_context import get_server_args

    allowed = get_server_args().tokenizer_metrics_allowed_custom_labels or []
    unknown = [name for name in given or {} if name not in allowed]
    if unknown:
        raise ValueError(
            f"custom_labels {unknown[0]!r:.100} is not one of the server's "
            "--tokenizer-metrics-allowed-custom-labels; leave it out."
        )


def _check_stop_regex(given: Any) -> None:
    for pattern in given if isinstance(given, list) else [given]:
        if not isinstance(pattern, str):
            continue  # for SGLang to refuse
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"stop_regex {pattern!r:.100} is no pattern: {error}.") from None


def _check_ids(rid: Any, is_single: bool) -> None:
    if is_single and not isinstance(rid, str):
        raise ValueError(f"rid {rid!r:.100} is a list, but there is one prompt; give one id.")
    if "" in ([rid] if is_single else rid):
        raise ValueError("rid is empty; give an id, or leave it out.")


def _check_roles(request: GenerateReqInput) -> None:
    if request.lora_path is None:
        return
    paths = request.lora_path if isinstance(request.lora_path, list) else [request.lora_path]
    if "" in paths:
        raise ValueError(
            "lora_path is empty; name a role, or leave it out for the model without an adapter."
        )
    if not isinstance(request.lora_path, list):
        return
    if request.is_single:
        raise ValueError("lora_path is a list, but there is one prompt; give one role.")
    samples = request.parallel_sample_num
    if len(paths) != request.batch_size * samples:
        raise ValueError(
            f"lora_path lists {len(paths) // samples} roles for {request.batch_size} prompts; "
            "give one role, or one for each prompt (null for none)."
        )
