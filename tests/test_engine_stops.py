"""Stop strings, across tokens and inside multi-byte characters, against a search in the decoded text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentropy.errors import UserError
from agentropy.policies.base import Stop
from agentropy.policies.stops import MAYBE_STRING, STOP_TOKEN, StopTable, token_bytes

TEXT = [
    "The answer is 42.",
    "</python> and <answer>",
    "größer als 北京 🙂 ok",
    "def f(x): return x + 1\n\n",
    "naïve café",
] * 20


def byte_level() -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    raw.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def byte_fallback() -> Any:
    """As sentencepiece models are written: words with a low line for the space, bytes for what is not a word."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    for piece in ["▁", "a", "b", "▁a", "ab", "!", "▁ab!", "é", "北"]:
        vocabulary[piece] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def word_piece() -> Any:
    vocabulary = {"[UNK]": 0, "stop": 1, "##here": 2, "here": 3, "go": 4}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def first_stop(table: StopTable, index: int, ids: list[int]) -> int | None:
    """The token at which the engine would stop, by its own two looks."""
    for n, token in enumerate(ids, 1):
        hit = int(table.table[index, token])
        if hit & STOP_TOKEN or (hit and table.completes(index, ids[:n])):
            return n
    return None


def expected_stop(tokenizer: Any, strings: tuple[str, ...], ids: list[int]) -> int | None:
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=False)
        if any(s in text for s in strings):
            return n
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stops_where_the_decoded_text_first_holds_the_string(name: str) -> None:
    """Random ids hold broken characters too; the strings are cut out of the decoded text, so most do occur."""
    tokenizer = TOKENIZERS[name]
    size = len(tokenizer)
    rng = random.Random(0)
    found = 0
    for trial in range(400):
        if name == "byte-fallback":
            # Whole pieces, now and then a character in bytes or a stray byte.
            odd = [rng.randrange(128, 256)] if trial % 2 else list("é北".encode())
            ids = [t for _ in range(20) for t in (odd if rng.random() < 0.1 else [rng.randrange(256, size)])]
        elif trial % 2:
            ids = [rng.randrange(size) for _ in range(30)]
        else:
            ids = tokenizer.encode(" ".join(rng.sample(TEXT, 3)), add_special_tokens=False)[:60]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        strings = []
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(text))
            piece = text[at : at + rng.randrange(1, 6)].replace("\ufffd", "")
            strings.append(piece or "</python>")
        stop = Stop(strings=tuple(strings))
        table = StopTable(tokenizer, size, torch.device("cpu"))
        stopped = first_stop(table, table.index(stop), ids)
        assert stopped == expected_stop(tokenizer, stop.strings, ids), (ids, strings)
        found += stopped is not None
    assert found > 300


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_tokens_make_up_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    known = token_bytes(tokenizer, len(tokenizer) + 3)
    assert known is not None
    assert known[-3:] == [b"", b"", b""]
    rng = random.Random(1)
    for _ in range(200):
        # What becomes of bytes that are no UTF-8 is the decoder's affair.
        first = 256 if name == "byte-fallback" else 0
        ids = [rng.randrange(first, len(tokenizer)) for _ in range(8)]
        joined = b"".join(known[t] for t in ids).decode(errors="replace")
        assert joined.replace("\ufffd", "") == tokenizer.decode(ids, skip_special_tokens=False).replace("\ufffd", "")


def test_most_tokens_cannot_complete_a_string() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    table = StopTable(tokenizer, len(tokenizer), torch.device("cpu"))
    index = table.index(Stop(strings=("</python>",)))
    row = table.table[index]
    assert 0 < int((row == MAYBE_STRING).sum()) < 20


def test_a_tokenizer_without_known_bytes_is_decoded() -> None:
    tokenizer = word_piece()
    table = StopTable(tokenizer, 5, torch.device("cpu"))
    index = table.index(Stop(strings=("stophere",)))
    assert first_stop(table, index, [4, 1, 2, 3]) == 3
    assert first_stop(table, index, [4, 1, 3]) is None


def test_stops_are_kept_apart_and_made_once() -> None:
    table = StopTable(TOKENIZERS["byte-level"], 400, torch.device("cpu"))
    first, second = Stop(frozenset({1, 2})), Stop(frozenset({2}), ("x",))
    assert table.index(first) == table.index(Stop(frozenset({2, 1}))) == 0
    assert table.index(second) == 1
    assert table.table.shape == (2, 400)
    assert table.table[0, :3].tolist() == [0, STOP_TOKEN, STOP_TOKEN]
    assert table.table[1, :3].tolist() == [0, 0, STOP_TOKEN]


@pytest.mark.parametrize(
    ("stop", "tokenizer", "message"),
    [
        (Stop(frozenset({400})), None, "not in the model's vocabulary"),
        (Stop(strings=("",)), byte_level(), "empty stop string"),
        (Stop(strings=("x",)), None, "need a tokenizer"),
    ],
)
def test_impossible_stops_are_refused(stop: Stop, tokenizer: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StopTable(tokenizer, 400, torch.device("cpu")).index(stop)
