"""Properties of readers, tokenizer, sampler and collator that must hold for any input (hypothesis)."""

import gzip
import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_deepwide.data.batches import TokenBatchSampler, TranslationCollator
from hf_deepwide.data.corpora import DataArguments, load_parallel
from hf_deepwide.data.streaming import StreamBatches
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.models.plain_text import is_blank

quick = settings(max_examples=60, deadline=None, derandomize=True)  # the same examples in each run

# Any text that a line may hold: all of Unicode, except line ends, and zero bytes, which no text file has.
line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\0\ufeff"), max_size=12).map(
    lambda text: text.rstrip("\r")
)


@quick
@given(st.lists(line, min_size=1), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_lines_come_back_as_written(lines, compressed, end):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / ("text.gz" if compressed else "text")
        data = "".join(text + end for text in lines).encode()
        path.write_bytes(gzip.compress(data) if compressed else data)
        assert list(read_lines(path)) == lines


@quick
@given(st.lists(st.tuples(line, line), min_size=1))
def test_pairs_stay_aligned(pairs):
    pairs = [("1", "eins"), *pairs]
    with tempfile.TemporaryDirectory() as directory:
        for column, lang in enumerate(("en", "de")):
            text = "".join(pair[column] + "\n" for pair in pairs)
            (Path(directory) / f"train.{lang}").write_bytes(text.encode())
        dataset = load_parallel(DataArguments(root=directory, train="train"), "train")
    whole = [pair for pair in pairs if not any(map(is_blank, pair))]
    assert list(zip(dataset["source"], dataset["target"], strict=True)) == whole


@quick
@given(st.lists(line, min_size=1), st.lists(line, min_size=1), st.booleans())
def test_unequal_files_are_refused_and_counted(english, german, compressed):
    with tempfile.TemporaryDirectory() as directory:
        for lang, lines in (("en", english), ("de", german)):
            data = "".join(text + "\n" for text in lines).encode()
            path = Path(directory) / f"train.{lang}{'.gz' * compressed}"
            path.write_bytes(gzip.compress(data) if compressed else data)
        args = DataArguments(root=directory, train="train")
        assume(len(english) != len(german))
        with pytest.raises(UserError) as error:
            load_parallel(args, "train")
    longer, shorter = max(len(english), len(german)), min(len(english), len(german))
    assert f"has {longer} lines" in str(error.value)
    assert f"has {shorter}, so line {shorter + 1} of the longer" in str(error.value)


@quick
@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_read_or_refused_with_their_line(data, compressed):
    """The bytes can include a byte order mark, zero bytes and carriage returns."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / ("text.gz" if compressed else "text")
        path.write_bytes(gzip.compress(data) if compressed else data)
        refused, lines = "", []
        try:
            lines = list(read_lines(path))
        except UserError as error:
            refused = str(error)
    if refused:
        assert re.search(r"line \d+|is empty", refused)
        return
    text = data.decode("utf-8-sig")
    assert len(lines) == text.count("\n") + (not text.endswith("\n"))
    assert "\0" not in text
    assert lines == [part.removesuffix("\r") for part in text.removesuffix("\n").split("\n")]


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=16, max_size=150)


@quick
@given(
    lengths,
    st.integers(128, 700),
    st.integers(1, 8),
    st.sampled_from([1, 4, 8]),
    st.integers(0, 9),
    st.sampled_from(["padded", "real"]),
)
def test_sampler(pairs, max_tokens, batch_multiple, length_multiple, seed, batch_by):
    source, target = zip(*pairs, strict=True)
    fields = {
        "seed": seed, "batch_multiple": batch_multiple, "length_multiple": length_multiple, "batch_by": batch_by,
    }  # fmt: skip
    sampler = TokenBatchSampler(source, target, max_tokens, **fields)
    twin = TokenBatchSampler(list(source), np.array(target), max_tokens, **fields)

    def padded(side, batch):
        return -(-max(side[row] for row in batch) // length_multiple) * length_multiple

    all_shapes = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        twin.set_epoch(epoch)
        batches = list(sampler)
        assert batches == list(twin) == list(sampler)
        assert Counter(row for batch in batches for row in batch) == Counter(range(len(pairs)))
        assert len(batches) == len(sampler)
        assert len(batches) % batch_multiple == 0
        shapes = Counter((len(batch), padded(source, batch), padded(target, batch)) for batch in batches)
        if batch_by == "padded":
            assert all(sentences * max(lengths) <= max_tokens for sentences, *lengths in shapes)
        else:
            assert all(sum(side[row] for row in batch) <= max_tokens for batch in batches for side in (source, target))
        all_shapes.append(shapes)
    assert all_shapes[0] == all_shapes[1] == all_shapes[2]


@quick
@given(lengths, st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_processes_share_an_epoch(pairs, world, accumulation, seed, shuffle):
    """With accelerate's shards, each pair occurs once, and all ranks have equally many whole optimizer steps."""
    source, target = zip(*pairs, strict=True)
    fields = {"seed": seed, "batch_multiple": world * accumulation, "shuffle": shuffle}
    ranks = [
        list(BatchSamplerShard(TokenBatchSampler(source, target, 256, **fields), world, rank, even_batches=True))
        for rank in range(world)
    ]
    assert {len(batches) % accumulation for batches in ranks} == {0}
    assert len({len(batches) for batches in ranks}) == 1
    assert Counter(row for batches in ranks for batch in batches for row in batch) == Counter(range(len(pairs)))


@quick
@given(lengths, st.integers(1, 40), st.integers(1, 3))
def test_stream_batches(pairs, buffer_size, world_size):
    rows = [{"row": row, "source_length": s, "target_length": t} for row, (s, t) in enumerate(pairs)]
    fields = {"seed": 1, "buffer_size": buffer_size, "world_size": world_size}
    ranks = [list(StreamBatches(rows, 64, rank=rank, **fields)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = Counter(row["row"] for batches in ranks for batch in batches for row in batch)
    assert max(seen.values()) == 1
    assert len(rows) - len(seen) < world_size  # at most a rest is lost, too small for all ranks
    for batch in ranks[0]:
        assert (
            len(batch)
            * max(-(-max(row[side] for row in batch) // 8) * 8 for side in ("source_length", "target_length"))
            <= 64
        )


TOKENIZER = train_tokenizer(["ab ba 12 é", "b a", "ab ab"], TokenizerArguments(vocab_size=24))


@quick
@given(st.lists(st.text("ab12é", min_size=1, max_size=8), min_size=1, max_size=6).map(" ".join))
def test_tokenizer_round_trip(text):
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.unk_token_id not in ids
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


sentence = st.lists(st.integers(4, 20), max_size=10).map(lambda ids: [*ids, 2])


@quick
@given(st.lists(st.tuples(sentence, sentence), min_size=1, max_size=5), st.sampled_from([1, 8]))
def test_collator(pairs, multiple):
    rows = [{"input_ids": source, "labels": target} for source, target in pairs]
    batch = TranslationCollator(TOKENIZER, 0, multiple)(rows)
    for row, (source, target) in enumerate(pairs):
        ids, mask = batch["input_ids"][row], batch["attention_mask"][row]
        assert ids[mask.bool()].tolist() == source
        assert set(ids[~mask.bool()].tolist()) <= {1}
        labels, decoder = batch["labels"][row], batch["decoder_input_ids"][row]
        assert labels[labels >= 0].tolist() == target
        assert decoder[labels >= 0].tolist() == [0, *target[:-1]]
        assert set(decoder[labels < 0].tolist()) <= {1}
    assert batch["input_ids"].shape[1] % multiple == batch["labels"].shape[1] % multiple == 0
