"""The padding of sentences in training, and the counting of tokens in a batch."""

import pytest
import torch
from tiny_run import tiny_corpus, tiny_trainer

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.encoding import check_lengths
from hf_deepwide.errors import UserError
from hf_deepwide.training.arguments import TranslationTrainingArguments
from hf_deepwide.training.translation import TranslationTrainer


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [({"bf16": False}, 1), ({"bf16": True}, 2), ({"bf16": True, "pad_to_multiple_of": 8}, 8)],
)
def test_choose_the_multiple_by_device_and_precision(fields, multiple, tmp_path):
    assert TranslationTrainingArguments(str(tmp_path), use_cpu=True, **fields).pad_to_multiple_of == multiple


def test_choose_eight_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: False)
    assert TranslationTrainingArguments(str(tmp_path), bf16=False).pad_to_multiple_of == 8


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"pad_to_multiple_of": "all"}, "a number, or auto"),
        ({"pad_to_multiple_of": 0}, "1 or more"),
        ({"batch_by": "words"}, "padded, real"),
    ],
)
def test_refuse_another_way_to_pad_or_count(fields, accepted, tmp_path):
    with pytest.raises(ValueError, match=accepted):
        TranslationTrainingArguments(str(tmp_path), **fields)


@pytest.mark.parametrize("multiple", [1, 3])
def test_pad_batches_to_the_multiple_and_log_it(multiple, corpus, tmp_path, caplog):
    trainer = tiny_trainer(corpus, tmp_path, pad_to_multiple_of=multiple)
    with caplog.at_level("INFO"):
        batches = list(trainer.get_train_dataloader())
    assert f"multiples of {multiple} " in caplog.text
    for batch in batches:
        for mask in (batch["attention_mask"] > 0, batch["labels"] >= 0):
            longest = int(mask.sum(1).max())
            assert mask.shape[1] == -(-longest // multiple) * multiple


def test_refuse_padding_that_the_model_has_no_positions_for(corpus, tmp_path):
    longest = max(*corpus.encoded["source_length"][:], *corpus.encoded["target_length"][:])
    config = tiny_trainer(corpus, tmp_path, model={"max_position_embeddings": longest}).model.config
    check_lengths(corpus.encoded, "train", config, DataArguments())
    wide = longest + 1
    with pytest.raises(UserError, match=rf"{longest} tokens, {wide} when padded.*takes {longest}.*multiple_of: 1"):
        check_lengths(corpus.encoded, "train", config, DataArguments(), pad_to_multiple_of=wide)
    stream = corpus.encoded.to_iterable_dataset()
    with pytest.raises(UserError, match=f"can have {longest} tokens, {wide} when padded"):
        check_lengths(stream, "train", config, DataArguments(max_length=longest), pad_to_multiple_of=wide)


def test_pieces_of_bpe_dropout_fit_into_the_model(corpus, tmp_path):
    longest = max(*corpus.encoded["source_length"][:], *corpus.encoded["target_length"][:])
    plain = tiny_trainer(corpus, tmp_path, model={"max_position_embeddings": longest + 3}, pad_to_multiple_of=4)
    trainer = TranslationTrainer(plain.model, plain.args, corpus.tokenizer, corpus.encoded, bpe_dropout=0.9)
    widths = [max(batch["input_ids"].shape[1], batch["labels"].shape[1]) for batch in trainer.get_train_dataloader()]
    assert max(widths) == (longest + 3) // 4 * 4
    assert plain.data.max_length > longest + 3


def test_count_real_tokens_in_training(corpus, tmp_path):
    padded, real = (
        list(tiny_trainer(corpus, tmp_path, batch_by=by, pad_to_multiple_of=8, max_tokens=512).get_train_dataloader())
        for by in ("padded", "real")
    )
    assert len(real) < len(padded)
    assert all(int((batch["labels"] >= 0).sum()) <= 512 for batch in real)
