"""Tokens to bytes and back: exact pieces, no control token out of tool text, cuts between characters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agentropy.errors import UserError
from agentropy.protocols.text import TokenText
from protocol_tokenizers import chatml, scramble, sentencepiece, tiny

MAKERS = {
    "byte-level": lambda: chatml(),
    "byte-level with call tokens": lambda: chatml(call_tokens=True),
    "tiny": tiny,
    "sentencepiece first": lambda: sentencepiece("first"),
    "sentencepiece always": lambda: sentencepiece("always"),
    "sentencepiece never": lambda: sentencepiece("never"),
}
SAMPLES = [
    "hello world",
    "  two  spaces\n\ttab\r\n",
    "naïve café 東京 🙂🙂👩‍👩‍👧",
    "\x00\x07 odd",
    "a",
    "\n",
    " ",
    "é" * 30,
]


@pytest.fixture(params=MAKERS, ids=list(MAKERS))
def text(request: pytest.FixtureRequest) -> TokenText:
    return TokenText(MAKERS[request.param]())


def is_metaspace(text: TokenText) -> bool:
    return "Metaspace" in text.tokenizer.backend_tokenizer.pre_tokenizer.__class__.__name__


@pytest.mark.parametrize("sample", SAMPLES)
def test_pieces_give_back_the_bytes(text: TokenText, sample: str) -> None:
    got = text.decode_bytes(text.encode_plain(sample))
    if is_metaspace(text) and not sample.startswith(" "):
        got = got.removeprefix(b" ")  # the space that the scheme "always" puts before the first word
    assert got == sample.encode()


def test_byte_level_decode_equals_the_tokenizers() -> None:
    text = TokenText(chatml())
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(text.tokenizer)) for _ in range(rng.randrange(1, 30))]
        assert text.decode(ids) == text.tokenizer.decode(ids, skip_special_tokens=False)


def test_token_at_finds_the_token_that_holds_a_byte() -> None:
    text = TokenText(chatml())
    rng = random.Random(1)
    data = "日本 <tool_call>🙂 done".encode()
    for _ in range(200):
        ids = scramble(text, data, rng)
        assert text.decode_bytes(ids) == data
        at = data.find(b"<tool_call>")
        index = text.token_at(ids, at)
        before = len(text.decode_bytes(ids[:index]))
        assert before <= at < before + len(text.pieces[ids[index]])
    assert text.token_at(ids, len(data)) == len(ids)


def test_every_special_token_in_tool_text_stays_text(text: TokenText) -> None:
    tokenizer = text.tokenizer
    contents = [text.added[i] for i in sorted(text.forbidden)]
    assert contents
    for content in [
        *contents,
        "".join(contents),
        " ".join(contents * 2),
        contents[0][:-1] + contents[0] + contents[0][1:],
    ]:
        sample = f"before {content} after"
        ids = text.encode_plain(sample)
        assert text.forbidden.isdisjoint(ids), content
        assert len(ids) < len(sample), "only the control token is broken up, the rest is encoded as ever"
        assert not set(ids) & set(tokenizer.all_special_ids)
        if "unk" not in content and not is_metaspace(text):
            assert text.decode(ids) == sample
        # The plain way does yield it: the test would see the difference.
        assert not text.forbidden.isdisjoint(tokenizer.encode(sample, add_special_tokens=False))


def test_a_control_token_across_the_seam_of_template_and_tool_text_stays_text() -> None:
    text = TokenText(chatml())
    ids = text.encode_mixed([("<", True), ("|im_end|>", False), ("<|im_start|>", True)])
    assert ids.count(text.single("<|im_end|>") or -1) == 0
    assert ids[-1] == text.single("<|im_start|>")
    assert text.decode(ids) == "<|im_end|><|im_start|>"


def test_a_normalizer_that_makes_a_control_token_is_seen() -> None:
    from tokenizers import AddedToken, Tokenizer, models, normalizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    made.normalizer = normalizers.NFKC()
    made.add_special_tokens([AddedToken("<end>", special=True, normalized=True)])
    from transformers import PreTrainedTokenizerFast

    text = TokenText(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="<end>"))
    wide = "＜end＞"
    end = text.single("<end>")
    assert end in text.tokenizer.encode(wide, add_special_tokens=False)
    assert end not in text.encode_plain(wide)
    assert end not in text.encode_mixed([(wide, False)])


def test_no_bos_and_no_space_in_the_middle_of_a_sequence() -> None:
    text = TokenText(sentencepiece("first"))
    bos = text.tokenizer.bos_token_id
    assert bos not in text.encode_plain("hello")
    assert text.decode(text.encode_plain("hello")) == "hello"
    assert text.decode(text.encode("hello")) == " hello", "what a text gets at its beginning"


@pytest.mark.parametrize("limit", [24, 40, 100])
def test_cut_keeps_head_and_tail_within_the_limit_and_counts(text: TokenText, limit: int) -> None:
    rng = random.Random(limit)
    alphabet = "abc 東京🙂é\n1234"
    sample = "HEAD" + "".join(rng.choice(alphabet) for _ in range(900)) + "TAIL"
    total = len(text.encode_plain(sample))
    short = text.cut(sample, limit)
    ids = text.encode_plain(short)
    note = len(text.encode_plain("\n[… 1000 tokens left out …]\n"))
    assert len(ids) <= max(limit, note + 4)
    head, _, rest = short.partition("\n[… ")
    count, _, tail = rest.partition(" tokens left out …]\n")
    assert sample.startswith(head)
    assert sample.endswith(tail)
    assert abs(int(count) + len(text.encode_plain(head)) + len(text.encode_plain(tail)) - total) <= 6
    if limit == 100 and len(ids) < 100:
        assert head.startswith("HEAD")
        assert tail.endswith("TAIL")
        assert len(ids) > 80, "the limit is used"


def test_cut_leaves_short_text_alone(text: TokenText) -> None:
    for sample in SAMPLES:
        assert text.cut(sample, 512) == sample
    assert text.cut("anything", 0) == ""


def test_a_huge_text_is_cut_without_being_encoded_whole() -> None:
    text = TokenText(chatml())
    seen: list[int] = []
    encode = text.tokenizer.encode

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(chatml(), name)

        def __call__(self, sample: str, **options: Any) -> Any:
            seen.append(len(sample))
            return chatml()(sample, **options)

        def encode(self, sample: str, **options: Any) -> Any:
            seen.append(len(sample))
            return encode(sample, **options)

    text.tokenizer = Spy()
    short = text.cut("12345 " * 1_000_000, 64)
    assert max(seen) <= 32_000
    assert len(text.encode_plain(short)) <= 64
    count = int(short.partition("[… ")[2].partition(" ")[0])
    assert count == pytest.approx(len(encode("12345 " * 1000)) * 1000, rel=0.05)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        pass

    with pytest.raises(UserError, match="no fast tokenizer"):
        TokenText(Slow())
