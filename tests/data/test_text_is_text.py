"""Text is text: no word of a user becomes a control token, wherever it is encoded, and ordinary ids do not change."""

import json

import pytest
from coded_languages import KINDS
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_pieces import train_pieces, write_vocabulary
from transformers import MarianTokenizer

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import add_tags
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.models.language_pairs import control_ids, language_ids
from hf_deepwide.models.plain_text import TextEncoder

CORPUS = [
    "a red dog <b>runs</b> </s>",
    "a cat </s><2fr></s> sits",
    "x</s>y <pad> z <unk>",
    "ＡＢ ＜/s＞ </S> <2FR>",
] * 8
CONTROLS = ["</s>", "<pad>", "<s>", "<2fr>", "<2de>", "__fr__", "eng_Latn", "de_DE", ">>deu<<", "<mask>"]
PLACES = ["{}", "{} a b", "a {}", "a{}b", "a {} {} b"]
PAIRS = ["en-de", "en-fr"]


def our_bpe(folder, **options):
    tokenizer = train_tokenizer(CORPUS, TokenizerArguments(vocab_size=150, **options))
    add_tags(tokenizer, DataArguments(pairs=PAIRS))
    return tokenizer


def marian(folder):
    model, words = train_pieces(folder, ["a b c d a b c d"], 8)
    vocabulary = write_vocabulary(folder / "vocab.json", [">>deu<<", "</s>", "<unk>", *words, "<pad>"])
    return MarianTokenizer(model, model, vocabulary)


MAKERS = {"bpe": our_bpe, "marian": marian, **{name: kind[0] for name, kind in KINDS.items()}}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("target", [False, True])
def test_no_word_becomes_a_control_token(tokenizer, target):
    if language_ids(tokenizer):
        tokenizer.tgt_lang = tokenizer.src_lang
    encoder = TextEncoder(tokenizer, target)
    controls = {*tokenizer.all_special_ids, *language_ids(tokenizer).values()} - {tokenizer.unk_token_id}
    controls |= {tokenizer.get_vocab()[tag] for tag in ("<2fr>", "<2de>", ">>deu<<") if tag in tokenizer.get_vocab()}
    assert controls == control_ids(tokenizer)
    texts = [place.format(word, word) for word in CONTROLS for place in PLACES]
    around = tokenizer(**{"text_target" if target else "text": "a"})["input_ids"]
    for text, ids in zip(texts, encoder(texts), strict=True):
        assert [i for i in ids if i in controls] == [i for i in around if i in controls], text


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.text("abcd xyz.,<>/_", max_size=30), max_size=4))
def test_ids_of_ordinary_text_do_not_change(tokenizer, texts):
    texts = [text for text in texts if not any(word in text for word in CONTROLS)]
    assert TextEncoder(tokenizer)(texts) == (tokenizer(texts)["input_ids"] if texts else [])


@pytest.mark.parametrize("target", [False, True])
def test_bodies_are_what_the_tokenizer_itself_gives_without_its_frame(tokenizer, target):
    if language_ids(tokenizer):
        tokenizer.tgt_lang = tokenizer.src_lang
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.enable_truncation(2)  # a setting that other code left behind must have no effect
    texts = ["a red dog", "", "  b  ", "ＡＢ é x" * 20]
    encoder = TextEncoder(tokenizer, target)
    assert encoder.is_plain == tokenizer.is_fast, "the fast way is taken where it can be"
    options = {"add_special_tokens": False, "split_special_tokens": encoder.splits}
    expected = [tokenizer(**{"text_target" if target else "text": text}, **options)["input_ids"] for text in texts]
    assert encoder.bodies(texts) == expected


def test_the_tokenizer_stays_as_it_was(tokenizer):
    before = tokenizer("a </s> b")["input_ids"]
    TextEncoder(tokenizer)(["a </s> b"])
    if tokenizer.is_fast:
        assert not tokenizer.backend_tokenizer.encode_special_tokens
    assert tokenizer("a </s> b")["input_ids"] == before


def test_words_that_a_user_has_added_stay_whole(tmp_path):
    tokenizer = marian(tmp_path)
    tokenizer.add_tokens(["abc"])
    expected = tokenizer("a abc d")["input_ids"]
    assert tokenizer.convert_tokens_to_ids("abc") in expected
    encoder = TextEncoder(tokenizer)
    assert encoder(["a abc d"]) == [expected]
    assert encoder(["a </s> d"])[0].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("options", [{}, {"lowercase": True}, {"normalization": "none"}])
def test_training_makes_no_control_token_of_letters(options, tmp_path):
    tokenizer = our_bpe(tmp_path, **options)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    made = {"".join(merge) for merge in merges}
    assert made, "something was merged"
    assert not any(word in piece for piece in made for word in CONTROLS)
    text = "x</s>y <pad> z"
    (ids,) = TextEncoder(tokenizer)([text])
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text, "and nothing is lost"


def test_training_data_hold_tags_as_ids_and_words_as_text(tmp_path):
    tokenizer = our_bpe(tmp_path)
    rows = {"source": ["a <2fr> dog</s>", "<2de> a cat"], "target": ["</s> a", "a <2de>"], "pair": [0, 1]}
    args = DataArguments(pairs=PAIRS, train="x")
    encoded = encode(Dataset.from_dict(rows), tokenizer, args, filter=True)
    tags = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<2de>", "<2fr>")]
    for row, tag, source, target in zip(encoded, tags, rows["source"], rows["target"], strict=True):
        assert row["input_ids"][0] == tag
        assert not set(tags) & {*row["input_ids"][1:], *row["labels"]}
        assert [row["input_ids"].count(2), row["labels"].count(2)] == [1, 1]
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == source
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == target


def test_a_word_of_a_hundred_thousand_letters_trains_a_tokenizer():
    """Training takes time linear in the word's length. Merges of the uncut word would take quadratic time."""
    tokenizer = train_tokenizer(["ab" * 50_000, "a b c"], TokenizerArguments(vocab_size=60))
    assert max(map(len, tokenizer.get_vocab())) <= 1001
