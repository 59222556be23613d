"""Tests that Hugging Face's tests leave out for an encoder-decoder from outside Transformers.

They cover generation with every cache and in chunks, Auto classes, remote code, and what a Trainer needs of a loss.
"""

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import CASES, Case
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StaticCache,
    set_seed,
)

NEW_TOKENS = 6


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def model(case: Case) -> PreTrainedModel:
    """A model with spread logits, so that a wrong mask or cache changes the best token."""
    set_seed(0)
    model = case.family.lm(case.config()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(5.0)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    return model


def batch(config: Any, lengths: tuple[int, ...] = (9, 6, 3), seed: int = 1) -> dict[str, torch.Tensor]:
    """Sources of the given lengths, padded on the right."""
    first_word = 1 + max(config.pad_token_id, config.eos_token_id, config.decoder_start_token_id)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(first_word, config.vocab_size, (len(lengths), max(lengths)), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, length - 1] = config.eos_token_id
        ids[row, length:] = config.pad_token_id
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}


def labels_of(config: Any) -> torch.Tensor:
    labels = batch(config, (7, 5, 4), seed=9)["input_ids"]
    return labels.masked_fill(labels == config.pad_token_id, -100)


def generate(model: PreTrainedModel, **options: Any) -> Any:
    return model.generate(**{**batch(model.config), "max_new_tokens": NEW_TOKENS, "do_sample": False, **options})


@pytest.mark.parametrize("beams", [1, 3])
def test_cache_keeps_the_answer(model, beams):
    more = {"num_beams": beams, "return_dict_in_generate": True, "output_logits": True}
    cached, plain = (generate(model, use_cache=use_cache, **more) for use_cache in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_static_cache_keeps_the_answer(model, beams):
    static = generate(model, num_beams=beams, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, generate(model, num_beams=beams))


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_steps_match_teacher_forcing(model, kind, chunk):
    config, inputs = model.config, batch(model.config)
    ids = batch(config, (8, 8, 8), seed=5)["input_ids"]
    ids[:, 0] = config.decoder_start_token_id
    if kind == "dynamic":
        caches = DynamicCache(config=config), DynamicCache(config=config)
    else:
        decoder = config.get_text_config(decoder=True)
        lengths = 12, inputs["input_ids"].shape[1]
        caches = tuple(StaticCache(config=decoder, max_cache_len=length) for length in lengths)
    cache, logits = EncoderDecoderCache(*caches), []
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=ids, use_cache=False).logits
        for start in range(0, ids.shape[1], chunk):
            step = {"decoder_input_ids": ids[:, start : start + chunk], "past_key_values": cache, "use_cache": True}
            output = model(**inputs, **step)
            inputs = {"attention_mask": inputs["attention_mask"]}
            inputs["encoder_outputs"] = (output.encoder_last_hidden_state,)
            logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole, atol=1e-4, rtol=1e-4)


def test_padding_of_the_source_does_not_matter(model):
    more = {"return_dict_in_generate": True, "output_logits": True}
    together, inputs = generate(model, **more), batch(model.config)
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        ids = inputs["input_ids"][row : row + 1, :length]
        alone = generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), **more)
        assert torch.equal(alone.sequences[0], together.sequences[row])
        logits = torch.stack(together.logits)[:, row]  # a forgotten mask seldom changes a greedy answer
        torch.testing.assert_close(torch.cat(alone.logits), logits, atol=1e-4, rtol=1e-4)


def test_future_targets_do_not_matter(model):
    ids = batch(model.config, (7, 7, 7), seed=3)["input_ids"]
    other = ids.clone()
    other[:, 4:] = ids[:, 4:].roll(1, 0)
    with torch.no_grad():
        first, second = (model(**batch(model.config), decoder_input_ids=target).logits for target in (ids, other))
    torch.testing.assert_close(first[:, :4], second[:, :4], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first[:, 4:], second[:, 4:], atol=1e-5)


def test_generation_takes_encoder_outputs(model):
    with torch.no_grad():
        memory = model.get_encoder()(**batch(model.config))
    again = generate(model, input_ids=None, encoder_outputs=memory, num_beams=2)
    assert torch.equal(again, generate(model, num_beams=2))


def test_generation_continues_a_prefix(model):
    free = generate(model)
    assert torch.equal(generate(model, decoder_input_ids=free[:, :4], max_new_tokens=NEW_TOKENS - 3), free)


def test_generation_begins_with_the_forced_token(model):
    forced = model.config.vocab_size - 2
    begins = generate(model, forced_bos_token_id=forced)[:, :2].tolist()
    assert begins == [[model.config.decoder_start_token_id, forced]] * len(begins)


def test_prompt_lookup_matches_greedy_search(model):
    ids = batch(model.config)["input_ids"][:1]
    end = {"min_new_tokens": 8, "max_new_tokens": 8, "eos_token_id": model.config.eos_token_id}
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **end}
    assert torch.equal(generate(model, **options), generate(model, **options, prompt_lookup_num_tokens=2))


