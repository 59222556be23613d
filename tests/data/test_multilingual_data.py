"""Several language pairs in one run, as data: arguments, loading, tags, what batches hold, temperature sampling."""

import logging
from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.batches import TokenBatchSampler, TranslationCollator
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.languages import add_tags, translation_pairs
from hf_deepwide.data.sampling import Repeats, copies_by_temperature
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer, training_texts
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.scoring import by_pair

LINES = {"en": ["a dog", "two dogs run", "a red coat"], "de": ["ein Hund", "zwei Hunde rennen", "ein roter Mantel"]}
LINES["fr"] = ["un chien", "deux chiens courent", "un manteau rouge"]
PAIRS = ["en-de", "en-fr"]


@pytest.fixture
def corpus(tmp_path):
    """A text file `all` for each language, and for each pair a folder with a text file `text` for each side."""
    for language, lines in LINES.items():
        (tmp_path / f"all.{language}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    for pair, count in (("en-de", 3), ("en-fr", 1)):
        (tmp_path / pair).mkdir()
        for language in pair.split("-"):
            text = "".join(line + "\n" for line in LINES[language][:count])
            (tmp_path / pair / f"text.{language}").write_text(text, encoding="utf-8")
    return tmp_path


def arguments(corpus, **fields) -> DataArguments:
    return DataArguments(**{"root": str(corpus), "pairs": PAIRS, "train": "all", **fields})


def test_a_tsv_file_of_several_pairs_names_its_columns(tmp_path):
    """Without names, one of two directions would have its sides swapped."""
    args = DataArguments(format="tsv", root=str(tmp_path), pairs=["en-de", "de-en"], train="all.tsv")
    rows = "".join(f"{source}\t{target}\n" for source, target in zip(LINES["en"], LINES["de"], strict=True))
    told = r"all\.tsv, line 1: .* does not name the columns \['de', 'en'\]; 2 language"
    for header in ("", "english\tdeutsch\n"):
        (tmp_path / "all.tsv").write_text(header + rows, encoding="utf-8")
        with pytest.raises(UserError, match=told):
            load_parallel(args, "train")
    (tmp_path / "all.tsv").write_text("en\tde\n" + rows, encoding="utf-8")
    found = load_parallel(args, "train")
    assert found["source"][:] == [*LINES["en"], *LINES["de"]]
    assert found["target"][:] == [*LINES["de"], *LINES["en"]]


@pytest.fixture
def tokenizer():
    texts = [line for lines in LINES.values() for line in lines] * 3
    return train_tokenizer(texts, TokenizerArguments(vocab_size=90))


def test_pairs_follow_one_another(corpus):
    rows = list(load_parallel(arguments(corpus), "train"))
    assert [(row["source"], row["target"], row["pair"]) for row in rows] == [
        *((source, target, 0) for source, target in zip(LINES["en"], LINES["de"], strict=True)),
        *((source, target, 1) for source, target in zip(LINES["en"], LINES["fr"], strict=True)),
    ]


def test_reads_each_pair_from_its_own_place(corpus):
    rows = load_parallel(arguments(corpus, train="{source_lang}-{target_lang}/text"), "train")
    assert rows["pair"][:] == [0, 0, 0, 1]
    assert rows["target"][:] == [*LINES["de"], LINES["fr"][0]]
    one = arguments(corpus, train="{pair}/text").for_pair("en-fr")
    assert (one.train, one.source_lang, one.target_lang, one.pairs) == ("en-fr/text", "en", "fr", None)
    (corpus / "en-fr" / "text.fr").unlink()
    with pytest.raises(UserError, match=r"en-fr.text\.fr"):
        load_parallel(arguments(corpus, train="{pair}/text"), "train")


def test_one_corpus_may_serve_both_directions(corpus):
    args = arguments(corpus, pairs=["en-de", "de-en", "en-fr"], train="{sorted_pair}/text", test="{sorted_pair}/text")
    (corpus / "en-de").rename(corpus / "de-en")
    rows = load_parallel(args, "train")
    assert rows["pair"][:] == [0, 0, 0, 1, 1, 1, 2]
    assert rows["source"][:] == [*LINES["en"], *LINES["de"], LINES["en"][0]]


def test_pairs_without_a_test_set_are_trained_on_alone(corpus):
    args = arguments(corpus, train="{pair}/text", test="{pair}/text", train_only_pairs=["en-de"])
    assert load_parallel(args, "train")["pair"][:] == [0, 0, 0, 1]
    test = load_parallel(args, "test")
    assert test["pair"][:] == [1], "still the index in data.pairs"
    assert {pair: rows["target"][:] for pair, rows in by_pair(test, args).items()} == {"en-fr": [LINES["fr"][0]]}
    assert args.evaluated_pairs == ["en-fr"]


def test_streams_take_turns_in_training_alone(tmp_path):
    for pair, count in (("en-de", 3), ("en-fr", 1)):
        source, target = pair.split("-")
        rows = {"en": LINES[source][:count], target: LINES[target][:count]}
        for split in ("train", "test"):
            Dataset.from_dict(rows).to_json(tmp_path / pair / f"{split}.jsonl")
    args = DataArguments(
        format="datasets", name=str(tmp_path / "{pair}"), streaming=True, pairs=PAIRS, train="train", test="test",
        sampling_temperature=float("inf"),
    )  # fmt: skip
    train, test = load_parallel(args, "train"), load_parallel(args, "test")
    assert isinstance(train, IterableDataset)
    assert [(row["pair"], row["source"]) for row in train] == [
        (0, "a dog"), (1, "a dog"), (0, "two dogs run"), (1, "a dog"), (0, "a red coat"),
    ]  # fmt: skip
    assert [row["pair"] for row in test] == [0, 0, 0, 1], "of a test set nothing is repeated"


@pytest.mark.parametrize("side", ["source", "decoder"])
def test_tags_and_posteriors_in_a_batch(side, corpus, tokenizer):
    args = arguments(corpus, language_tag=side, posteriors="target")
    size, plain = len(tokenizer), {text: tokenizer(text)["input_ids"] for lines in LINES.values() for text in lines}
    assert add_tags(tokenizer, args) == 2
    assert add_tags(tokenizer, args) == 0, "they are there already"
    encoded = encode(load_parallel(args, "train"), tokenizer, args, filter=True)
    rows = [encoded[1], encoded[4]]  # "two dogs run" into German and French
    batch = TranslationCollator(tokenizer, decoder_start_token_id=2, pad_to_multiple_of=1)(rows)
    for number, (tag, target) in enumerate(((size, "zwei Hunde rennen"), (size + 1, "deux chiens courent"))):
        source = plain["two dogs run"]
        expected = [tag, *source] if side == "source" else source
        assert batch["input_ids"][number].tolist()[: len(expected)] == expected
        assert rows[number]["source_length"] == len(expected)
        start = tag if side == "decoder" else 2
        labels = plain[target]
        assert batch["labels"][number].tolist()[: len(labels)] == labels
        assert batch["decoder_input_ids"][number].tolist()[: len(labels)] == [start, *labels[:-1]]
    assert batch["posteriors"].tolist() == [0, 1]
    settings = {"source": {"tag": "<2fr>"}, "decoder": {"decoder_start_token_id": size + 1}}[side]
    assert translation_pairs(args, tokenizer)["en-fr"] == {**settings, "posterior": 1}
    assert tokenizer.decode([size, *plain["ein Hund"]], skip_special_tokens=True) == "ein Hund"


def test_without_tags_or_posteriors_a_batch_is_as_ever(corpus, tokenizer):
    many = arguments(corpus, pairs=["de-en", "fr-en"], language_tag="none")
    assert add_tags(tokenizer, many) == 0
    encoded = encode(load_parallel(many, "train"), tokenizer, many, filter=True)
    batch = TranslationCollator(tokenizer, 2)([encoded[0], encoded[3]])
    assert set(batch) == {"input_ids", "attention_mask", "labels", "decoder_input_ids"}
    assert batch["decoder_input_ids"][:, 0].tolist() == [2, 2]
    assert translation_pairs(many, tokenizer) == {"de-en": {}, "fr-en": {}}
    one = DataArguments(root=str(corpus), train="all")
    assert encode(load_parallel(one, "train"), tokenizer, one, filter=True).column_names == [
        "input_ids", "labels", "source_length", "target_length"
    ]  # fmt: skip


def test_a_missing_tag_is_named(corpus, tokenizer):
    args = arguments(corpus)
    with pytest.raises(UserError, match="no token <2de>"):
        encode(load_parallel(args, "train"), tokenizer, args, filter=True)


@pytest.mark.parametrize(
    ("by", "names", "indices"),
    [
        ("target", ["de", "en"], [0, 1, 0]),
        ("source", ["en", "fr"], [0, 1, 1]),
        ("pair", ["en-de", "fr-en", "fr-de"], [0, 1, 2]),
        ("none", [], [None, None, None]),
    ],
)
def test_posteriors_are_of_languages_or_pairs(by, names, indices, tokenizer):
    args = DataArguments(pairs=["en-de", "fr-en", "fr-de"], posteriors=by)
    add_tags(tokenizer, args)
    assert args.posterior_names == names
    assert [pair.get("posterior") for pair in translation_pairs(args, tokenizer).values()] == indices


def test_the_tokenizer_sees_a_shared_side_once(corpus):
    texts = list(training_texts(load_parallel(arguments(corpus), "train")))
    assert sorted(texts) == sorted([*LINES["en"], *LINES["de"], *LINES["fr"]])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pairs": []}, ["data.pairs is empty", "en-de"]),
        ({"pairs": ["ende"]}, ["'ende'", "en-de"]),
        ({"pairs": ["eng_Latn-eng_Latn"]}, ["'eng_Latn-eng_Latn'", "one language twice"]),
        ({"pairs": ["en-de", "en-de"]}, ["'en-de' is named twice"]),
        ({"pairs": ["en-de"], "source_lang": "en"}, ["data.source_lang"]),
        ({"pairs": PAIRS, "language_tag": "none"}, ["data.language_tag is none", "source, decoder"]),
        ({"pairs": PAIRS, "language_tag": "both"}, ["'both'", "source, decoder, none"]),
        ({"pairs": PAIRS, "posteriors": "targets"}, ["'targets'", "target, source, pair, none"]),
        ({"pairs": PAIRS, "sampling_temperature": 0.5}, ["0.5", "1 or more"]),
        ({"pairs": PAIRS, "train": "{lang}/x"}, ["data.train", "{lang}", "{pair}, {source_lang}, {target_lang}"]),
        ({"pairs": PAIRS, "train_only_pairs": ["en-cs"]}, ["data.train_only_pairs", "'en-cs'", "data.pairs"]),
        ({"pairs": PAIRS, "train_only_pairs": PAIRS}, ["data.train_only_pairs", "all of data.pairs"]),
        ({"train_only_pairs": ["en-de"]}, ["data.train_only_pairs", "data.pairs"]),
        ({"posteriors": "target"}, ["data.posteriors", "data.pairs"]),
        ({"sampling_temperature": 2.0}, ["data.sampling_temperature", "data.pairs"]),
        (
            {"pairs": PAIRS, "format": "datasets", "name": "x", "streaming": True},
            ["data.streaming", "sampling_temperature .inf"],
        ),
    ],
)
def test_names_what_is_wrong(fields, words):
    with pytest.raises(UserError) as error:
        DataArguments(**fields)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("temperature", [1.0, 1.5, 5.0, float("inf")])
