"""The prompts of a request: rendered chats, and the strings or token ids of completions. Work that
would block the event loop, and every stream with it, runs in a thread."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic_core import from_json

from gateway.generation import TargetModel
from gateway.http_server import parse_json
from gateway.model_text import ChatTemplate, ModelText
from gateway.output.tool_formats import Tool, Toolbox, schema_of, tools_prompt
from gateway.schema import (
    AllowedToolChoice,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    FunctionDefinition,
    GenerationBody,
    NamedTool,
    ToolCall,
    check_texts,
    unimplemented,
)
from gateway.settings import GatewaySettings
from shared.errors import DeadlineExceeded, InvalidArgument
from shared.generation import check_token_ids
from shared.text import Tokenizer

_ROLES = frozenset({"system", "user", "assistant", "tool"})
_UNIMPLEMENTED = ("function_call", "audio", "prefix", "partial")  # fields of a message
_MAX_CUSTOM_ROLES = 8  # checking one renders the template
T = TypeVar("T")
WORK_TIMEOUT_S = 30.0
# A separate pool, because work that has timed out still runs to its end.
_THREADS = ThreadPoolExecutor(2, "gateway-work")


def toolbox_of(body: ChatCompletionRequest) -> Toolbox | None:
    """Returns the tools that the model may call; None without any.

    Raises:
        InvalidArgument: a tool or the choice is wrong.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice in (None, "none", "auto"):
            return None
        message = "tool_choice asks for a call, but there are no tools"
        raise InvalidArgument.of("TOOLS_MISSING", "tool_choice", message)
    if choice == "none":
        return None
    functions = [tool.function for tool in body.tools]
    mode: object = choice
    if isinstance(choice, AllowedToolChoice):
        mode = choice.allowed_tools.mode
        functions = _allowed(functions, choice)
    toolbox = Toolbox(
        tools=tuple(
            Tool(tool.name, tool.description, schema_of(tool.parameters), tool.strict)
            for tool in functions
        ),
        must_call=mode not in (None, "auto"),
        forced_name=choice.function.name if isinstance(choice, NamedTool) else None,
        is_parallel=body.parallel_tool_calls is not False,
    )
    toolbox.check()
    return toolbox


def _allowed(
    functions: Sequence[FunctionDefinition], choice: AllowedToolChoice
) -> list[FunctionDefinition]:
    """Raises:
    InvalidArgument: the choice allows an unknown tool, or none.
    """
    field = "tool_choice.allowed_tools.tools"
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    unknown = sorted(allowed - {function.name for function in functions})
    if unknown or not allowed:
        what = f"names {unknown[0][:80]!r}, which is none of the tools" if unknown else "is empty"
        raise InvalidArgument.of("TOOL_UNKNOWN", field, f"{field} {what}")
    return [function for function in functions if function.name in allowed]


def chat_text(
    body: ChatCompletionRequest, toolbox: Toolbox | None, text: ModelText, max_template: int
) -> str:
    """Returns the prompt of a chat, rendered by the chat template.

    Args:
        max_template: most characters of a request's own `chat_template`; 0 refuses any.

    Raises:
        InvalidArgument: there is no template, or it refuses the messages.
    """
    if not body.messages:
        raise InvalidArgument.of("PROMPT_EMPTY", "messages", "messages is empty")
    if text.template is None:
        message = "the model has no chat template; use /v1/completions"
        raise InvalidArgument.of("CHAT_TEMPLATE_MISSING", "messages", message)
    variables = _variables(body)
    template = text.template
    if body.chat_template is not None:
        _check_template(body.chat_template, max_template)
        template = template.replaced(body.chat_template)
    messages = [_template_message(index, message) for index, message in enumerate(body.messages)]
    if toolbox is not None:
        text.style.check_tools()
        variables["tools"] = [tool.definition for tool in toolbox.tools]
        if not template.reads_tools:
            messages = _with_tools_prompt(messages, toolbox)
    custom = {message["role"] for message in messages} - _ROLES
    if custom:
        _check_roles(template, messages, custom)
    begins_answer = body.add_generation_prompt is not False and not body.continue_final_message
    if not body.continue_final_message:
        return template.render(messages, add_generation_prompt=begins_answer, variables=variables)
    if body.add_generation_prompt:
        message = "continue_final_message is set beside add_generation_prompt; only one may be"
        raise InvalidArgument.of("FIELD_INVALID", "continue_final_message", message)
    # The answer continues the last message, whose end in the prompt is found by a mark.
    final, mark = messages[-1], uuid.uuid4().hex
    if not final["content"].strip():
        raise _nothing_to_continue()
    marked = [*messages[:-1], {**final, "content": final["content"] + mark}]
    rendered = template.render(marked, add_generation_prompt=False, variables=variables)
    end = rendered.rfind(mark)
    if end < 0:
        raise _nothing_to_continue()
    return rendered[:end]


