"""The tokenizer of a dictionary gives the ids that fairseq gives, by the algorithms written out naively."""

import random

import pytest
from naive_bpe import WORDS, learn, segment
from transformers import AutoTokenizer

from hf_deepwide.data.bpe_codes import read_codes
from hf_deepwide.data.fairseq_dictionary import read_dictionary, tokenizer_of_dictionary
from hf_deepwide.errors import UserError

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


def symbols_of(word, merges):
    """The pieces of a word as subword-nmt writes them: `@@` behind all but the last."""
    *pieces, last = segment(word, merges)
    return [*(f"{piece}@@" for piece in pieces), last.removesuffix("</w>")]


def fairseq_ids(text, symbols, merges):
    """The ids of `Dictionary.encode_line`: the position of each symbol, 3 for unknown symbols, and 2 at the end."""
    pieces = [piece for word in text.split() for piece in symbols_of(word, merges)]
    return [symbols.index(piece) if piece in symbols else 3 for piece in pieces] + [2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Codes, and a dictionary of the pieces that occur in the text. It lacks some pieces of the merges."""
    folder = tmp_path_factory.mktemp("fairseq")
    merges = learn(WORDS, 15)
    (folder / "codes").write_text("\n".join(["#version: 0.2", *map(" ".join, merges)]) + "\n", encoding="utf-8")
    (folder / "fast").write_text("".join(f"{a} {b} {90 - i}\n" for i, (a, b) in enumerate(merges)), encoding="utf-8")
    pieces = dict.fromkeys(piece for word in WORDS for piece in symbols_of(word, merges))
    lines = [*(f"{piece} {99 - i}" for i, piece in enumerate(pieces)), "madeupword0000 0", ""]
    (folder / "dict.en.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder, merges


@pytest.mark.parametrize("codes", ["codes", "fast"])
def test_gives_the_ids_of_fairseq(codes, files, tmp_path):
    folder, merges = files
    symbols = read_dictionary(folder / "dict.en.txt")
    assert symbols[:4] == SPECIAL
    assert read_codes(folder / codes) == merges
    tokenizer_of_dictionary(symbols, folder / codes).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    draw = random.Random(1)
    words = [*WORDS, *("".join(draw.choices("lowernidstü", k=draw.randint(1, 9))) for _ in range(300))]
    beyond = 0
    for word in words:
        ids = tokenizer(word)["input_ids"]
        beyond += any(i >= len(symbols) for i in ids)
        # pieces that the dictionary lacks have ids after its last id; fairseq gives them the id of the unknown token
        assert [3 if i >= len(symbols) else i for i in ids] == fairseq_ids(word, symbols, merges), word
    assert beyond
    text = " ".join(WORDS)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_without_codes_each_symbol_is_a_word(tmp_path):
    (tmp_path / "dict.txt").write_text("if 9\n( 7\nprint 5\n@@ 1\n", encoding="utf-8")
    tokenizer_of_dictionary(read_dictionary(tmp_path / "dict.txt")).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("print ( x @@")["input_ids"] == [6, 5, 3, 7, 2]
    assert tokenizer.decode([6, 5, 2], skip_special_tokens=True) == "print ("


def test_tokens_of_languages_stand_behind_the_dictionary(files):
    folder, _ = files
    symbols = read_dictionary(folder / "dict.en.txt", ["fr", "de"])
    assert symbols[-3:] == ["madeupword0000", "__de__", "__fr__"]
    tokenizer = tokenizer_of_dictionary(symbols, folder / "codes", ["fr", "de"])
    assert tokenizer.convert_tokens_to_ids("__fr__") == len(symbols) - 1
    assert {"__de__", "__fr__"} < set(tokenizer.all_special_tokens)


def test_a_symbol_that_overwrites_another_takes_the_newer_id(tmp_path):
    """As with `Dictionary.add_symbol(overwrite=True)`. Symbols that fairseq adds itself (`<unk>`) keep their id."""
    path = tmp_path / "dict.txt"
    path.write_text("a 3\nb 2\na 1 #fairseq:overwrite\n<unk> 1 #fairseq:overwrite\nc 1 #fairseq:overwrite\n")
    symbols = read_dictionary(path)
    tokenizer = tokenizer_of_dictionary(symbols)
    assert len(tokenizer) == len(symbols) == 9
    assert tokenizer("a b c x")["input_ids"] == [6, 5, 8, 3, 2]


def test_a_symbol_may_hold_another_end_of_line(tmp_path):
    (tmp_path / "dict.txt").write_text("a 9\nb\u2028c 1", encoding="utf-8")
    assert read_dictionary(tmp_path / "dict.txt") == [*SPECIAL, "a", "b\u2028c"]


def test_a_byte_order_mark_is_no_text(files, tmp_path):
    folder, _ = files
    for name in ("dict.en.txt", "codes"):
        (tmp_path / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert read_dictionary(tmp_path / "dict.en.txt") == read_dictionary(folder / "dict.en.txt")
    assert read_codes(tmp_path / "codes") == read_codes(folder / "codes")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "cannot be read"),
        ("a 1\nb\n", "line 2: 'b'; accepted: a symbol and its count"),
        ("a 1\n\nb 2\n", "line 2"),
        ("a 1\nb x\n", "line 2"),
        ("a 1\na 2\n", "'a' is there twice"),
        ("<s> 1\n", "'<s>' is there twice"),
    ],
)
def test_refuses_what_is_no_dictionary(tmp_path, text, word):
    if text is not None:
        (tmp_path / "dict.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=word):
        read_dictionary(tmp_path / "dict.txt")


@pytest.mark.parametrize("piece", ["lo@@", "▁low"])
def test_asks_for_the_codes_of_pieces(piece):
    with pytest.raises(UserError, match=f"'{piece}', a piece of a word"):
        tokenizer_of_dictionary([*SPECIAL, "x", piece])


def test_refuses_symbols_that_cannot_be_told_apart(files):
    with pytest.raises(UserError, match="become one piece"):
        tokenizer_of_dictionary([*SPECIAL, "x", "x</w>@@"], files[0] / "codes")
