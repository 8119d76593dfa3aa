"""The tokens that a draft of another family has in common with its target.

Source: Timor et al., arXiv 2502.05202, token-level intersection (TLI): the draft proposes only
tokens that both have. Tokens are one if their bytes are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointError
from shared.model_files import has_tokenizer, read_json, tokenizer_sha256
from shared.text import Tokenizer

LEAST_SHARE = 0.05
"""Of the target's tokens. A draft that has fewer would hardly ever be right."""
_ROLES = ("bos_token", "eos_token")
_ROLES_FILE = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """A draft's tokens as its target numbers them.

    Attributes:
        pieces: for each of the target's V ids the draft's tokens that spell it: one where both have
            the token, none where there is nothing to spell.
        draft_ids: the tokens that both have, in the order of `target_ids`.
        target_ids: likewise, ascending.
        num_target_tokens: of the target's tokenizer, which may leave ids out.
    """

    pieces: tuple[tuple[int, ...], ...]
    draft_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    num_target_tokens: int

    @property
    def share(self) -> float:
        """Part of the target's tokens that the draft has, in [0, 1]."""
        return len(self.target_ids) / max(self.num_target_tokens, 1)

    @property
    def is_identity(self) -> bool:
        """Whether each token of the target is the draft's token of the same id."""
        is_whole = len(self.target_ids) == self.num_target_tokens
        return is_whole and self.draft_ids == self.target_ids

    def within(self, num_rows: int) -> VocabularyMap:
        """Returns the map without draft ids from `num_rows` on: some tokenizers have tokens for
        which their model has no rows."""
        if max(self.draft_ids, default=0) < num_rows:
            return self
        pairs = [each for each in self._pairs() if each[0] < num_rows]
        return VocabularyMap(
            tuple(tuple(i for i in each if i < num_rows) for each in self.pieces),
            tuple(draft_id for draft_id, _ in pairs),
            tuple(target_id for _, target_id in pairs),
            self.num_target_tokens,
        )

    def words(self) -> str:
        """Returns how much the two have in common."""
        return (
            f"{len(self.target_ids):,} of the target's {self.num_target_tokens:,} tokens "
            f"({self.share:.1%})"
        )

    def _pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.draft_ids, self.target_ids, strict=True)


