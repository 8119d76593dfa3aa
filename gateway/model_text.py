"""The text side of a model folder: tokenizer, chat template, sampling defaults and output style.

Templates come with checkpoints, so they are untrusted code: they run in Jinja's immutable sandbox
and see plain JSON values only. The environment is the one that templates are written for: block
trimming, loop controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML,
and `{% generation %}` blocks, which mark text for training and print it unchanged.

Source: transformers, "Writing a chat template"."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import TemplateError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.output.style import OutputStyle, ReasoningParser, ToolCallParser
from shared.errors import CheckpointError, InvalidArgument
from shared.model_files import read_json
from shared.sampling_defaults import SamplingDefaults
from shared.text import MAX_PROMPT_CHARACTERS, Tokenizer

Message = Mapping[str, Any]

_MAX_COMPARED = 64
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    Attributes:
        source: the template as written.
        reads_tools: whether the template reads the variable `tools`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises:
        jinja2.TemplateSyntaxError: `source` is not a template.
        """
        environment = _environment()
        self._template = environment.from_string(source)
        self.source = source
        parsed = environment.parse(source)
        self._compared = _compared_texts(parsed)  # before jinja folds constants
        self.reads_tools = "tools" in find_undeclared_variables(parsed)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate | None:
        """Returns the template of a model folder; None when the model has none.

        `chat_template.jinja` goes before the `chat_template` of `tokenizer_config.json`.

        Raises:
            CheckpointError: the template cannot be compiled.
        """
        config = _tokenizer_config(folder)
        path = folder / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else _source(config)
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(config))
        except TemplateError as error:
            raise CheckpointError(f"the chat template of {folder} is wrong: {error}") from error

    def replaced(self, source: str) -> ChatTemplate:
        """Returns another template with the same special tokens.

        Raises:
            InvalidArgument: `source`, which comes from a request, is not a template.
        """
        try:
            return ChatTemplate(source, self._special_tokens)
        except TemplateError as error:
            message = f"chat_template cannot be compiled: {error}"
            raise InvalidArgument.of("CHAT_TEMPLATE_MALFORMED", "chat_template", message) from error

    def check_role(self, messages: Sequence[Message], index: int) -> None:
        """Raises:
        InvalidArgument: the template does not render the message, because of its role.
        """
        role = messages[index]["role"]
        if self._renders(role, messages, index):
            return
        roles = [text for text in self._compared if self._renders(text, messages, index)]
        field = f"messages[{index}].role"
        taken = f"it takes {', '.join(roles)}" if roles else "it takes no other there"
        message = f"{field} is {role[:64]!r}, which the model's chat template ignores; {taken}"
        raise InvalidArgument.of("ROLE_UNKNOWN", field, message)

    def _renders(self, role: str, messages: Sequence[Message], index: int) -> bool:
        """Returns whether the message at `index` would be rendered if it had this role."""
        mark = uuid.uuid4().hex
        marked = {**messages[index], "role": role, "content": mark}
        try:
            return mark in self.render([*messages[:index], marked, *messages[index + 1 :]])
        except InvalidArgument:
            return False

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt.

        Args:
            variables: further variables for the template (`chat_template_kwargs`).

        Raises:
            InvalidArgument: the template refuses the messages.
        """
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        context.setdefault("tools", None)
        context.setdefault("documents", None)
        try:
            return self._template.render(context)
        # A template is foreign code; its exceptions are caused by the client's messages.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            message = f"the model's chat template refuses the messages: {error}"
            raise InvalidArgument.of("MESSAGES_REFUSED", "messages", message) from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` prints its body."""

    tags = {"generation"}  # noqa: RUF012 - the type jinja declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compared_texts(template: nodes.Template) -> list[str]:
    """Returns identifiers that a template compares values with; its roles are among them."""
    comparisons = template.find_all(nodes.Compare)
    values = (const.value for compare in comparisons for const in compare.find_all(nodes.Const))
    texts = {value for value in values if isinstance(value, str) and value.isidentifier()}
    return sorted(texts)[:_MAX_COMPARED]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)  # local time, as templates expect


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Raises:
    CheckpointError: the file is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _source(config: Mapping[str, Any]) -> str | None:
    """Returns the template of a tokenizer configuration; of several, the one named `default`."""
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {name: config[name] for name in _TOKEN_NAMES if config.get(name) is not None}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
    }


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model.

    Attributes:
        style: the format of the model's tool calls and reasoning.
        template: None when the model has none and serves completions only.
        tokenizer_config: content of `tokenizer_config.json`.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: SamplingDefaults
    style: OutputStyle
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def thinking_marks(self) -> tuple[int, int] | None:
        """Token ids of the tags around reasoning; None without tags of a single token each."""
        tags, encode = self.style.reasoning.tags, self.tokenizer.encode_word
        start, end = encode(tags.begin), encode(tags.end)
        without_tags = ReasoningParser.NONE, ReasoningParser.HARMONY
        if self.style.reasoning in without_tags or len(start) != 1 or len(end) != 1:
            return None
        return start[0], end[0]

    @classmethod
    def read(
        cls,
        folder: Path,
        max_prompt_characters: int = MAX_PROMPT_CHARACTERS,
        *,
        tools: ToolCallParser = ToolCallParser.AUTO,
        reasoning: ReasoningParser = ReasoningParser.AUTO,
    ) -> ModelText:
        """Raises:
        CheckpointError: a file is missing or malformed; the message names it.
        """
        tokenizer = Tokenizer.read(folder, max_prompt_characters)
        template = ChatTemplate.read(folder)
        style = OutputStyle.of(None if template is None else template.source, tools, reasoning)
        config = _tokenizer_config(folder)
        return cls(tokenizer, template, SamplingDefaults.read(folder), style, config)