def _check_template(source: str, limit: int) -> None:
    if limit == 0:
        message = "chat_template is refused: this gateway takes no templates from requests"
        raise InvalidArgument.of("REQUEST_TEMPLATES_OFF", "chat_template", message)
    if len(source) > limit:
        message = f"chat_template has {len(source):,} characters; it may have {limit:,}"
        raise InvalidArgument.of("CHAT_TEMPLATE_TOO_LARGE", "chat_template", message)


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """Returns the template's variables; `chat_template_kwargs` overrides the request's fields."""
    thinks = body.enable_thinking
    if body.thinking is not None and body.thinking.type != "adaptive":
        thinks = body.thinking.type == "enabled"
    variables: dict[str, Any] = {
        "reasoning_effort": body.reasoning_effort,
        "verbosity": body.verbosity,
        # Templates of models with optional reasoning read one of these two.
        "enable_thinking": thinks,
        "thinking": thinks,
    }
    given = {name: value for name, value in variables.items() if value is not None}
    return given | (body.chat_template_kwargs or {})


def _check_roles(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], custom: Collection[str]
) -> None:
    """Raises:
    InvalidArgument: the template ignores a message because of its role, or there are too many
        custom roles.
    """
    roles = [message["role"] for message in messages]
    if len(custom) > _MAX_CUSTOM_ROLES:
        message = f"messages have {len(custom)} roles of their own; at most {_MAX_CUSTOM_ROLES} fit"
        raise InvalidArgument.of("ROLES_OUT_OF_RANGE", "messages", message)
    for role in custom:
        template.check_role(messages, roles.index(role))


def echoed_text(body: ChatCompletionRequest) -> tuple[str, ...]:
    """Returns the text that `echo` puts before the answer: the last message, if it is of the
    assistant or the answer continues it. Otherwise empty."""
    last = body.messages[-1] if body.messages else None
    if last is None or not (last.role == "assistant" or body.add_generation_prompt is False):
        return ()
    echoed = _text_of(last)
    return (echoed,) if echoed else ()


