"""Stop strings, for clients that leave them to the engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.text.detokenizer import Detokenizer
from shared.text.stop_strings import StopStrings
from shared.text.tokenizer import Tokenizer


class TextStop:
    """Finds the token of an output that completes a stop string.

    Tokens are looked at one by one, so what ends an output does not depend on how many of them a
    step commits.

    Args:
        silent_token_ids: tokens that end generation; they spell nothing.
        num_ignored: tokens at the beginning whose text cannot be part of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        *,
        skip_special_tokens: bool,
        silent_token_ids: Collection[int],
        num_ignored: int,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stop_strings)
        self._silent_token_ids = silent_token_ids
        self._num_ignored = num_ignored

    @property
    def matched(self) -> str | None:
        """The stop string that was completed."""
        return self._stops.matched

    def take(self, token_ids: Sequence[int]) -> int:
        """Takes the next tokens; returns how many there are up to the one that completes a stop
        string, or all."""
        for number, token_id in enumerate(token_ids, start=1):
            text = self._text(token_id)
            if self._num_ignored > 0:
                self._num_ignored -= 1
                continue
            self._stops.push(text)
            if self._stops.matched is not None:
                return number
        return len(token_ids)

    def _text(self, token_id: int) -> str:
        if token_id in self._silent_token_ids:
            return ""
        return self._detokenizer.push((token_id,))
