"""The plan of one HTTP request: checked and tokenized. Made by `planner.py`."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.generation import Generation
from gateway.output.held_schema import AnswerSchemas
from gateway.output.style import ChatOutput
from gateway.stop_patterns import StopPattern


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for turning the tokens of every choice into text.

    Attributes:
        hidden_token_ids: tokens that end generation and are not shown, unless a stop is.
        output: parsers of tool calls and reasoning; None when all of it is text.
        include_reasoning: whether reasoning is shown.
        hides_output: the request asks for no token at all, only for what a target says of its
            prompt. A target always draws one.
        schemas: that it is checked against when it ends.
        keeps_output: all of it is needed again when it has ended.
    """

    stop_strings: tuple[str, ...] = ()
    stop_patterns: tuple[StopPattern, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    hidden_token_ids: frozenset[int] = frozenset()
    with_logprobs: bool = False
    with_rounds: bool = False
    output: ChatOutput | None = None
    include_reasoning: bool = True
    hides_output: bool = False
    schemas: AnswerSchemas | None = None
    keeps_output: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request, checked and tokenized.

    Attributes:
        request_id: shown to the client as `id`.
        texts: of each generation, where they differ; else `text` is that of all.
        created: Unix time in seconds.
        generations: in order of choice index, which is prompt · `num_choices` + choice.
        num_choices: choices drawn for each prompt: `n`, or `best_of`.
        num_shown: how many of them are the answer.
        echoes_scores: the log probabilities of an echo hold those of the prompt.
        shows_logprobs: False when log probabilities only serve to find the best choices.
        shows_prompt_logprobs: the answer has vLLM's `prompt_logprobs`.
        tokens_as_ids: log probabilities name tokens by their ids.
        fingerprint: what the answer depends on beside the request.
        service_tier: as OpenAI names what the request was served by; None where it was not asked.
        grammar_field: where the client said what the output must match.
        echoed_texts: what goes before the output, one for each prompt; empty without echo.
    """

    request_id: str
    created: int
    model: str
    generations: tuple[Generation, ...]
    num_choices: int
    text: TextOptions
    is_stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    fingerprint: str = ""
    service_tier: str | None = None
    texts: tuple[TextOptions, ...] = ()
    grammar_field: str = ""
    num_shown: int = 1
    echoes_scores: bool = False
    shows_prompt_logprobs: bool = False
    shows_logprobs: bool = True
    echoed_texts: tuple[str, ...] = ()

    @property
    def names_scored_tokens(self) -> bool:
        """Whether the request named the tokens whose log probabilities it wants."""
        return bool(self.generations[0].logprob_token_ids)

    def text_of(self, index: int) -> TextOptions:
        """Returns how the output of a choice becomes text."""
        return self.texts[index] if self.texts else self.text

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the request; a prompt counts once, whatever `n`."""
        prompts = self.generations[:: self.num_choices]
        return sum(len(generation.prompt_token_ids) for generation in prompts)
