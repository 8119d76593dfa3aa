"""The answers of `/generate`: text so far, token ids so far, and `meta_info`."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

from gateway.choice import Choice, Piece
from gateway.chunks import DONE, event
from gateway.failures import error_body
from gateway.final_choice import check_field
from gateway.inbox import Aborted
from gateway.logprobs import finite
from gateway.native.generate_plan import GeneratePlan
from gateway.rounds import TokenRound, round_fields
from gateway.usage import speculative_decoding
from shared.errors import OutriderError
from shared.text.tokenizer import Tokenizer
from shared.tokens import FinishReason, TokenLogprobs

_Entries = list[list[Any]] | None


class GeneratedText:
    """One choice as `/generate` shows it: everything so far, every time.

    A request that was aborted ends like any other, with what it had and `finish_reason` abort.
    """

    def __init__(self, asked: GeneratePlan, choice: Choice, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self._asked = asked
        self._wanted = asked.scores_of(choice.index)
        self._tokenizer = tokenizer
        self._begin_s = time.perf_counter()
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._top: list[list[list[Any]] | None] = []
        self._named: list[list[list[Any]]] = []
        self._rounds: Sequence[TokenRound] = ()

    def add(self, piece: Piece) -> None:
        self._text += piece.text
        self._token_ids += piece.token_ids
        self._rounds = piece.rounds
        for score in piece.scores:
            self._logprobs.append(self._entry(score.token_id, score.logprobs.log_prob))
            top, named = self._split(score.logprobs)
            self._top.append(top)
            self._named.append(named)

    def body(self, aborted: Aborted | None = None) -> dict[str, Any]:
        """Returns the JSON object."""
        index = {"index": self.choice.index} if self._asked.is_batch else {}
        return {
            "text": self._text,
            "output_ids": self._token_ids,
            "meta_info": self._meta_info(aborted),
            **index,
        }

    def _meta_info(self, aborted: Aborted | None) -> dict[str, Any]:
        choice = self.choice
        prompt = self._asked.plan.generations[choice.index].prompt_token_ids
        info: dict[str, Any] = {
            "id": self._asked.id_of(choice.index),
            "finish_reason": _finish_reason(choice, aborted),
            "prompt_tokens": len(prompt),
            "completion_tokens": choice.num_output_tokens,
            "cached_tokens": choice.num_cached_tokens,
        }
        if choice.weight_spans:
            info["weight_version"] = choice.weight_spans[-1][0]
        if len(choice.weight_spans) > 1:
            info["weight_version_spans"] = choice.weight_spans
        if info["finish_reason"] is not None:
            info["e2e_latency"] = time.perf_counter() - self._begin_s
            if choice.routes:
                info["routed_experts"] = base64.b64encode(choice.routes).decode()
        inputs = self._inputs(prompt)
        if self._wanted.num_top is not None:
            info["input_token_logprobs"] = [entry for entry, _, _ in inputs]
            info["output_token_logprobs"] = self._logprobs
        if self._wanted.num_top:
            info["input_top_logprobs"] = [top for _, top, _ in inputs]
            info["output_top_logprobs"] = self._top
        if self._wanted.named is not None:
            info["input_token_ids_logprobs"] = [named for _, _, named in inputs]
            info["output_token_ids_logprobs"] = self._named
        if self._rounds:  # new ones only: all of them in every event would add up to megabytes
            info["spec_rounds"] = round_fields(self._rounds, self._tokenizer)
        return info | check_field(choice) | speculation_fields(choice)

    def _inputs(self, prompt: Sequence[int]) -> list[tuple[list[Any], _Entries, _Entries]]:
        """Returns the entries of the prompt's tokens; the very first one has no distribution."""
        scores = self.choice.prompt_scores
        found: list[tuple[list[Any], _Entries, _Entries]] = []
        if self._wanted.start == 0:
            found.append((self._entry(prompt[0], None), None, None))
        for token_id, each in zip(prompt[len(prompt) - len(scores) :], scores, strict=True):
            found.append((self._entry(token_id, each.log_prob), *self._split(each)))
        return found

    def _entry(self, token_id: int, log_prob: float | None) -> list[Any]:
        spelled = None
        if self._asked.spells_tokens:
            spelled = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return [None if log_prob is None else finite(log_prob), token_id, spelled]

    def _split(self, logprobs: TokenLogprobs) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns the likeliest tokens, and those that were named."""
        entries = [self._entry(token_id, log_prob) for token_id, log_prob in logprobs.top]
        num_named = len(self._wanted.named or ())
        return entries[: len(entries) - num_named], entries[len(entries) - num_named :]


class GenerateChunks:
    """Events of a `/generate` stream."""

    def __init__(self, asked: GeneratePlan, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._texts: dict[int, GeneratedText] = {}

    def opening(self, choice: Choice, usage_so_far: bytes) -> bytes:
        self._texts[choice.index] = GeneratedText(self._asked, choice, self._tokenizer)
        return b""

    def news(self, choice: Choice, usage_so_far: bytes) -> bytes:
        piece = choice.take()
        if piece is None and not choice.is_finished:
            return b""
        text = self._texts[choice.index]
        text.add(piece or Piece(""))
        return event(text.body())

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        return DONE

    def failure(self, error: OutriderError) -> bytes:
        if not isinstance(error, Aborted):
            return event(error_body(error))
        running = [text for text in self._texts.values() if not text.choice.is_finished]
        for text in running:
            text.add(text.choice.cut())
        return b"".join([event(text.body(error)) for text in running]) + DONE


def speculation_fields(choice: Choice) -> dict[str, Any]:
    """Returns the speculation counters under the names of old and new releases of SGLang.

    As there, they are absent when no tree was verified.
    """
    figures, stats = speculative_decoding([choice]), choice.stats
    if figures is None:
        return {}
    histogram = list(stats.histogram)
    return {
        "spec_verify_ct": stats.num_verified_rounds,
        "spec_accept_length": figures["mean_acceptance_length"],
        "spec_accept_rate": figures["draft_acceptance_rate"],
        "spec_accept_token_num": stats.num_accepted,
        "spec_draft_token_num": stats.num_drafted,
        "spec_accept_histogram": histogram,
        "spec_num_correct_drafts": stats.num_accepted,
        "spec_num_proposed_drafts": stats.num_drafted,
        "spec_accepted_drafts": stats.num_accepted,
        "spec_proposed_drafts": stats.num_drafted,
        "spec_correct_drafts_histogram": histogram,
    }


def _finish_reason(choice: Choice, aborted: Aborted | None) -> dict[str, Any] | None:
    if aborted is not None:
        return {"type": "abort", "message": aborted.message}
    if choice.finish_reason is None:
        return None
    if choice.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": choice.num_output_tokens}
    matched = choice.matched_stop
    return {"type": "stop", "matched": choice.stop_token_id if matched is None else matched}
