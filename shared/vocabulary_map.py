"""The tokens that a draft of another model family has in common with its target.

Source: Timor et al., arXiv 2502.05202, token-level intersection (TLI): the draft proposes only
tokens that both have. Two tokens are the same if their bytes are.
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
"""Least share of the target's tokens; a draft that has fewer would hardly ever be accepted."""
_ROLES = ("bos_token", "eos_token")
_ROLES_FILE = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """The correspondence of a draft's and its target's token ids.

    Attributes:
        pieces: for each of the target's V ids, the draft's tokens that spell it: one if both have
            the token, none for an id without text.
        draft_ids: the draft's ids of common tokens, in the order of `target_ids`.
        target_ids: the target's ids of common tokens, ascending.
        num_target_tokens: tokens of the target's tokenizer, which may leave ids out.
    """

    pieces: tuple[tuple[int, ...], ...]
    draft_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    num_target_tokens: int

    @property
    def share(self) -> float:
        """Share of the target's tokens that the draft has, in [0, 1]."""
        return len(self.target_ids) / max(self.num_target_tokens, 1)

    @property
    def is_identity(self) -> bool:
        """Whether each token of the target is the draft's token of the same id."""
        is_whole = len(self.target_ids) == self.num_target_tokens
        return is_whole and self.draft_ids == self.target_ids

    def within(self, num_rows: int) -> VocabularyMap:
        """Returns the map without draft ids from `num_rows` on: some tokenizers have tokens for
        which their model has no embedding rows."""
        if max(self.draft_ids, default=0) < num_rows:
            return self
        both = zip(self.draft_ids, self.target_ids, strict=True)
        pairs = [pair for pair in both if pair[0] < num_rows]
        return VocabularyMap(
            tuple(tuple(i for i in piece if i < num_rows) for piece in self.pieces),
            tuple(draft_id for draft_id, _ in pairs),
            tuple(target_id for _, target_id in pairs),
            self.num_target_tokens,
        )

    def words(self) -> str:
        """Returns a description of how many tokens are common."""
        return (
            f"{len(self.target_ids):,} of the target's {self.num_target_tokens:,} tokens "
            f"({self.share:.1%})"
        )


def read_vocabulary_map(draft_folder: Path, target_folder: Path) -> VocabularyMap | None:
    """Returns the correspondence of a draft's and its target's tokens; None if ids are the same.

    Args:
        draft_folder: of the draft's model; without a tokenizer, the draft has the target's.
        target_folder: of the target's tokenizer.

    Raises:
        CheckpointError: a tokenizer cannot be read, or too few tokens are common; the message names
            both folders.
    """
    if draft_folder == target_folder or not has_tokenizer(draft_folder):
        return None
    if tokenizer_sha256(draft_folder) == tokenizer_sha256(target_folder):
        return None
    mapping = vocabulary_map(_Side.read(draft_folder), _Side.read(target_folder))
    if mapping.is_identity:
        return None
    least = math.ceil(LEAST_SHARE * mapping.num_target_tokens)
    if len(mapping.target_ids) < least:
        raise CheckpointError(
            f"the tokenizers differ too much: the draft's, {draft_folder}, has {mapping.words()}; "
            f"the target's is {target_folder}; at least {least:,} are wanted: take a draft of a "
            f"closer family, or --speculative-algorithm NGRAM, which fits every model"
        )
    return mapping


@dataclass(frozen=True, slots=True)
class _Side:
    """The tokenizer of the draft or the target.

    Attributes:
        roles: token ids of `bos_token` and `eos_token`, by these names.
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
        """Returns the token ids by key. Of several tokens with the same bytes it has the one that
        encoding yields: not the byte-fallback token, else the first."""
        tokenizer, fallback = self.tokenizer, self.tokenizer.fallback_ids()
        order = sorted(tokenizer.token_bytes, key=lambda i: (i in fallback, i))
        ids: dict[tuple[bool, bytes], int] = {}
        for token_id in order:
            ids.setdefault(self.key(token_id), token_id)
        return ids

    def key(self, token_id: int) -> tuple[bool, bytes]:
        """Returns a token's identity across tokenizers: whether it is special, and its bytes."""
        tokenizer = self.tokenizer
        return token_id in tokenizer.special_ids, tokenizer.token_bytes[token_id]


def vocabulary_map(draft: _Side, target: _Side) -> VocabularyMap:
    """Returns the correspondence of the tokens of two tokenizers.

    Tokens that begin or end texts correspond by role, whatever their spelling.
    """
    by_bytes, target_by_bytes = draft.by_bytes(), target.by_bytes()
    target_tokens = target.tokenizer.token_bytes
    common = {i: by_bytes[key] for i in target_tokens if (key := target.key(i)) in by_bytes}
    for role, target_id in target.roles.items():
        if target_id not in common and role in draft.roles:
            common[target_id] = draft.roles[role]
    pieces: list[tuple[int, ...]] = [()] * (max(target_tokens, default=-1) + 1)
    for target_id, draft_id in common.items():
        pieces[target_id] = (draft_id,)
    missing = [i for i in target_tokens if i not in common]
    for target_id, ids in zip(missing, _spelled(missing, draft, target, by_bytes), strict=True):
        pieces[target_id] = ids
    # A draft token that corresponds to several target tokens is proposed as the one that encoding
    # yields, and by its bytes rather than by its role.
    by_draft: dict[int, int] = {}
    for target_id in sorted(common, key=lambda i: (target_by_bytes[target.key(i)] != i, i)):
        by_draft.setdefault(common[target_id], target_id)
    pairs = sorted((target_id, draft_id) for draft_id, target_id in by_draft.items())
    return VocabularyMap(
        tuple(pieces),
        tuple(draft_id for _, draft_id in pairs),
        tuple(target_id for target_id, _ in pairs),
        len(target_tokens),
    )


def _spelled(
    missing: Sequence[int],
    draft: _Side,
    target: _Side,
    by_bytes: Mapping[tuple[bool, bytes], int],
) -> Iterator[tuple[int, ...]]:
    """Yields the draft's tokens that spell each missing token: the draft's encoding of its text,
    or, if its bytes are no text by themselves, greedily the longest tokens from the start."""
    plain = {
        spelling: token_id
        for (is_special, spelling), token_id in by_bytes.items()
        if not is_special
    }
    longest = max(map(len, plain), default=0)
    spellings = [target.tokenizer.token_bytes[i] for i in missing]
    texts = [spelling.decode("utf-8", "replace") for spelling in spellings]
    token_bytes = draft.tokenizer.token_bytes
    for spelling, ids in zip(spellings, draft.tokenizer.encode_words(texts), strict=True):
        # A tokenizer may put a space in front, or normalise the text.
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