def _text_of(message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _nothing_to_continue() -> InvalidArgument:
    message = "continue_final_message needs text in the last message, written by the template"
    return InvalidArgument.of("FIELD_INVALID", "continue_final_message", message)


def _with_tools_prompt(messages: list[dict[str, Any]], toolbox: Toolbox) -> list[dict[str, Any]]:
    """Returns the messages with the tools described in the system message."""
    prompt = tools_prompt(toolbox.tools)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Returns the message in the form that templates read; `developer` is a newer name of `system`.

    Raises:
        InvalidArgument: the message holds media, or a call in OpenAI's former interface.
    """
    extra = message.model_extra or {}
    for name in _UNIMPLEMENTED:
        if extra.get(name):
            raise unimplemented(f"messages[{index}].{name}")
    if isinstance(message.content, list):
        check_texts(f"messages[{index}].content", message.content)
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": _text_of(message)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _template_call(f"messages[{index}].tool_calls[{number}]", call)
            for number, call in enumerate(message.tool_calls)
        ]
    return result


def _template_call(field: str, call: ToolCall) -> dict[str, Any]:
    """Returns a call with its arguments as an object: templates write them as JSON themselves."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = read_arguments(arguments, f"{field}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def read_arguments(text: str, field: str) -> Any:
    """Returns the value of a call's arguments.

    `max_tokens` may cut a call off, and clients send it back in the history: then this returns the
    complete part.

    Raises:
        InvalidArgument: the text is neither JSON nor the beginning of JSON.
    """
    content = text.encode(errors="surrogatepass") or b"{}"
    try:
        return parse_json(content, field)
    except InvalidArgument as error:
        if error.reason != "JSON_INVALID":
            raise
        try:
            # An incomplete value is left out of its object.
            return from_json(content, allow_partial=True, allow_inf_nan=False)
        except ValueError:
            raise error from None


def check_prompts(settings: GatewaySettings, num_prompts: int) -> None:
    """Raises:
    InvalidArgument: a completion has no prompt, or too many.
    """
    if not 1 <= num_prompts <= settings.max_prompts:
        message = f"prompt holds {num_prompts} prompts; it must hold [1, {settings.max_prompts}]"
        raise InvalidArgument.of("PROMPTS_OUT_OF_RANGE", "prompt", message)


def check_choices(settings: GatewaySettings, num_choices: int, num_prompts: int) -> None:
    """Raises:
    InvalidArgument: the request asks for too many choices or generations.
    """
    if not 1 <= num_choices <= settings.max_choices:
        raise InvalidArgument.out_of_range("n", num_choices, f"[1, {settings.max_choices}]")
    if num_choices * num_prompts > settings.max_generations:
        message = (
            f"the request asks for {num_choices} choices of {num_prompts} prompts; "
            f"n times prompts must be at most {settings.max_generations}"
        )
        raise InvalidArgument.of("CHOICES_OUT_OF_RANGE", "n", message)


def given_prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Returns the prompts of a body: a list of token ids is one prompt, not many."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token_id for token_id in prompt if isinstance(token_id, int)]]
    return [item for item in prompt if not isinstance(item, int)]


async def prompt_tokens(
    prompt: str | list[int], body: CompletionRequest, model: TargetModel, tokenizer: Tokenizer
) -> list[int]:
    """Returns the token ids of one prompt.

    Raises:
        InvalidArgument: the text is too long, or an id is not in the vocabulary.
    """
    longest = longest_prompt(body, model)
    if isinstance(prompt, str):
        add_special_tokens = body.add_special_tokens is not False
        return await tokenizer.encode(
            prompt, add_special_tokens=add_special_tokens, max_tokens=longest
        )
    if longest is not None and len(prompt) > longest:
        raise InvalidArgument.prompt_too_long(len(prompt), longest)
    check_token_ids("prompt", prompt, model.vocab_size, reason="TOKEN_OUT_OF_RANGE")
    return prompt


def longest_prompt(body: GenerationBody, model: TargetModel) -> int | None:
    """Returns the most tokens of a prompt; None where a longer prompt is truncated."""
    return model.max_context_tokens - 1 if body.truncate_prompt_tokens is None else None


def truncated(
    prompt: list[int], body: GenerationBody, model: TargetModel, max_tokens: int | None
) -> list[int]:
    """Returns the end, or the beginning, of a prompt that `truncate_prompt_tokens` keeps.

    Args:
        max_tokens: output tokens that -1 leaves room for; None leaves room for one.

    Raises:
        InvalidArgument: `truncate_prompt_tokens` is 0, or more than the context holds.
    """
    num_kept, limit = body.truncate_prompt_tokens, model.max_context_tokens - 1
    if num_kept is None:
        return prompt
    if num_kept == -1:
        num_kept = max(limit + 1 - (max_tokens or 1), 1)
    if not 1 <= num_kept <= limit:
        raise InvalidArgument.out_of_range(
            "truncate_prompt_tokens", num_kept, f"-1 or in [1, {limit}]"
        )
    return prompt[:num_kept] if body.truncation_side == "right" else prompt[-num_kept:]


def echoed_texts(
    body: CompletionRequest,
    prompts: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
) -> tuple[str, ...]:
    """Returns the texts that `echo` puts before the outputs: whole strings as they were sent, else
    the decoded token ids. Empty without `echo`.

    Args:
        prompts: token ids of the prompts.
        kept: the token ids that `truncate_prompt_tokens` left; only they are echoed.
    """
    if not body.echo:
        return ()
    return tuple(
        prompt
        if isinstance(prompt, str) and len(kept_ids) == len(token_ids)
        else tokenizer.decode(kept_ids, skip_special_tokens=False)
        for prompt, token_ids, kept_ids in zip(given_prompts(body), prompts, kept, strict=True)
    )


async def off_loop(field: str, work: Callable[[], T], timeout_s: float = WORK_TIMEOUT_S) -> T:
    """Returns the result of `work`, which prepares the data of the request's `field`.

    Raises:
        DeadlineExceeded: the work takes too long, its wait for a thread included.
    """
    running = asyncio.get_running_loop().run_in_executor(_THREADS, work)
    try:
        return await asyncio.wait_for(running, timeout_s)
    except TimeoutError as error:
        message = f"{field} takes longer than {timeout_s:g} s to prepare"
        raise DeadlineExceeded(message, reason="REQUEST_TOO_SLOW") from error
