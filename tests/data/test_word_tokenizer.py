"""Vocabularies of whole words: ranks, two sides, exact spaces, saving, and use without this package."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BartConfig

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.batches import TranslationCollator
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoded_cache import tokenizer_content
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.tokenizer import TokenizerArguments, check_tokenizer, load_or_train
from hf_deepwide.data.word_vocabulary import train_word_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.translate import as_line
from hf_deepwide.loading import load_tokenizer
from hf_deepwide.models.plain_text import TextEncoder
from hf_deepwide.models.word_tokenizer import WordTokenizer
from hf_deepwide.training.faults import texts

CODE = [
    "    if  x == '  ' :",
    "def f ( ) : DCNL DCSP return ½ ▁ </s>",
    " ",
    "  x\t= <unk> ",
    "Ünïcode\u3000stays , Case Stays \ufb01 x x",
]
WORDS = ["if the line is empty", "a function that returns the half", "the", "set x", "the words , the"]
ROWS = [{"source": source, "target": target} for source, target in zip(WORDS, CODE, strict=True)]


def arguments(**fields):
    return TokenizerArguments(**{"words": True, "min_frequency": 1, "normalization": "none", **fields})


@pytest.fixture(scope="module")
def tokenizer():
    return train_word_tokenizer(ROWS, arguments())


def test_vocabularies_hold_the_most_frequent_words_of_each_side():
    tokenizer = train_word_tokenizer(ROWS, arguments(vocab_size=9, target_vocab_size=7))
    counted = Counter(word for text in WORDS for word in text.split(" "))
    ranked = sorted(counted, key=lambda word: (-counted[word], word))
    assert tokenizer.source_words == ranked[:5]
    # counted by hand: many empty words, x three times; of the words that occur twice, ' sorts before :
    assert tokenizer.target_words == ["", "x", "'"]
    assert (len(tokenizer), tokenizer.target_vocab_size) == (9, 7)


def test_rare_words_are_unknown_and_stay_visible():
    tokenizer = train_word_tokenizer(ROWS, arguments(min_frequency=2))
    assert tokenizer.target_words == ["", "x", "'", ":"]
    assert tokenizer(text_target="x y :")["input_ids"] == [5, 3, 7, 2]
    assert tokenizer.decode([0, 5, 3, 7, 2, 1], skip_special_tokens=True) == "x <unk> :"


@pytest.mark.parametrize("text", CODE)
def test_code_survives_to_the_letter(tokenizer, text):
    ids = tokenizer(text_target=text)["input_ids"]
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert as_line(tokenizer, ids) == text


def test_each_side_has_its_own_ids(tokenizer):
    both = tokenizer("the x", text_target="x ▁")
    assert both["input_ids"] == [4, 4 + tokenizer.source_words.index("x"), 2]
    assert both["labels"] == [4 + tokenizer.target_words.index(word) for word in ("x", "▁")] + [2]
    assert tokenizer("the x")["input_ids"] == both["input_ids"]
    assert tokenizer("▁")["input_ids"] == [3, 2]


def test_sentences_of_a_batch_are_decoded_by_the_vocabulary_of_their_side(tokenizer):
    rows = [
        {"input_ids": tokenizer(source)["input_ids"], "labels": tokenizer(text_target=target)["input_ids"]}
        for source, target in (("the  words", "x ▁"), ("the unseen x", "x"))
    ]
    batch = TranslationCollator(tokenizer, 0)(rows)
    assert texts(batch, tokenizer) == [
        {"source": "the <unk> words", "target": "x ▁"},
        {"source": "the <unk> x", "target": "x"},
    ]


def test_encoder_of_texts_takes_the_right_side(tokenizer):
    sources, targets = TextEncoder(tokenizer), TextEncoder(tokenizer, target=True)
    assert sources(["the x"]) == [tokenizer("the x")["input_ids"]]
    assert targets(["x ▁ </s>"]) == [tokenizer(text_target="x ▁")["input_ids"][:-1] + targets(["</s>"])[0]]
    assert 2 not in targets(["</s>"])[0][:-1]


def test_a_failed_call_leaves_the_source_side(tokenizer):
    with pytest.raises(ValueError, match="text input"):
        tokenizer(text_target=1)
    assert tokenizer._encode_plus("the")["input_ids"] == [4, 2]


def test_batches_are_padded(tokenizer):
    batch = tokenizer(text_target=["x", "x x :"], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 4)
    assert batch["input_ids"][0].tolist()[1:] == [2, 1, 1]
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["x", "x x :"]


def test_form_of_the_text_is_an_option():
    rows = [{"source": "ﬁ A", "target": "½ B"}]
    tokenizer = train_word_tokenizer(rows, arguments(normalization="nfkc", lowercase=True))
    assert tokenizer.source_words == ["a", "fi"]
    assert tokenizer(text_target="½ B")["input_ids"] == [4, 5, 2]


def test_an_unknown_form_of_the_text_is_refused():
    with pytest.raises(ValueError, match="normalization is 'NFKC'; accepted: nfkc, nfc, none"):
        WordTokenizer(["a"], ["b"], normalization="NFKC")


def test_saved_tokenizer_loads_by_auto_class_as_ours(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert type(loaded) is WordTokenizer
        assert (loaded.source_words, loaded.target_words) == (tokenizer.source_words, tokenizer.target_words)
        assert loaded(WORDS, text_target=CODE).data == tokenizer(WORDS, text_target=CODE).data


def test_saved_tokenizer_needs_no_package(tokenizer, run_code, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    program = f"""
import json, sys
sys.modules["hf_deepwide"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
ids = tokenizer({WORDS!r}, text_target={CODE!r})
texts = [tokenizer.decode(labels, skip_special_tokens=True) for labels in ids["labels"]]
tokenizer.save_pretrained({str(tmp_path / "again")!r})
print(json.dumps([ids["input_ids"], texts]))
"""
    run = run_code(program)
    assert run.returncode == 0, run.stderr
    ids, texts = json.loads(run.stdout)
    assert ids == tokenizer(WORDS)["input_ids"]
    assert texts == CODE
    again = {file.name for file in (tmp_path / "again").iterdir()}
    assert {"vocab_source.json", "vocab_target.json", "word_tokenizer.py"} <= again


@pytest.mark.parametrize("content", ["{}", '["a", "a"]', "[1]", '["a b"]'])
def test_damaged_vocabularies_are_refused(tokenizer, tmp_path, content):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "vocab_target.json").write_text(content)
    with pytest.raises(UserError, match=r"vocab_target\.json must be a list of different words"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab_target.json").unlink()
    with pytest.raises(UserError, match=r"vocab_target\.json is missing"):
        load_tokenizer(tmp_path)


def test_cache_of_encoded_pairs_looks_at_both_vocabularies(tokenizer):
    other = WordTokenizer(tokenizer.source_words, tokenizer.target_words[::-1])
    assert tokenizer_content(other) != tokenizer_content(tokenizer)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"words": False, "target_vocab_size": 9}, ["target_vocab_size", "words: true"]),
        ({"target_vocab_size": 4}, ["target_vocab_size is 4"]),
        ({"split_digits": True}, ["split_digits"]),
        ({"bpe_dropout": 0.1}, ["bpe_dropout"]),
        ({"path": "somewhere"}, ["tokenizer.path"]),
        ({"codes": "somewhere"}, ["tokenizer.codes"]),
    ],
)
def test_contradicting_fields_are_refused(fields, words):
    with pytest.raises(UserError) as error:
        arguments(**fields)
    assert all(word in str(error.value) for word in words)


def test_text_without_frequent_words_is_refused():
    with pytest.raises(UserError, match="min_frequency is 20, and no source word"):
        train_word_tokenizer(ROWS, arguments(min_frequency=20))
    with pytest.raises(UserError, match=r"tokenizer\.words"):
        load_or_train(arguments(), ["a"])


def test_tokenizer_must_fit_both_sides_of_a_model(tokenizer):
    config = BartConfig(vocab_size=max(len(tokenizer), 30), pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    assert tokenizer.target_vocab_size <= 30
    check_tokenizer(tokenizer, config)
    config.decoder_vocab_size = tokenizer.target_vocab_size - 1
    with pytest.raises(UserError, match=f"{tokenizer.target_vocab_size} entries but the model's decoder_vocab_size"):
        check_tokenizer(tokenizer, config)


@pytest.mark.parametrize("form", ["text", "tsv", "jsonl"])
def test_code_survives_from_file_to_score(tmp_path, form):
    """Reading, encoding, decoding and scoring change no space, in any format. One line is one snippet."""
    lines = [text for text in CODE if text.strip()]
    pairs = list(zip(WORDS, lines, strict=False))
    if form == "tsv":
        lines = [line.replace("\t", " ") for line in lines]
        (tmp_path / "all.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(WORDS, lines, strict=False)))
    elif form == "jsonl":
        (tmp_path / "all.jsonl").write_text("".join(json.dumps({"nl": a, "py": b}) + "\n" for a, b in pairs))
    else:
        (tmp_path / "all.nl").write_text("".join(f"{a}\n" for a, _ in pairs))
        (tmp_path / "all.py").write_text("".join(f"{b}\n" for _, b in pairs))
    place = "all" if form == "text" else f"all.{form}"
    data = DataArguments(format=form, root=str(tmp_path), source_lang="nl", target_lang="py", train=place)
    texts = load_parallel(data, "train")
    assert texts["target"][:] == lines
    tokenizer = train_word_tokenizer(texts, arguments())
    labels = encode(texts, tokenizer, data, filter=False)["labels"][:]
    written = [as_line(tokenizer, ids) for ids in labels]
    assert written == lines
    long = [number for number, line in enumerate(lines) if len(line.split()) > 3]
    scores = score([written[n] for n in long], [lines[n] for n in long], metrics=["sentence_bleu4"])
    assert scores["sentence_bleu4"] == pytest.approx(100)


def test_line_ends_within_words_do_not_break_a_line():
    tokenizer = WordTokenizer(["a"], ["x\ny", "\u2028", "z\r"])
    assert as_line(tokenizer, [4, 5, 6, 2]) == "x y \u2028 z "


def test_file_is_the_one_that_travels():
    source = Path(sys.modules[WordTokenizer.__module__].__file__).read_text()
    assert "from ." not in source