def test_an_epoch_has_the_proportions_of_the_temperature(temperature):
    """p_i ~ n_i^(1/T). Each sentence occurs at least once, and each epoch repeats other sentences."""
    random = np.random.default_rng(7)
    sizes = [1500, 400, 90]
    pair = np.repeat([0, 1, 2], sizes)
    lengths = random.integers(1, 50, (2, len(pair)))
    sampler = TokenBatchSampler(
        *lengths, 1024, seed=3, batch_multiple=4, copies=copies_by_temperature(pair, temperature)
    )
    wanted = np.array(sizes) ** (1 / temperature)
    wanted = wanted / wanted[0] * sizes[0]  # sentences of the largest pair occur once
    epochs = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert len(batches) % 4 == 0
        for batch in batches:
            assert len(batch) * (-(-lengths[:, batch].max() // 8) * 8) <= 1024
        seen = Counter(row for batch in batches for row in batch)
        times = np.array([seen[row] for row in range(len(pair))])
        assert np.bincount(pair, times) == pytest.approx(wanted, abs=0.5)
        for index in range(3):
            assert times[pair == index].min() >= 1
            assert np.ptp(times[pair == index]) <= 1
        epochs.append((batches, times))
    (first, once), (second, again) = epochs
    assert first != second
    assert (once == again).all() == (temperature == 1)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert sorted(map(len, second)) == sorted(map(len, first)), "shapes stay"


@pytest.mark.parametrize("options", [{"length_multiple": 1}, {"length_multiple": 2}, {"batch_by": "real"}])
def test_copies_of_a_sentence_are_in_many_batches(options):
    """Each copy must be in another update. With finely counted lengths, copies would share batches."""
    random = np.random.default_rng(7)
    pair = np.repeat([0, 1], [5000, 150])
    lengths = np.clip(random.lognormal(2.8, 0.6, (2, len(pair))), 2, 90).astype(int)
    copies = copies_by_temperature(pair, 5.0)
    sampler = TokenBatchSampler(*lengths, 1024, seed=3, copies=copies, **options)
    batches = [set(batch) for batch in sampler]
    if "batch_by" in options:
        assert all(lengths[:, batch].sum(axis=1).max() <= 1024 for batch in sampler)
    else:
        assert all(len(batch) * lengths[:, batch].max() <= 1024 for batch in sampler)
    spread = [sum(row in batch for batch in batches) for row in range(5000, 5150)]
    assert np.mean(spread) > copies[-1] / 3 > 5


def test_the_longest_pair_fits_though_its_length_counts_for_more():
    """With copies, lengths are rounded up to multiples of 8, but 9 tokens do not count as 16: they fit into 9."""
    sampler = TokenBatchSampler([9, 3], [8, 3], 9, seed=3, length_multiple=1, copies=[2.0, 1.0])
    assert sorted(map(tuple, sampler)) == [(0,), (0,), (1,)]


def test_copies_of_one_show_each_sentence_once():
    lengths = np.random.default_rng(7).integers(1, 50, (2, 300))
    plain = TokenBatchSampler(*lengths, 512, seed=3)
    ones = TokenBatchSampler(*lengths, 512, seed=3, copies=[1.0] * 300)
    for sampler in (plain, ones):
        sampler.set_epoch(2)
    assert sorted(map(len, plain)) == sorted(map(len, ones))
    assert sorted(row for batch in ones for row in batch) == list(range(300))


def test_repeats_of_four_sentences():
    """The example in the docstring of `Repeats`. A fifth sentence of another shape keeps its places."""
    repeats = Repeats(np.full((4, 2), 8), np.full(4, 1.5))
    order = repeats.extend(np.array([3, 1, 0, 2]))
    assert order.tolist() == [3, 1, 1, 0, 0, 2]
    assert repeats.draw(order, np.random.default_rng(0)).tolist() == [2, 0, 1, 3, 2, 0]
    repeats = Repeats(np.array([[8, 8]] * 4 + [[16, 8]]), np.array([1.5] * 4 + [2.0]))
    order = repeats.extend(np.array([4, 3, 1, 0, 2]))
    assert order.tolist() == [4, 4, 3, 1, 1, 0, 0, 2]
    assert repeats.draw(order, np.random.default_rng(0)).tolist()[:2] == [4, 4]


def test_sentences_are_not_searched_once_for_each_kind(monkeypatch):
    """With thousands of kinds, as in large corpora, the number of passes over the sentences does not grow."""
    passes, flatnonzero = [], np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda values: passes.append(len(values)) or flatnonzero(values))
    shapes = np.stack(np.divmod(np.arange(2000), 40), axis=1)
    repeats = Repeats(np.tile(shapes, (2, 1)), np.full(4000, 1.5))
    assert len(repeats.members) == 2000
    assert len(repeats.extend(np.arange(4000))) == 6000
    assert len(passes) < 10


def test_a_language_pair_that_the_length_filters_empty_is_named(corpus, tokenizer, caplog):
    """Otherwise the run would train without this pair, and the model card would still name it."""
    (corpus / "en-fr" / "text.fr").write_text("un chien " * 40 + "\n", encoding="utf-8")
    args = arguments(corpus, train="{pair}/text", max_length=20)
    add_tags(tokenizer, args)
    caplog.set_level(logging.INFO)
    with pytest.raises(UserError, match=r"en-fr: none of its 1 training pairs passes the length filters"):
        encode(load_parallel(args, "train"), tokenizer, args, filter=True)
    assert "length filters, en-de: 3 pairs kept, 0 left out" in caplog.text
