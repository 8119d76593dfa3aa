"""Tokens of two tokenizers that are one: by their bytes, or by what they are for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.errors import CheckpointError
from shared.text import Tokenizer as OwnTokenizer
from shared.vocabulary_map import VocabularyMap, read_vocabulary_map

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("ca", "t")]


def _byte_level(
    folder: Path,
    merges: Sequence[tuple[str, str]],
    specials: Sequence[str],
    *,
    end: str,
    is_reversed: bool = False,
) -> Path:
    spellings = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    if is_reversed:
        spellings.reverse()
    vocabulary = {spelling: number for number, spelling in enumerate(spellings)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _saved(folder, tokenizer, specials, end=end)


def _sentencepiece(folder: Path, words: Sequence[str]) -> Path:
    """As Llama 2 writes it: bytes first, and a space in front of every text."""
    spellings = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={spelling: number for number, spelling in enumerate(spellings)},
            merges=[("t", "h"), ("th", "e"), ("▁", "the")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _saved(folder, tokenizer, ["<s>", "</s>"], end="</s>", begin="<s>")


def _saved(
    folder: Path, tokenizer: Tokenizer, specials: Sequence[str], *, end: str, begin: str = ""
) -> Path:
    folder.mkdir()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": begin or None, "eos_token": {"content": end}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _map(draft: Path, target: Path) -> VocabularyMap:
    found = read_vocabulary_map(draft, target)
    assert found is not None
    return found


def _ids(folder: Path) -> dict[str, int]:
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab(with_added_tokens=True)


def test_tokens_of_the_same_bytes_are_one_whatever_their_ids(tmp_path: Path) -> None:
    draft = _byte_level(tmp_path / "d", MERGES, ["<e>"], end="<e>", is_reversed=True)
    target = _byte_level(tmp_path / "t", MERGES, ["<e>"], end="<e>")
    found = _map(draft, target)
    assert found.share == 1.0
    assert list(found.target_ids) == sorted(_ids(target).values())
    own, bytes_of = OwnTokenizer.read(draft), OwnTokenizer.read(target).token_bytes
    for draft_id, target_id in zip(found.draft_ids, found.target_ids, strict=True):
        assert own.token_bytes[draft_id] == bytes_of[target_id]
        assert found.pieces[target_id] == (draft_id,)


def test_a_token_that_the_draft_lacks_is_read_in_pieces(tmp_path: Path) -> None:
    draft = _byte_level(tmp_path / "d", MERGES[:2], ["<e>"], end="<e>")
    target = _byte_level(tmp_path / "t", MERGES, ["<e>", "<|im_start|>"], end="<e>")
    found, few, many = _map(draft, target), _ids(draft), _ids(target)
    assert found.pieces[many["Ġthe"]] == (few["Ġ"], few["the"])
    assert found.pieces[many["cat"]] == (few["c"], few["a"], few["t"])
    assert len(found.pieces[many["<|im_start|>"]]) == len("<|im_start|>")
    assert len(found.target_ids) == len(many) - 4
    assert not {many["Ġthe"], many["ca"], many["cat"], many["<|im_start|>"]} & {*found.target_ids}


def test_ends_of_texts_are_one_whatever_their_spelling(tmp_path: Path) -> None:
    draft = _byte_level(tmp_path / "d", MERGES, ["<|eot|>"], end="<|eot|>")
    target = _byte_level(tmp_path / "t", MERGES, ["<a>", "<|im_end|>"], end="<|im_end|>")
    found, few, many = _map(draft, target), _ids(draft), _ids(target)
    assert found.pieces[many["<|im_end|>"]] == (few["<|eot|>"],)
    place = found.target_ids.index(many["<|im_end|>"])
    assert found.draft_ids[place] == few["<|eot|>"]


def test_a_special_token_is_not_the_text_that_spells_it(tmp_path: Path) -> None:
    draft = _byte_level(tmp_path / "d", [("a", "s"), ("as", "a")], ["<e>"], end="<e>")
    target = _byte_level(tmp_path / "t", [], ["asa", "<e>"], end="<e>")
    found, few, many = _map(draft, target), _ids(draft), _ids(target)
    assert many["asa"] not in found.target_ids
    assert found.pieces[many["asa"]] == (few["asa"],), "but it stands for it"


@pytest.mark.parametrize("is_draft", [True, False])
def test_the_two_families_share_words_and_characters(tmp_path: Path, *, is_draft: bool) -> None:
    pieces = _sentencepiece(tmp_path / "p", ["▁", "t", "h", "e", "th", "the", "▁the", "é", "A"])
    level = _byte_level(tmp_path / "b", MERGES, ["<e>"], end="<e>")
    by_piece, by_byte = _ids(pieces), _ids(level)
    pairs = {
        by_piece["▁the"]: by_byte["Ġthe"],
        by_piece["A"]: by_byte["A"],  # the character, not the byte that stands in for others
        by_piece["<0x0A>"]: by_byte["Ċ"],
        by_piece["<0xC3>"]: by_byte["Ã"],
        by_piece["▁"]: by_byte["Ġ"],
        by_piece["</s>"]: by_byte["<e>"],
    }
    found = _map(pieces, level) if is_draft else _map(level, pieces)
    rows = dict(zip(found.draft_ids, found.target_ids, strict=True))
    backwards = {draft_id: target_id for target_id, draft_id in pairs.items()}
    for draft_id, target_id in (pairs if is_draft else backwards).items():
        assert rows[draft_id] == target_id
    if is_draft:
        # Without the space that the draft puts in front of texts.
        spelled = ("<0x63>", "<0x61>", "t")
        assert found.pieces[by_byte["cat"]] == tuple(map(by_piece.__getitem__, spelled))
    else:
        assert found.pieces[by_piece["<0x41>"]] == (by_byte["A"],), "read as the character is"
        assert by_piece["<0x41>"] not in found.target_ids
        assert found.pieces[by_piece["é"]] == (by_byte["Ã"], by_byte["©"])


def test_equal_ids_need_no_map(tmp_path: Path) -> None:
    first = _byte_level(tmp_path / "1", MERGES, ["<e>"], end="<e>")
    second = _byte_level(tmp_path / "2", MERGES, ["<e>"], end="<e>")
    path = second / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["use_regex"] = False
    path.write_text(json.dumps(content))
    assert read_vocabulary_map(first, first) is None
    assert read_vocabulary_map(first, second) is None
    (tmp_path / "bare").mkdir()
    assert read_vocabulary_map(tmp_path / "bare", second) is None


def test_too_little_in_common_is_refused_with_both_folders(tmp_path: Path) -> None:
    target = _byte_level(tmp_path / "t", MERGES, [f"<{n}>" for n in range(5500)], end="<1>")
    draft = _byte_level(tmp_path / "d", MERGES, ["<e>"], end="<e>")
    with pytest.raises(CheckpointError) as refused:
        read_vocabulary_map(draft, target)
    words = f"{draft}, has 262 of the target's 5,761 tokens (4.5%)"
    assert words in refused.value.message
    assert str(target) in refused.value.message
    assert "NGRAM" in refused.value.message


def test_a_tokenizer_of_no_known_kind_is_refused_by_name(tmp_path: Path) -> None:
    draft = tmp_path / "d"
    draft.mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(draft / "tokenizer.json"))
    target = _byte_level(tmp_path / "t", MERGES, ["<e>"], end="<e>")
    with pytest.raises(CheckpointError, match="neither byte-level nor SentencePiece"):
        read_vocabulary_map(draft, target)


def test_tokens_without_a_row_in_the_model_are_left_out(tmp_path: Path) -> None:
    draft = _byte_level(tmp_path / "d", MERGES, ["<e>"], end="<e>", is_reversed=True)
    target = _byte_level(tmp_path / "t", MERGES, ["<e>"], end="<e>")
    found = _map(draft, target)
    less, lost = found.within(261), _ids(target)["<e>"]
    assert found.within(262) is found
    assert less.pieces[lost] == ()
    assert less.target_ids == tuple(i for i in found.target_ids if i != lost)
    assert len(less.draft_ids) == len(less.target_ids)