def test_scores_of_beams_follow_from_the_steps(model):
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6, "early_stopping": True}
    output = generate(model, return_dict_in_generate=True, output_scores=True, **options)
    assert output.sequences.shape == (6, NEW_TOKENS + 1)
    steps = model.compute_transition_scores(
        output.sequences, output.scores, output.beam_indices, normalize_logits=False
    )
    torch.testing.assert_close(steps.sum(1) / NEW_TOKENS**0.6, output.sequences_scores, atol=1e-3, rtol=1e-3)


def test_sampling_follows_the_seed(model):
    samples = []
    for _ in range(2):
        set_seed(3)
        samples.append(generate(model, do_sample=True, num_return_sequences=2))
    assert torch.equal(*samples)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_reduced_precision_is_finite(model, dtype):
    inputs, reduced = batch(model.config), copy.deepcopy(model).to(dtype)
    logits = reduced(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()
    generate(reduced, num_beams=2, max_new_tokens=3)


def test_loss_is_the_mean_over_targets(model):
    labels = labels_of(model.config)
    output = model(**batch(model.config), labels=labels)
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten()))


def test_loss_divides_by_the_given_count(model):
    """The Trainer passes `num_items_in_batch`, and then does not divide by the accumulation steps itself."""
    labels = labels_of(model.config)
    output = model(**batch(model.config), labels=labels, num_items_in_batch=torch.tensor(100))
    total = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss, total / 100)


def test_labels_become_decoder_inputs(model):
    labels = labels_of(model.config)
    ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
    assert ids.shape == labels.shape
    assert (ids[:, 0] == model.config.decoder_start_token_id).all()
    assert (ids >= 0).all()
    inputs = batch(model.config)
    torch.testing.assert_close(model(**inputs, labels=labels).logits, model(**inputs, decoder_input_ids=ids).logits)


def test_every_parameter_gets_a_gradient(case):
    model = case.family.lm(case.config(layer_drop=0.0) if "layer_drop" in case.fields else case.config()).train()
    model(**batch(model.config), labels=labels_of(model.config)).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []


def test_plain_trainer_trains_and_predicts(case, model, tmp_path):
    config, inputs, labels = model.config, batch(model.config), labels_of(model.config)
    vocabulary = {f"t{index}": index for index in range(config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t3")),
        pad_token=f"t{config.pad_token_id}",
        eos_token=f"t{config.eos_token_id}",
    )
    rows = [
        {"input_ids": source[mask.bool()].tolist(), "labels": target[target >= 0].tolist()}
        for source, mask, target in zip(inputs["input_ids"], inputs["attention_mask"], labels, strict=True)
    ] * 4
    args = Seq2SeqTrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        label_smoothing_factor=0.1,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=2,
        predict_with_generate=True,
        generation_max_length=8,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trained = case.family.lm(case.config())
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    trainer = Seq2SeqTrainer(trained, args, collator, rows, rows[:3], processing_class=tokenizer)
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    assert trainer.predict(rows[:3]).predictions.shape[0] == 3


def test_auto_classes_load_the_family(case, model, tmp_path):
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is case.family.config
    assert type(AutoModel.from_pretrained(tmp_path)) is case.family.model
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert type(again) is case.family.lm
    inputs = batch(model.config)
    with torch.no_grad():
        outputs = [each(**inputs, decoder_input_ids=inputs["input_ids"]).logits for each in (again, model)]
    torch.testing.assert_close(*outputs)


def test_config_file_holds_what_the_class_knows(case, tmp_path):
    config = case.config()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert case.family.config.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert set(saved) <= {*config.to_dict(), "model_type", "architectures", "transformers_version", "dtype"}


WITHOUT_PACKAGE = """
import json, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_deepwide":
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)")
sys.meta_path.insert(0, Block())
import torch
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
inputs = {name: torch.tensor(rows) for name, rows in json.loads(sys.argv[2]).items()}
print("IDS", model.generate(**inputs, max_new_tokens=5, num_beams=2).tolist())
"""


def test_remote_code_translates_alike(case, model, tmp_path, monkeypatch):
    """A process that cannot import the package gets the same translation from the code beside the weights."""
    classes = dict(zip(("AutoModel", "AutoModelForSeq2SeqLM"), case.model_classes, strict=True))
    for auto, cls in {"AutoConfig": case.family.config, **classes}.items():
        monkeypatch.setattr(cls, "_auto_class", auto)
    model.save_pretrained(tmp_path / "model")
    inputs = batch(model.config, (5, 4))
    wanted = model.generate(**inputs, max_new_tokens=5, num_beams=2).tolist()
    given = json.dumps({name: tensor.tolist() for name, tensor in inputs.items()})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE, str(Path(tmp_path) / "model"), given],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"IDS {wanted}" in done.stdout
