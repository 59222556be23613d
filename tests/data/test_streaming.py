"""Streams: all pairs, in bounded memory, shuffled anew in each pass, and resumed where they stopped."""

import gzip
import json
import tracemalloc
from itertools import islice

import pytest
import torch
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file
from tiny_run import tiny_values
from torch.utils.data import DataLoader

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.streaming import EndlessStream, StreamBatches
from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import check_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.translation import Translation
from hf_deepwide.training.stream_position import StreamPosition, collate_stream

PAIRS = [(f"{number} " + "a " * (number % 7), f"{number} " + "b " * (number % 5)) for number in range(97)]


class Words:
    """A tokenizer that splits at spaces, ends a text with its number, and counts the sources that it encodes."""

    is_fast, truncation_side, all_special_ids, unk_token_id = True, "right", (), None

    def __init__(self):
        self.seen = 0

    def __call__(self, text=None, text_target=None, **_):
        self.seen += sum(number_of(source) > 0 for source in text or ())
        return {"input_ids": [self.ids(words) for words in text or text_target]}

    def get_vocab(self):
        return {}

    def ids(self, text):
        return [ord(word[0]) + len(word) * 256 + 3 for word in text.split()] + [number_of(text)]


def number_of(text: str) -> int:
    """The number at the start of a text from the pairs; 0 for any other text."""
    first = text.split()[0]
    return int(first) if first.isdecimal() else 0


