"""A tokenizer from merges of subword-nmt, against the algorithm written out naively."""

import gzip
import random

import pytest
from naive_bpe import WORDS, learn, segment
from transformers import AutoTokenizer

from hf_deepwide.data.bpe_codes import tokenizer_from_codes
from hf_deepwide.data.tokenizer import TokenizerArguments, load_or_train
from hf_deepwide.errors import UserError


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    merges = learn(WORDS, 15)
    path = tmp_path_factory.mktemp("codes") / "codes.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n")
    return path, merges


def test_segments_as_the_algorithm(codes):
    path, merges = codes
    tokenizer = tokenizer_from_codes(path, [" ".join(WORDS)])
    draw = random.Random(1)
    words = [*WORDS, *("".join(draw.choices("lowernidst", k=draw.randint(1, 9))) for _ in range(200))]
    for word in words:
        assert tokenizer.tokenize(word) == segment(word, merges), word
    sentence = " ".join(words)
    assert tokenizer(sentence)["input_ids"][-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer(sentence)["input_ids"], skip_special_tokens=True) == sentence
    assert tokenizer.tokenize("löw")[1] == "<unk>"


def test_a_recipe_names_the_codes(codes, tmp_path, monkeypatch):
    path, merges = codes
    monkeypatch.setenv("HF_DEEPWIDE_DATA", str(path.parent))
    load_or_train(TokenizerArguments(codes=path.name), WORDS).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.tokenize("lowest newest") == [*segment("lowest", merges), *segment("newest", merges)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "no file"),
        ("", "#version"),
        ("#version: 0.1\na b\n", "#version"),
        ("#version: 0.2\na b\na b c\n", "line 3"),
        ("#version: 0.2\nab\n", "line 2"),
    ],
)
def test_refuses_what_is_no_file_of_codes(tmp_path, text, word):
    if text is not None:
        (tmp_path / "codes").write_text(text)
    with pytest.raises(UserError, match=word):
        tokenizer_from_codes(tmp_path / "codes", WORDS)


def test_refuses_a_damaged_gzip_file(codes, tmp_path):
    content = bytearray(codes[0].read_bytes())
    content[len(content) // 2] ^= 0xFF
    for damaged in (content[:-12], content[:20] + b"\xff" * 40, content):
        (tmp_path / "codes.gz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"tokenizer\.codes: .*codes\.gz cannot be read"):
            tokenizer_from_codes(tmp_path / "codes.gz", ["text"])


def test_refuses_two_tokenizers_at_once():
    with pytest.raises(UserError, match="both set"):
        TokenizerArguments(path="here", codes="there")
