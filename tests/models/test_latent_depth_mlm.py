"""The masked language model of latent depth: its equations, its loss, and what Transformers requires of it."""

import math

import pytest
import torch
from model_cases import SIZES, scramble, source, tokens
from naive_transformer import embed, encoder_layer, layer_norm, selections
from transformers import AutoModelForMaskedLM, pipeline

from hf_deepwide import LatentDepthConfig, LatentDepthForMaskedLM
from hf_deepwide.data.tokenizer import TokenizerArguments, train_tokenizer


def masked_lm(**fields):
    return scramble(LatentDepthForMaskedLM(LatentDepthConfig(**{**SIZES, **fields}))).eval()


def batch(lengths=(7, 4, 5)):
    """A batch of tokens. Every third token is masked and has to be predicted."""
    ids, mask = tokens(lengths)
    labels = torch.where((torch.arange(ids.shape[1]) % 3 == 1) & (mask == 1), ids, -100)
    return {"input_ids": ids.masked_fill(labels != -100, 3), "attention_mask": mask, "labels": labels}


def naive_logits(w, config, ids, posterior):
    """RoBERTa's head on the pre-norm encoder, one position at a time."""
    w = selections(w, config, posterior) | w
    xs = embed(w, "encoder", config, ids)
    for layer in range(config.encoder_layers):
        xs = encoder_layer(w, f"encoder.layers.{layer}", config, xs)
    rows = []
    for x in xs:
        x = layer_norm(x, w, "encoder.layer_norm") if config.layer_norms else x
        y = w["dense.weight"] @ x + w["dense.bias"]
        y = layer_norm(y * (1 + torch.erf(y / math.sqrt(2))) / 2, w, "layer_norm")
        rows.append(w["lm_head.weight"] @ y + w["lm_head.bias"])
    return torch.stack(rows)


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("selection", ["hard", "soft"])
def test_logits_are_those_of_the_equations(selection, norms):
    model = masked_lm(num_posteriors=2, inference_selection=selection, layer_norms=norms).double()
    inputs, posteriors = batch((4, 3)), torch.tensor([1, 0])
    with torch.no_grad():
        got = model(**inputs, posteriors=posteriors).logits
    weights = dict(model.named_parameters(remove_duplicate=False))
    for row, (ids, mask) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"], strict=True)):
        expected = naive_logits(weights, model.config, ids[mask == 1].tolist(), posteriors[row])
        torch.testing.assert_close(got[row][mask == 1], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_the_masked_tokens(smoothing):
    model, inputs = masked_lm(), batch()
    logits = model(**inputs).logits
    total, count = 0.0, 0
    for row, labels in zip(logits.double(), inputs["labels"], strict=True):
        for scores, label in zip(row, labels, strict=True):
            if label >= 0:
                log_p = scores - torch.exp(scores).sum().log()
                total -= ((1 - smoothing) * log_p[label] + smoothing * log_p.mean()).item()
                count += 1
    assert model(**inputs, label_smoothing=smoothing).loss.item() == pytest.approx(total / count, rel=1e-5)
    lean = model(**inputs, label_smoothing=smoothing, skip_logits=True)
    assert lean.logits is None
    assert lean.loss.item() == pytest.approx(total / count, rel=1e-5)
    more = model(**inputs, label_smoothing=smoothing, num_items_in_batch=torch.tensor(40)).loss
    assert more.item() == pytest.approx(total / 40, rel=1e-5)
    with pytest.raises(ValueError, match="`labels`"):
        model(**source(), skip_logits=True)


def test_training_adds_the_terms_of_the_posteriors():
    model = masked_lm(kl_weight=0.5, kl_anneal_steps=0, target_encoder_layers=1, target_depth_anneal_steps=0).train()
    model.training_step = 1
    for lean in (False, True):
        loss = model(**batch(), skip_logits=lean).loss
        loss.backward()
        logs = model.training_logs()
        expected = logs["reconstruction"] + 0.5 * logs["kl"] + 0.1 * logs["target_depth"]
        assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert logs.keys() == {"reconstruction", "kl", "target_depth", "effective_depth_encoder"}
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_saving_tying_and_resizing(tied, tmp_path):
    model = masked_lm(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is LatentDepthForMaskedLM
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (again.lm_head.weight is again.encoder.embed_tokens.weight) == tied
    with torch.no_grad():
        expected = model(**batch()).logits
        assert torch.equal(again(**batch()).logits, expected)
        model.resize_token_embeddings(50, mean_resizing=False)
        torch.testing.assert_close(model(**batch()).logits[..., :41], expected, atol=1e-6, rtol=1e-6)
    model.save_pretrained(tmp_path)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).lm_head.weight.shape == (50, 16)


def test_a_static_encoder_is_the_baseline():
    model = masked_lm(latent_encoder=False)
    assert model.layer_selections == {}
    model.train()(**batch()).loss.backward()
    assert model.training_logs().keys() == {"reconstruction"}


def test_the_pipeline_fills_masks():
    tokenizer = train_tokenizer(["two dogs run", "a tree in red water"] * 3, TokenizerArguments(vocab_size=60))
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    model = masked_lm(vocab_size=len(tokenizer))
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu", top_k=2)
    ids = tokenizer("two <mask> run", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        p = model(input_ids=ids).logits[0, (ids[0] == tokenizer.mask_token_id).nonzero()[0, 0]].softmax(-1)
    assert [guess["token"] for guess in fill("two <mask> run")] == p.topk(2).indices.tolist()
