"""Encoding, batching and padding, compared with results derived by hand from the text and the lengths."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler, skip_first_batches
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import MBartTokenizer

from hf_deepwide.data.batches import TokenBatchSampler, TranslationCollator
from hf_deepwide.data.corpora import DataArguments
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.streaming import StreamBatches
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer, training_texts
from hf_deepwide.errors import UserError


@pytest.fixture(scope="module")
def train():
    return build_phrases(train_size=1500)["train"]


@pytest.fixture(scope="module")
def tokenizer(train):
    return train_tokenizer(training_texts(train), TokenizerArguments(vocab_size=500))


@pytest.fixture(scope="module")
def encoded(train, tokenizer):
    return encode(train, tokenizer, DataArguments(), filter=True)


def letters(*lengths):
    """Sentence pairs with the given numbers of one-letter words on each side."""
    return Dataset.from_dict(
        {
            "source": [" ".join("a" * source) for source, _ in lengths],
            "target": ["b " * (n - 1) + "b" for _, n in lengths],
        }
    )


@pytest.fixture(scope="module")
def words():
    """A tokenizer in which each one-letter word is one token, so that lengths are words + 1."""
    return train_tokenizer(["a b a b a b"], TokenizerArguments(vocab_size=20))


def test_encoding(encoded, train, tokenizer):
    assert encoded.column_names == ["input_ids", "labels", "source_length", "target_length"]
    assert len(encoded) == len(train)
    for row, text in zip(encoded, train, strict=True):
        assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
        assert (row["source_length"], row["target_length"]) == (len(row["input_ids"]), len(row["labels"]))
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == text["target"]


def test_encodes_each_side_with_its_language_code():
    vocabulary = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b")]
    tokenizer = MBartTokenizer(vocab=vocabulary, src_lang="de_DE", tgt_lang="fr_XX")
    row = encode(letters((1, 1)), tokenizer, DataArguments(), filter=True)[0]
    for side, code in (("input_ids", "de_DE"), ("labels", "fr_XX")):
        assert row[side][-2:] == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(code)]


LENGTHS = [(4, 4), (5, 2), (2, 5), (9, 9), (1, 4)]  # in words; a length in tokens is one more


@pytest.mark.parametrize(
    ("fields", "kept", "logged"),
    [
        ({}, [0, 1, 2, 3, 4], "5 pairs kept, 0 longer than max_length 256 left out"),
        ({"max_length": 6}, [0, 1, 2, 4], "4 pairs kept, 1 longer than max_length 6"),
        ({"max_length_ratio": 2.0}, [0, 1, 2, 3], "1 beyond max_length_ratio 2.0"),
        ({"max_length": 6, "max_length_ratio": 1.5}, [0], "1 pairs kept, 1 longer than max_length 6 and 3 beyond"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_length_filters(words, fields, kept, logged, streaming, caplog):
    dataset = letters(*LENGTHS)
    dataset = dataset.to_iterable_dataset() if streaming else dataset
    with caplog.at_level("INFO"):
        result = encode(dataset, words, DataArguments(**fields), filter=True)
        assert isinstance(result, IterableDataset) == streaming
        lengths = [(row["source_length"] - 1, row["target_length"] - 1) for row in result]
    assert lengths == [LENGTHS[row] for row in kept]
    if not streaming:
        assert logged in caplog.text
    elif len(kept) < len(LENGTHS):
        assert "left out" in caplog.text
        first, caplog.records[:] = [record.message for record in caplog.records], []
        with caplog.at_level("INFO"):
            list(result)
        assert [record.message for record in caplog.records] == first, "each pass is counted on its own"


def test_nothing_is_filtered_from_held_out_sets(words, caplog):
    assert len(encode(letters(*LENGTHS), words, DataArguments(max_length=6, max_length_ratio=1.0), filter=False)) == 5
    assert "1 pairs are longer than max_length 6; they are kept" in caplog.text
    with pytest.raises(UserError, match="none of the 5 training pairs"):
        encode(letters(*LENGTHS), words, DataArguments(max_length=2), filter=True)


def sampler_of(encoded, **fields):
    return TokenBatchSampler(
        encoded["source_length"], encoded["target_length"], **{"max_tokens": 1024, "seed": 3, **fields}
    )


def shapes(sampler, encoded, collator):
    loader = DataLoader(encoded, batch_sampler=sampler, collate_fn=collator)
    return [(*batch["input_ids"].shape, batch["labels"].shape[1]) for batch in loader]


def test_padded_batches_obey_max_tokens_and_have_few_shapes(encoded, tokenizer):
    sampler, collator = sampler_of(encoded), TranslationCollator(tokenizer, 2)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(shapes(sampler, encoded, collator))
    assert all(sentences * max(source, target) <= 1024 for sentences, source, target in epochs[0])
    assert all(source % 8 == target % 8 == 0 for _, source, target in epochs[0])
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]
    assert sum(sentences % 8 > 0 for sentences, _, _ in epochs[0]) <= 1  # the last batch, which takes the rest
    assert len(set(epochs[0])) <= 12
    full = sum(
        1024 - sentences * max(source, target) < 8 * max(source, target) for sentences, source, target in epochs[0]
    )
    assert full >= len(sampler) - 1


def test_pairs_meet_others_in_each_epoch(encoded):
    sampler = sampler_of(encoded)
    partners = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        partners.append({row: frozenset(batch) for batch in sampler for row in batch})
    same = [len(partners[0][row] & partners[1][row]) / len(partners[0][row]) for row in partners[0]]
    assert sum(same) / len(same) < 0.5


def test_without_shuffling_the_longest_come_first_and_epochs_are_equal(encoded):
    sampler = sampler_of(encoded, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first
    width = [
        max(encoded[row]["source_length"] + 7, encoded[row]["target_length"] + 7) // 8
        for batch in first
        for row in batch
    ]
    assert width == sorted(width, reverse=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_accelerate_deals_the_batches_out(encoded, ranks):
    """As in the Trainer under DDP: shards of equal length, which together are the epoch of a single process."""
    sampler = sampler_of(encoded, batch_multiple=ranks * 2)
    assert len(sampler) % (ranks * 2) == 0
    shards = [BatchSamplerShard(sampler, ranks, rank, even_batches=True) for rank in range(ranks)]
    dealt = [list(shard) for shard in shards]
    assert {len(batches) for batches in dealt} == {len(sampler) // ranks}
    together = [batch for step in zip(*dealt, strict=True) for batch in step]
    assert together == list(sampler)
    resumed = list(SkipBatchSampler(shards[0], skip_batches=2))
    assert resumed == dealt[0][2:]


def test_largest_batches_are_split_for_the_multiple():
    sampler = TokenBatchSampler([8] * 100, [8] * 100, 256, seed=0, batch_multiple=6, shuffle=False)
    # Four batches, three of 32 sentences and the rest; the first two become 16 + 16.
    assert [len(batch) for batch in sampler] == [16, 16, 16, 16, 32, 4]
    tiny = TokenBatchSampler([8] * 5, [8] * 5, 256, seed=0, batch_multiple=5)
    assert [len(batch) for batch in tiny] == [1] * 5


@pytest.mark.parametrize("length_multiple", [1, 8])
def test_batches_by_real_tokens_hold_as_many_as_fit(encoded, length_multiple):
    """Padding does not count, and no batch has room for `length_multiple` more sentences."""
    source, target = encoded["source_length"], encoded["target_length"]
    fields = {"max_tokens": 700, "shuffle": False, "length_multiple": length_multiple}
    batches = list(sampler_of(encoded, **fields, batch_by="real"))
    assert sorted(row for batch in batches for row in batch) == list(range(len(encoded)))
    for batch, after in pairwise(batches):
        assert len(batch) % length_multiple == 0
        for side in (source, target):
            assert sum(side[row] for row in batch) <= 700
        more = batch + after[:length_multiple]
        if len(after) >= length_multiple:
            assert max(sum(side[row] for row in more) for side in (source, target)) > 700
    if length_multiple == 8:
        assert len(batches) < len(sampler_of(encoded, **fields))


def test_sampler_mistakes():
    with pytest.raises(UserError, match=r"the longest pair has 30 source and 41 target tokens, 48 when padded .* 40"):
        TokenBatchSampler([3, 30], [3, 41], 40, seed=0)
    with pytest.raises(UserError, match="2 pairs cannot make a multiple of 3 batches"):
        TokenBatchSampler([3, 3], [3, 3], 40, seed=0, batch_multiple=3)
    with pytest.raises(UserError, match="5 pairs cannot make a multiple of 4 batches"):
        TokenBatchSampler([30] * 5, [30] * 5, 40, seed=0, batch_multiple=4)


def test_collator(words):
    rows = [
        {"input_ids": [5, 6, 2], "labels": [7, 2], "source_length": 3},
        {"input_ids": [5, 2], "labels": [8, 9, 7, 2], "source_length": 2},
    ]
    batch = TranslationCollator(words, decoder_start_token_id=4, pad_to_multiple_of=4)(rows)
    expected = {
        "input_ids": [[5, 6, 2, 1], [5, 2, 1, 1]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 0, 0]],
        "labels": [[7, 2, -100, -100], [8, 9, 7, 2]],
        "decoder_input_ids": [[4, 7, 1, 1], [4, 8, 9, 7]],
    }
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert set(TranslationCollator(words, 4)([{"input_ids": [5, 2]}])) == {"input_ids", "attention_mask"}


def test_stream_to_padded_batches(train, tokenizer, encoded):
    """From text to tensors through a stream: every pair occurs once an epoch, also after a resume in the middle."""
    stream = encode(train.to_iterable_dataset(), tokenizer, DataArguments(), filter=True)
    batches = StreamBatches(stream, 1024, seed=5, buffer_size=400)
    loader = DataLoader(batches, batch_size=None, collate_fn=TranslationCollator(tokenizer, 2))
    seen = list(loader)
    assert all(batch["labels"].numel() <= 1024 and batch["input_ids"].numel() <= 1024 for batch in seen)
    labels = Counter(tuple(row[row >= 0].tolist()) for batch in seen for row in batch["labels"])
    assert labels == Counter(tuple(row) for row in encoded["labels"])
    resumed = list(skip_first_batches(loader, 3))
    assert len(resumed) == len(seen) - 3
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(resumed, seen[3:], strict=True))
    batches.set_epoch(1)
    assert [batch["labels"].tolist() for batch in loader] != [batch["labels"].tolist() for batch in seen]


def test_stream_is_shared_by_the_processes(encoded):
    rows = list(encoded)[:901]
    ranks = [list(StreamBatches(rows, 512, seed=5, buffer_size=300, rank=rank, world_size=2)) for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1])
    seen = Counter(tuple(row["labels"]) for batches in ranks for batch in batches for row in batch)
    assert seen == Counter(tuple(row["labels"]) for row in rows)