def read_vocabulary_map(draft_folder: Path, target_folder: Path) -> VocabularyMap | None:
    """Returns how a draft's tokens become its target's; None where their ids are the same.

    Args:
        draft_folder: of the draft's model. One without a tokenizer has the target's.
        target_folder: of the target's tokenizer.

    Raises:
        CheckpointError: a tokenizer cannot be read, or the two have too little in common; the
            message names both folders.
    """
    if draft_folder == target_folder or not has_tokenizer(draft_folder):
        return None
    if tokenizer_sha256(draft_folder) == tokenizer_sha256(target_folder):
        return None
    found = vocabulary_map(_Side.read(draft_folder), _Side.read(target_folder))
    if found.is_identity:
        return None
    least = math.ceil(LEAST_SHARE * found.num_target_tokens)
    if len(found.target_ids) < least:
        raise CheckpointError(
            f"the tokenizers differ too much: the draft's, {draft_folder}, has {found.words()}; "
            f"the target's is {target_folder}; at least {least:,} are wanted: take a draft of a "
            f"closer family, or --speculative-algorithm NGRAM, which fits every model"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two tokenizers.

    Attributes:
        roles: the tokens that begin and end texts, by what they are for.
    """

    tokenizer: Tokenizer
    roles: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> _Side:
        """Raises:
        CheckpointError: the folder has no readable `tokenizer.json`.
        """
        tokenizer = Tokenizer.read(folder)
        path = folder / _ROLES_FILE
        config = read_json(path) if path.is_file() else {}
        roles = {}
        for role in _ROLES:
            value = config.get(role)
            spelled = value.get("content") if isinstance(value, dict) else value
            if isinstance(spelled, str) and (ids := tokenizer.ids_of((spelled,))):
                roles[role] = min(ids)
        return cls(tokenizer, roles)

    def by_bytes(self) -> dict[tuple[bool, bytes], int]:
        """Returns the token of some bytes, special tokens apart. Of several the one that texts
        become: a token of a single byte is only for characters without one, and then the first."""
        tokenizer, fallback = self.tokenizer, self.tokenizer.fallback_ids()
        order = sorted(tokenizer.token_bytes, key=lambda i: (i in fallback, i))
        found: dict[tuple[bool, bytes], int] = {}
        for token_id in order:
            found.setdefault(self.key(token_id), token_id)
        return found

    def key(self, token_id: int) -> tuple[bool, bytes]:
        """Returns what the same token of another tokenizer has in common with it."""
        tokenizer = self.tokenizer
        return token_id in tokenizer.special_ids, tokenizer.token_bytes[token_id]


def vocabulary_map(draft: _Side, target: _Side) -> VocabularyMap:
    """Returns how the tokens of two tokenizers correspond.

    Tokens that begin and end texts correspond by what they are for, whatever their spelling.
    """
    known, wanted = draft.by_bytes(), target.by_bytes()
    one = {i: known[key] for i in target.tokenizer.token_bytes if (key := target.key(i)) in known}
    for role, target_id in target.roles.items():
        if target_id not in one and role in draft.roles:
            one[target_id] = draft.roles[role]
    pieces: list[tuple[int, ...]] = [()] * (max(target.tokenizer.token_bytes, default=-1) + 1)
    for target_id, draft_id in one.items():
        pieces[target_id] = (draft_id,)
    lacking = [i for i in target.tokenizer.token_bytes if i not in one]
    for target_id, spelled in zip(lacking, _spelled(lacking, draft, target, known), strict=True):
        pieces[target_id] = spelled
    # Each token of the draft is proposed as one token: what texts become, by its bytes rather than
    # by its role.
    by_draft: dict[int, int] = {}
    for target_id in sorted(one, key=lambda i: (wanted[target.key(i)] != i, i)):
        by_draft.setdefault(one[target_id], target_id)
    pairs = sorted((target_id, draft_id) for draft_id, target_id in by_draft.items())
    return VocabularyMap(
        tuple(pieces),
        tuple(draft_id for _, draft_id in pairs),
        tuple(target_id for target_id, _ in pairs),
        len(target.tokenizer.token_bytes),
    )


def _spelled(
    lacking: Sequence[int], draft: _Side, target: _Side, known: Mapping[tuple[bool, bytes], int]
) -> Iterator[tuple[int, ...]]:
    """Yields the draft's tokens that spell each of the target's: as the draft reads the text, or,
    of bytes that are no text by themselves, the longest tokens from the start on."""
    plain = {
        spelling: token_id for (is_special, spelling), token_id in known.items() if not is_special
    }
    longest = max(map(len, plain), default=0)
    all_bytes = [target.tokenizer.token_bytes[i] for i in lacking]
    texts = [each.decode("utf-8", "replace") for each in all_bytes]
    token_bytes = draft.tokenizer.token_bytes
    for spelling, ids in zip(all_bytes, draft.tokenizer.encode_words(texts), strict=True):
        # A tokenizer may put a space in front, or change the text before it reads it.
        is_exact = b"".join(token_bytes.get(i, b"") for i in ids) == spelling
        yield tuple(ids) if is_exact else tuple(_longest(spelling, plain, longest))


def _longest(spelling: bytes, plain: Mapping[bytes, int], longest: int) -> Iterator[int]:
    start = 0
    while start < len(spelling):
        for end in range(min(len(spelling), start + longest), start, -1):
            if (token_id := plain.get(spelling[start:end])) is not None:
                yield token_id
                start = end
                break
        else:
            start += 1  # a byte that the draft has no token for
