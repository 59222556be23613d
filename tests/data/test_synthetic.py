"""Synthetic training pairs: read beside the real ones, marked by a tag that text cannot forge, seen at a rate."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.batches import TokenBatchSampler
from hf_deepwide.data.bpe_dropout import BPEDropout
from hf_deepwide.data.corpora import load_parallel, local_files
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import add_tags, synthetic_tag_id
from hf_deepwide.data.sampling import copies_by_rate
from hf_deepwide.data.tokenizer import TokenizerArguments, load_or_train, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.models.language_pairs import Languages
from hf_deepwide.models.plain_text import TextEncoder

REAL = [("a dog", "ein Hund"), ("a cat", "eine Katze"), ("<bt> two dogs", "zwei <bt> Hunde")]
MADE = [("one dog", "ein Hund"), ("that <bt> cat", "diese Katze")]
NO_TAGS = ("bt", "<b t>", "<>", "", "<2de>", "</s>", "<s>", "<pad>", "<unk>", "<mask>", "<a><b>", "<bt>\n")
FORGED = ["<bt><bt>", "<bt> dog", "x<bt>y"] * 20


@pytest.fixture
def args(tmp_path) -> DataArguments:
    """Arguments with two file prefixes, for real and synthetic pairs, and a tag."""
    for name, pairs in (("train", REAL), ("bt", MADE)):
        for side, language in enumerate(("en", "de")):
            lines = "".join(f"{pair[side]}\n" for pair in pairs)
            (tmp_path / f"{name}.{language}").write_text(lines, encoding="utf-8")
    return DataArguments(root=str(tmp_path), train="train", synthetic="bt", synthetic_tag="<bt>")


def make_tokenizer(args: DataArguments):
    """Return a tokenizer that is trained on texts full of the tag."""
    texts = [text for pair in REAL + MADE for text in pair] + FORGED
    tokenizer = load_or_train(TokenizerArguments(vocab_size=80), texts, tag=args.synthetic_tag)
    assert add_tags(tokenizer, args) == 1
    assert add_tags(tokenizer, args) == 0, "a run that is resumed finds it there"
    return tokenizer


def test_synthetic_pairs_follow_the_real_ones(args):
    rows = load_parallel(args, "train")
    assert list(zip(rows["source"], rows["target"], strict=True)) == REAL + MADE
    assert rows["synthetic"][:] == [0, 0, 0, 1, 1]
    assert [path.name for path in local_files(args, "train")] == ["train.en", "train.de", "bt.en", "bt.de"]


@pytest.mark.parametrize("tag", ["<bt>", None])
def test_the_tag_is_an_id_before_synthetic_sources_and_text_everywhere_else(tag, args):
    tokenizer = make_tokenizer(DataArguments(synthetic="x", synthetic_tag="<bt>"))
    args.synthetic_tag = tag
    encoded = encode(load_parallel(args, "train"), tokenizer, args, filter=True)
    mark = tokenizer.convert_tokens_to_ids("<bt>")
    for row, (source, target) in zip(encoded, REAL + MADE, strict=True):
        marked = [mark] if row["synthetic"] and tag else []
        assert row["input_ids"] == [*marked, *TextEncoder(tokenizer)([source])[0]]
        assert row["source_length"] == len(row["input_ids"])
        assert mark not in row["input_ids"][len(marked) :] + row["labels"]
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == source
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == target
    assert encoded["synthetic"][:] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("kind", ["prefix", "tag"])
def test_synthetic_sources_have_the_marks_of_their_language_too(kind, args):
    """T5's prefix follows the tag of synthetic pairs. Marian's tag excludes it, as there is no place for two tags."""
    tokenizer, text = make_tokenizer(args), "a dog " if kind == "prefix" else ""
    if kind == "tag":
        tokenizer.add_special_tokens({"extra_special_tokens": [">>de<<"]}, replace_extra_special_tokens=False)
    tasks = {"task_specific_params": {"translation_en_to_de": {"prefix": text}}} if text else {}
    languages = Languages(SimpleNamespace(**tasks), None, tokenizer)
    rows = load_parallel(args, "train")
    if kind == "tag":
        with pytest.raises(UserError, match=r"leave data\.synthetic_tag out"):
            encode(rows, tokenizer, args, filter=True, languages=languages)
        args.synthetic_tag = None
    encoded = encode(rows, tokenizer, args, filter=True, languages=languages)
    for row, (source, _) in zip(encoded, REAL + MADE, strict=True):
        marks = [">>de<<"] if kind == "tag" else ["<bt>"] * row["synthetic"]
        before = tokenizer.convert_tokens_to_ids(marks)
        assert row["input_ids"] == [*before, *TextEncoder(tokenizer)([text + source])[0]]


def test_validation_has_no_tag(args):
    rows = Dataset.from_dict({"source": ["a dog"], "target": ["ein Hund"]})
    encoded = encode(rows, make_tokenizer(args), args, filter=False)
    assert encoded.column_names == ["input_ids", "labels", "source_length", "target_length"]
    assert encoded[0]["input_ids"] == TextEncoder(make_tokenizer(args))(["a dog"])[0]


def test_bpe_dropout_leaves_the_tag_whole(args):
    tokenizer = make_tokenizer(args)
    encoded = encode(load_parallel(args, "train"), tokenizer, args, filter=True)
    dropout, mark = BPEDropout(tokenizer, 1.0), tokenizer.convert_tokens_to_ids("<bt>")
    for row in encoded:
        assert dropout(row["input_ids"], random.Random(0)).count(mark) == row["synthetic"]


@pytest.mark.parametrize("rate", [0.01, 0.4, 2 / 3, 1.0, 2.5, 30.0])
def test_pairs_are_seen_at_the_rate_and_none_is_left_out(rate):
    """Sample 60 real and 40 synthetic pairs for ten epochs."""
    synthetic = [int(row % 5 < 2) for row in range(100)]
    lengths = [1 + row % 3 for row in range(100)]
    sampler = TokenBatchSampler(lengths, lengths, 30, seed=1, copies=copies_by_rate(synthetic, rate))
    seen: Counter[int] = Counter()
    epochs = []
    for epoch in range(10):
        sampler.set_epoch(epoch)
        epochs.append([row for batch in sampler for row in batch])
        seen.update(epochs[-1])
        assert set(epochs[-1]) == set(range(100))
    made = sum(count for row, count in seen.items() if synthetic[row])
    real = seen.total() - made
    assert min(real / 600, made / 400) == 1, "one kind is seen once an epoch"
    assert made / real == pytest.approx(rate, rel=0.02)
    sampler.set_epoch(3)
    assert [row for batch in sampler for row in batch] == epochs[3]
    assert epochs[3] != epochs[4]


def test_a_kind_of_which_nothing_is_left_has_no_rate():
    with pytest.raises(UserError, match="3 real and 0 synthetic pairs are left"):
        copies_by_rate([0, 0, 0], 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic": None}, "synthetic_tag is '<bt>' but there are no synthetic pairs: set data.synthetic"),
        ({"synthetic": None, "synthetic_tag": None, "synthetic_rate": 2.0}, "synthetic_rate is 2.0 but there are no"),
        ({"format": "phrases", "train": None}, "data.synthetic is 'bt', and the format phrases does not read it"),
        ({"pairs": ["en-de"]}, "data.synthetic: accepted with one language pair; leave out data.pairs"),
        ({"streaming": True}, "data.synthetic: streams have no size"),
        ({"synthetic": "train"}, "data.synthetic and data.train are both 'train'"),
        ({"synthetic_rate": 0.0}, "data.synthetic_rate is 0.0; accepted: 0.001 or more"),
        ({"synthetic_rate": 1e9}, "accepted: 0.001 or more, and 1,000 at most"),
        *(
            ({"synthetic_tag": tag}, "accepted: a word in angle brackets that is no control token and no language's")
            for tag in NO_TAGS
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options, message):
    given = {"train": "train", "synthetic": "bt", "synthetic_tag": "<bt>", **options}
    with pytest.raises(UserError, match=message):
        DataArguments(**given)


def test_a_tag_that_the_tokenizer_makes_of_text_is_refused(args):
    tokenizer = train_tokenizer(["bt"] * 9 + FORGED, TokenizerArguments(vocab_size=80))
    assert "<bt>" in tokenizer.get_vocab()
    with pytest.raises(UserError, match="<bt> is a piece of text for the tokenizer; choose another tag"):
        add_tags(tokenizer, args)


def test_a_tag_with_another_meaning_is_refused(args):
    tokenizer = make_tokenizer(args)
    tokenizer.sep_token = "<bt>"
    with pytest.raises(UserError, match="<bt> has another meaning for the tokenizer"):
        synthetic_tag_id(tokenizer, args)


def test_a_tokenizer_without_the_tag_is_refused(args):
    tokenizer = train_tokenizer(["a b c"], TokenizerArguments(vocab_size=20))
    with pytest.raises(UserError, match="the tokenizer has no token <bt>"):
        encode(load_parallel(args, "train"), tokenizer, args, filter=True)


def test_a_tokenizer_without_a_tag_is_trained_as_ever():
    plain, tagged = (train_tokenizer(FORGED, TokenizerArguments(vocab_size=80), tag) for tag in (None, "<bt>"))
    assert "<bt>" in plain.get_vocab()
    assert "<bt>" not in tagged.get_vocab()


def test_a_missing_file_is_named(args):
    Path(args.root, "bt.en").unlink()
    with pytest.raises(UserError, match=r"no file .*bt\.en or bt\.en\.gz"):
        load_parallel(args, "train")


def test_synthetic_pairs_that_the_length_filters_leave_out_are_missed(args):
    """The length filters raise the error, even without `synthetic_rate`."""
    tokenizer = make_tokenizer(args)
    for language in ("en", "de"):
        (Path(args.root) / f"bt.{language}").write_text("one dog and a cat " * 90 + "\n", encoding="utf-8")
    args.max_length = 60
    with pytest.raises(UserError, match=r"data\.synthetic: none of its 1 training pairs passes the length filters"):
        encode(load_parallel(args, "train"), tokenizer, args, filter=True)