@pytest.fixture
def corpus(tmp_path):
    """The pairs in every format that can be streamed."""
    for column, lang in enumerate(("en", "de")):
        text = "".join(pair[column] + "\n" for pair in PAIRS)
        (tmp_path / f"train.{lang}").write_text(text)
        (tmp_path / f"packed.{lang}.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "train.tsv").write_text("".join(f"{en}\t{de}\n" for en, de in PAIRS))
    rows = [{"en": en, "de": de} for en, de in PAIRS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for shard, start in enumerate(range(0, len(rows), 30)):
        (tmp_path / "shards").mkdir(exist_ok=True)
        lines = [json.dumps(row) + "\n" for row in rows[start : start + 30]]
        (tmp_path / "shards" / f"train-{shard}.jsonl").write_text("".join(lines))
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    return tmp_path


SOURCES = {
    "text": {"train": "train"},
    "text, compressed": {"train": "packed"},
    "tsv": {"format": "tsv", "train": "train.tsv"},
    "jsonl": {"format": "jsonl", "train": "train.jsonl"},
    "folder of shards": {"format": "datasets", "name": "shards", "train": "train"},
    "saved": {"format": "datasets", "name": "saved", "train": "train"},
    "two pairs": {
        "format": "jsonl", "train": "train.jsonl", "pairs": ["en-de", "de-en"], "language_tag": "none",
        "sampling_temperature": float("inf"),
    },
}  # fmt: skip


def arguments(corpus, source, **fields):
    return DataArguments(root=str(corpus), streaming=True, **SOURCES[source], **fields)


def numbers(batches):
    """The number of each pair in each batch."""
    return [[row["labels"][-1] for row in batch] for batch in batches]


@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_holds_what_the_file_holds(source, corpus):
    stream = load_parallel(arguments(corpus, source), "train")
    assert isinstance(stream, IterableDataset)
    read = [(row["source"], row["target"]) for row in stream]
    if source == "two pairs":
        assert read == [pair for en, de in PAIRS for pair in ((en, de), (de, en))]
    else:
        assert read == PAIRS
    assert list(stream) == list(stream), "a second pass is like the first"


@pytest.mark.parametrize("source", SOURCES)
def test_resumes_a_stream_at_any_batch(source, corpus):
    """From the position of any batch, the remaining batches are the same, and few sources are encoded again."""
    args = arguments(corpus, source)

    def stream(words):
        batches = StreamBatches(
            encode(load_parallel(args, "train"), words, args, filter=True), 64, seed=3, buffer_size=20
        )
        return EndlessStream(batches)

    whole = stream(Words())
    count = 3 * len(list(stream(Words()).stream)) - 5  # within the third pass
    expected, positions = [], []
    for batch in islice(whole, count):
        expected.append(batch)
        positions.append(json.dumps(whole.position))
    for at in range(0, count, 7):
        words = Words()
        again = stream(words)
        again.start = json.loads(positions[at])
        rest = list(islice(again, count))
        given = again.start["given"]
        assert given <= at
        assert rest[:given] == [[]] * given
        assert numbers(rest[given:]) == numbers(expected[given:])
        if again.start["epoch"] == 2:
            assert words.seen <= len(PAIRS) * len(args.language_pairs), "of three passes the last is encoded at most"


def test_each_pass_is_shuffled_anew_and_whole(corpus):
    args = arguments(corpus, "text")
    stream = StreamBatches(
        encode(load_parallel(args, "train"), Words(), args, filter=True), 64, seed=3, buffer_size=20
    )
    passes = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        passes.append(numbers(stream))
        assert sorted(number for batch in passes[-1] for number in batch) == list(range(len(PAIRS)))
    assert passes[0] == passes[2]
    together = [{frozenset(batch) for batch in batches} for batches in passes[:2]]
    assert len(together[0] & together[1]) < len(together[0]) / 3
    order = [number for batch in passes[0] for number in batch]
    assert order != sorted(order)


@pytest.mark.parametrize("multiple", [2, 6])
def test_processes_see_what_one_sees_that_accumulates_more(multiple, corpus):
    args = arguments(corpus, "text")

    def batches(**processes):
        rows = encode(load_parallel(args, "train"), Words(), args, filter=True)
        return numbers(StreamBatches(rows, 64, seed=3, buffer_size=25, batch_multiple=multiple, **processes))

    alone = batches()
    assert len(alone) % multiple == 0
    shares = [batches(rank=rank, world_size=2) for rank in (0, 1)]
    assert [batch for pair in zip(*shares, strict=True) for batch in pair] == alone


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_another_number_of_processes_goes_on_where_the_others_were(corpus, before, after):
    """The processes together continue with the batches of a single process that was not interrupted."""
    args, multiple, steps = arguments(corpus, "text"), 4, 25  # batches per update, and updates enough for some passes

    def given(processes, start=None):
        streams = []
        for rank in range(processes):
            rows = encode(load_parallel(args, "train"), Words(), args, filter=True)
            batches = StreamBatches(
                rows, 64, seed=3, buffer_size=20, batch_multiple=multiple, rank=rank, world_size=processes
            )
            streams.append(EndlessStream(batches))
            streams[-1].start = start
        per_process = [list(islice(stream, steps * multiple // processes)) for stream in streams]
        together = [batch for turn in zip(*per_process, strict=True) for batch in turn]
        return together, streams[0].position

    whole, _ = given(1)
    _, position = given(before)
    assert position["epoch"] > 1
    rest, _ = given(after, json.loads(json.dumps(position)))
    skipped = rest.count([])
    assert 0 < skipped < len(whole)
    assert rest[:skipped] == [[]] * skipped
    assert numbers(rest[skipped:]) == numbers(whole[skipped:])


def test_shards_change_their_order(corpus):
    args = arguments(corpus, "folder of shards")
    stream = StreamBatches(
        encode(load_parallel(args, "train"), Words(), args, filter=True), 64, seed=3, buffer_size=20
    )
    firsts = []
    for epoch in range(4):
        stream.set_epoch(epoch)
        firsts.append(min(numbers(islice(stream, 1))[0]) // 30)
    assert len(set(firsts)) > 1


def test_memory_is_that_of_the_buffer(tmp_path):
    """A file four times larger takes no more memory, and less memory than its own size."""
    line = "a word after a word after a word after a word " * 10
    peaks = {}
    for count in (1_000, 4_000):
        for lang in ("en", "de"):
            (tmp_path / f"{count}.{lang}").write_text(f"{line}\n" * count)
        args = DataArguments(root=str(tmp_path), train=str(count), streaming=True)
        rows = load_parallel(args, "train").map(lambda row: {**row, "source_length": 33, "target_length": 33})
        stream = StreamBatches(rows, 4096, seed=1, buffer_size=200)
        tracemalloc.start()
        assert sum(len(batch) for batch in stream) == count
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[4_000] < 1.1 * peaks[1_000]
    assert peaks[4_000] < 2 * len(line) * 4_000 / 2


def test_reports_mistakes_in_a_stream(corpus):
    (corpus / "train.de").write_bytes(b"eins\n\xff\n")
    with pytest.raises(UserError, match=r"train\.de, line 2: byte 1 \(0xff\) is not UTF-8"):
        list(load_parallel(arguments(corpus, "text"), "train"))
    (corpus / "train.de").unlink()
    with pytest.raises(UserError, match=r"no file .*train\.de"):
        load_parallel(arguments(corpus, "text"), "train")
    with pytest.raises(UserError, match=r"data\.shuffle_buffer is 0"):
        DataArguments(shuffle_buffer=0)


@pytest.mark.parametrize("fields", [{"max_length": 2}, {"max_length_ratio": 1.0}])
def test_ends_a_stream_without_usable_pairs(fields, corpus):
    """An error ends the stream. It is not read again and again in search of a first batch."""
    (corpus / "uneven.en").write_text("1 a\n2 a a\n")
    (corpus / "uneven.de").write_text("1 b b\n2 b\n")
    args = DataArguments(root=str(corpus), train="uneven", streaming=True, **fields)
    rows = encode(load_parallel(args, "train"), Words(), args, filter=True)
    with pytest.raises(UserError, match=r"give no batch: .*data\.max_length"):
        next(iter(EndlessStream(StreamBatches(rows, 64, seed=3))))


def test_what_processes_cannot_share_is_left_out():
    """If three pairs are a batch each, two processes take one pair each. If a batch holds two pairs, all are taken."""
    rows = [{"source_length": 8, "target_length": 8, "number": number} for number in range(3)]
    for max_tokens, taken in ((8, 2), (16, 3)):
        ranks = [StreamBatches(rows, max_tokens, seed=1, rank=rank, world_size=2) for rank in (0, 1)]
        batches = [[[row["number"] for row in batch] for batch in each] for each in ranks]
        assert len(batches[0]) == len(batches[1]) == 1
        assert sorted(number for own in batches for batch in own for number in batch) == list(range(taken))


def test_a_run_on_streamed_text_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    """Interrupt a run in a later pass, with a buffer far smaller than the corpus. Past batches are not made again."""
    texts = build_phrases("de", "en", train_size=200)
    for split, rows in texts.items():
        for lang, side in (("de", "source"), ("en", "target")):
            (tmp_path / f"{split}.{lang}").write_text("".join(f"{line}\n" for line in rows[side][:200]))
    values = tiny_values(tmp_path, max_steps=24, max_tokens=512, eval_strategy="no", load_best_model_at_end=False)
    values["data"] = {
        "root": str(tmp_path), "streaming": True, "shuffle_buffer": 64, "source_lang": "de", "target_lang": "en",
        "train": "train", "max_length": 100,
    }  # fmt: skip
    finals, batches = [], []
    original = StreamBatches._batches

    def counted(self, buffer, window):
        for batch in original(self, buffer, window):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(StreamBatches, "_batches", counted)
    for name in ("whole", "cut"):
        values["training"]["output_dir"] = str(tmp_path / name)
        recipe = check_recipe(values, "tiny", "tiny.yaml")
        run_recipe(recipe)
        if name == "cut":
            (tmp_path / name / "results.json").unlink()
            for step in (20, 24):
                (tmp_path / name / f"checkpoint-{step}").rename(tmp_path / f"aside-{step}")
            batches.clear()
            run_recipe(recipe)
            assert len(batches) < 16, "8 steps, and at most one buffer before them"
        finals.append(load_file(tmp_path / name / "checkpoint-24" / "model.safetensors"))
    assert [name for name in finals[0] if not torch.equal(finals[0][name], finals[1][name])] == []


def test_lists_all_keys_that_a_stream_needs(corpus, tmp_path):
    """A stream has no epochs, so its training, evaluation and checkpoints need numbers of steps."""
    values = tiny_values(tmp_path / "run", max_steps=-1, eval_strategy="epoch", save_strategy="epoch")
    values["data"] = {"root": str(corpus), "train": "train", "validation": "train", "streaming": True}
    with pytest.raises(UserError) as refused:
        run_recipe(check_recipe(values, "tiny", "tiny.yaml"))
    assert str(refused.value).endswith(
        "training: max_steps: N, eval_strategy: steps, eval_steps: N, save_strategy: steps, save_steps: N"
    )


def test_refuses_too_long_pairs_before_the_first_step(corpus, tmp_path):
    """The run does not wait for such a pair in the stream. Lengths count with padding."""
    padding = {"pad_to_multiple_of": 8}
    values = tiny_values(tmp_path / "run", max_tokens=96, eval_strategy="no", load_best_model_at_end=False, **padding)
    values["data"] = {"root": str(corpus), "train": "train", "streaming": True, "max_length": 97}
    with pytest.raises(UserError, match=r"data.max_length 97 tokens, 104 when padded .* training.max_tokens 96"):
        run_recipe(check_recipe(values, "tiny", "tiny.yaml"))
    assert StreamBatches([], 96, seed=1, max_length=96)


def test_the_loader_of_a_resumed_stream_collates_nothing_for_what_was_seen(corpus):
    args = arguments(corpus, "text")
    batches = StreamBatches(
        encode(load_parallel(args, "train"), Words(), args, filter=True), 64, seed=3, buffer_size=20
    )
    stream = EndlessStream(batches)
    stream.start = {"given": 3, "epoch": 1, "stream": None}
    loader = DataLoader(stream, batch_size=None, collate_fn=len)
    lengths = list(islice(loader, 5))
    assert lengths[:3] == [0, 0, 0]
    assert all(lengths[3:])


def test_a_pass_over_a_stream_has_pieces_of_its_own(corpus):
    """BPE-dropout and masks receive the number of the pass, also when a stream is resumed."""

    class Told:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __call__(self, rows):
            return self.epoch

    args = arguments(corpus, "text")
    rows = encode(load_parallel(args, "train"), Words(), args, filter=True)
    stream = EndlessStream(StreamBatches(rows, 1000, seed=3, buffer_size=1000))
    passes = list(islice(DataLoader(stream, batch_size=None, collate_fn=collate_stream(Told(), stream)), 6))
    assert passes == sorted(passes)
    assert len(set(passes)) > 1
    stream.start = {"given": 1, "epoch": 4, "stream": None}
    assert list(islice(DataLoader(stream, batch_size=None, collate_fn=collate_stream(Told(), stream)), 2)) == [{}, 4]


@pytest.mark.parametrize("source", ["text", "tsv", "jsonl"])
def test_an_endless_word_in_a_stream_of_files_is_left_out(source, corpus, caplog):
    """An error would not help: a run that has begun could not continue with a corrected file."""
    caplog.set_level("INFO", "hf_deepwide")
    word = "x" * 21_000
    if source == "text":
        for lang in ("en", "de"):
            with (corpus / f"train.{lang}").open("a") as file:
                file.write(f"{word}\n")
    else:
        line = f"{word}\tb\n" if source == "tsv" else json.dumps({"en": word, "de": "b"}) + "\n"
        with (corpus / f"train.{source}").open("a") as file:
            file.write(line)
    rows = list(load_parallel(arguments(corpus, source), "train"))
    assert len(rows) == len(PAIRS)
    assert "1 with a word of more than 20,000 characters" in caplog.text


def test_a_trainer_keeps_one_position_of_its_stream(corpus, tmp_path):
    """With two positions, a checkpoint would restore the older position."""
    values = tiny_values(
        tmp_path / "run", max_steps=2, max_tokens=512, eval_strategy="no", load_best_model_at_end=False
    )
    values["data"] = {"root": str(corpus), "train": "train", "streaming": True, "max_length": 100}
    recipe = check_recipe(values, "tiny", "tiny.yaml")
    task, args = Translation(recipe), recipe.training_arguments()
    texts = task.read(args, ended=False)
    tokenizer = task.new_tokenizer(texts)
    model = task.new_model(tokenizer, args)
    trainer = task.trainer(model, args, tokenizer, task.encode(texts, tokenizer, model), texts)
    for _ in range(2):
        trainer.get_train_dataloader()
    positions = [each for each in trainer.callback_handler.callbacks if isinstance(each, StreamPosition)]
    assert len(positions) == 1
