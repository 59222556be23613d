"""MAT for language understanding: its equations, its start from a trained RoBERTa, and Transformers' requirements."""

import math
import re

import pytest
import torch
from model_cases import scramble, tokens
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    CamembertConfig,
    CamembertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

import hf_deepwide
from hf_deepwide import MATRobertaConfig, MATRobertaForMaskedLM, MATRobertaForSequenceClassification, MATRobertaModel
from hf_deepwide.errors import UserError

SIZES = {
    "vocab_size": 41, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "max_position_embeddings": 24,
}  # fmt: skip
THEIRS = {
    "vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 26, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip
CLASSES = (MATRobertaModel, MATRobertaForMaskedLM, MATRobertaForSequenceClassification)


def new(cls, **fields):
    return scramble(cls(MATRobertaConfig(**{**SIZES, **fields}))).eval()


def base(cls=RobertaForMaskedLM, config=RobertaConfig, **fields):
    return scramble(cls(config(**{**THEIRS, **fields}))).eval()


def batch(lengths=(7, 4, 5)):
    ids, mask = tokens(lengths)
    return {"input_ids": ids, "attention_mask": mask}


def norm(x, w, name):
    mean = sum(x) / len(x)
    variance = sum((each - mean) ** 2 for each in x) / len(x)
    return (
        torch.stack([(each - mean) / (variance + 1e-5).sqrt() for each in x]) * w[f"{name}.weight"] + w[f"{name}.bias"]
    )


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def naive_states(w, config, ids, kept=None, rate=0.0):
    """The states of one sentence, computed one position, branch and head at a time.

    `kept[layer]` holds the branches that are not dropped, and whether the feed-forward network is kept.
    """
    heads, branches = config.encoder_attention_heads, config.attention_branches
    width = config.d_model // heads
    xs = [
        norm(w["encoder.embed_tokens.weight"][token] + w["encoder.embeddings.positions.weight"][place],
             w, "encoder.embeddings.layer_norm")
        for place, token in enumerate(ids)
    ]  # fmt: skip
    for layer in range(config.encoder_layers):
        at = f"encoder.layers.{layer}"
        alive, whole = (range(branches), True) if kept is None else kept[layer]
        sums = [torch.zeros(config.d_model, dtype=torch.float64) for _ in xs]
        for branch in alive:
            rows = slice(branch * config.d_model, (branch + 1) * config.d_model)

            def project(x, name, rows=rows, at=at):
                return w[f"{at}.self_attn.{name}.weight"][rows] @ x + w[f"{at}.self_attn.{name}.bias"][rows]

            q, k, v = ([project(x, f"{name}_proj") for x in xs] for name in "qkv")
            for place in range(len(xs)):
                context = []
                for head in range(heads):
                    part = slice(head * width, (head + 1) * width)
                    scores = torch.stack([q[place][part] @ other[part] / math.sqrt(width) for other in k])
                    weights = scores.exp() / scores.exp().sum()
                    context.append(sum(p * other[part] for p, other in zip(weights, v, strict=True)))
                out = w[f"{at}.self_attn.out_proj.weight"][:, rows] @ torch.cat(context)
                out = out + w[f"{at}.self_attn.out_proj.bias"][rows]
                sums[place] = sums[place] + out / branches / (1 - rate)
        xs = [norm(x + added, w, f"{at}.self_attn_layer_norm") for x, added in zip(xs, sums, strict=True)]
        next_xs = []
        for x in xs:
            inner = gelu(w[f"{at}.feed_forward.fc1.weight"] @ x + w[f"{at}.feed_forward.fc1.bias"])
            outer = w[f"{at}.feed_forward.fc2.weight"] @ inner + w[f"{at}.feed_forward.fc2.bias"]
            next_xs.append(norm(x + outer * whole / (1 - rate), w, f"{at}.final_layer_norm"))
        xs = next_xs
    return xs


def weights_of(model):
    return {key.removeprefix("model."): tensor for key, tensor in model.double().state_dict().items()}


@pytest.mark.parametrize("branches", [1, 3])
def test_logits_are_those_of_the_equations(branches):
    inputs = batch((4, 3))
    lm = new(MATRobertaForMaskedLM, attention_branches=branches)
    classifier = new(MATRobertaForSequenceClassification, attention_branches=branches, num_labels=3)
    ours, w = {}, {}
    for model in (lm, classifier):
        w[model] = weights_of(model)
        with torch.no_grad():
            ours[model] = model(**inputs).logits
    for row, (ids, mask) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"], strict=True)):
        sentence = ids[mask == 1].tolist()
        for place, x in enumerate(naive_states(w[lm], lm.config, sentence)):
            y = norm(gelu(w[lm]["dense.weight"] @ x + w[lm]["dense.bias"]), w[lm], "layer_norm")
            expected = w[lm]["lm_head.weight"] @ y + w[lm]["lm_head.bias"]
            torch.testing.assert_close(ours[lm][row, place], expected, rtol=1e-10, atol=1e-10)
        head = w[classifier]
        first = naive_states(head, classifier.config, sentence)[0]
        y = torch.tanh(head["classifier.dense.weight"] @ first + head["classifier.dense.bias"])
        expected = head["classifier.out_proj.weight"] @ y + head["classifier.out_proj.bias"]
        torch.testing.assert_close(ours[classifier][row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_a_classifier_reads_the_first_token_behind_padding(given):
    model, lengths = new(MATRobertaForSequenceClassification, num_labels=3), (4, 2)
    inputs = batch(lengths)
    left = {
        name: torch.stack([row.roll(4 - length) for row, length in zip(rows, lengths, strict=True)])
        for name, rows in inputs.items()
    }
    with torch.no_grad():
        expected = model(**inputs).logits
        if given == "inputs_embeds":
            left["inputs_embeds"] = model.get_input_embeddings()(left.pop("input_ids"))
        torch.testing.assert_close(model(**left).logits, expected, rtol=1e-5, atol=1e-6)


def test_positions_of_the_callers_are_refused():
    model, inputs = new(MATRobertaModel), batch((4, 3))
    with pytest.raises(ValueError, match="`position_ids` are not accepted"):
        model(**inputs, position_ids=torch.arange(4).flip(0))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_labels": 0}, "`num_labels` is 0; accepted: a whole number, 1 or more"),
        ({"num_labels": "3"}, "`num_labels` is '3'"),
        ({"id2label": {0: "a", 2: "b"}}, "`id2label` has the numbers [0, 2]; accepted: 0 to 1, each once"),
        ({"id2label": {0: "a", 1: "b"}, "num_labels": 3}, "`num_labels` is 3, and `id2label` names 2 labels"),
        ({"problem_type": "foo"}, "`problem_type` is 'foo'; accepted: regression"),
        ({"is_encoder_decoder": True}, "`is_encoder_decoder` must be False for mat_roberta, got True"),
    ],
)
def test_labels_that_no_head_can_have_are_refused(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        MATRobertaConfig(**fields)


def test_training_drops_branches_as_the_equations_say():
    """Eq. 5 and 7: a branch is kept if U >= rho. The output of a kept branch is divided by 1 - rho."""
    fields = {"attention_branches": 3, "drop_branch": 0.4, "dropout": 0.0, "attention_dropout": 0.0}
    model = new(MATRobertaModel, **fields).double().train()
    w, inputs = weights_of(model), batch((4,))
    seen = set()
    for seed in range(6):
        torch.manual_seed(seed)
        kept = []
        for _ in range(2):
            alive = [i for i, u in enumerate(torch.rand(3).tolist()) if u >= 0.4]
            kept.append((alive, torch.rand(1).item() >= 0.4))
        torch.manual_seed(seed)
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0]
        expected = naive_states(w, model.config, inputs["input_ids"][0].tolist(), kept, 0.4)
        torch.testing.assert_close(states, torch.stack(expected), rtol=1e-10, atol=1e-10)
        seen.add(str(kept))
    assert len(seen) > 3


BASES = {
    "roberta": (RobertaForMaskedLM, RobertaConfig),
    "camembert": (CamembertForMaskedLM, CamembertConfig),
    "roberta, classes": (RobertaForSequenceClassification, RobertaConfig),
    "xlm-r, classes": (XLMRobertaForSequenceClassification, XLMRobertaConfig),
}


@pytest.mark.parametrize(("saved", "eps"), [(False, 1e-5), (True, 1e-5), (True, 1e-12)])
@pytest.mark.parametrize("case", BASES)
def test_logits_are_the_bases(case, saved, eps, tmp_path):
    """Also in a batch with padding, and when the base is a model of this family."""
    theirs = base(*BASES[case], layer_norm_eps=eps).double()
    cls = MATRobertaForMaskedLM if "Masked" in type(theirs).__name__ else MATRobertaForSequenceClassification
    if saved:
        theirs.save_pretrained(tmp_path)
    ours = cls.from_base(tmp_path if saved else theirs, attention_branches=2, drop_branch=0.3)
    again = cls.from_base(ours, attention_branches=6)
    real = batch()["attention_mask"] == 1
    with torch.no_grad():
        expected = theirs(**batch()).logits
        for model in (ours, again):
            assert model.dtype == torch.float64
            logits = model(**batch()).logits
            chosen = (logits[real], expected[real]) if logits.dim() == 3 else (logits, expected)
            torch.testing.assert_close(*chosen, rtol=1e-10, atol=1e-10)
    assert (ours.config.drop_branch, again.config.attention_branches) == (0.3, 6)
    assert not ours.training


def test_a_head_goes_by_the_names_of_its_labels():
    names = ["no", "perhaps", "yes"]
    model = new(MATRobertaForSequenceClassification, id2label=dict(enumerate(names)), drop_branch=0.0)
    for order in ([2, 0, 1], [0, 1, 2]):
        labels = [names[number] for number in order]
        again = MATRobertaForSequenceClassification.from_base(model, id2label=dict(enumerate(labels)))
        with torch.no_grad():
            torch.testing.assert_close(again(**batch()).logits, model.eval()(**batch()).logits[:, order])
    others = MATRobertaForSequenceClassification.from_base(model, id2label={0: "a", 1: "b", 2: "c"})
    with torch.no_grad():
        torch.testing.assert_close(others(**batch()).logits, model(**batch()).logits)


def test_a_classifier_starts_from_a_language_model(caplog):
    theirs = base()
    labels = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}, "label2id": {"no": 0, "perhaps": 1, "yes": 2}}
    ours = MATRobertaForSequenceClassification.from_base(theirs, **labels)
    assert "classifier" in caplog.text
    assert ours(**batch()).logits.shape == (3, 3)
    assert ours.config.id2label[2] == "yes"
    assert ours.config.attention_branches == 2
    with torch.no_grad():
        expected = theirs.roberta(**batch()).last_hidden_state[:, 0]
        torch.testing.assert_close(ours.model(**batch()).last_hidden_state[:, 0], expected, rtol=1e-4, atol=1e-5)
    bare = MATRobertaModel.from_base(base(RobertaModel))
    assert bare(**batch()).last_hidden_state.shape == (3, 7, 16)


@pytest.mark.parametrize(
    ("fields", "overrides", "words"),
    [
        ({}, {"layer_norm_eps": 0.1}, "`layer_norm_eps` cannot be 0.1"),
        ({"is_decoder": True}, {}, "is_decoder"),
        ({}, {"d_model": 32}, "`d_model` cannot be 32"),
        ({}, {"branches": 2}, "no field 'branches'"),
        ({}, {"drop_branch": 2}, r"\[0, 1\)"),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, "`tie_word_embeddings` cannot be True"),
    ],
)
def test_what_is_no_base_is_refused(fields, overrides, words):
    with pytest.raises(UserError, match=words):
        MATRobertaForMaskedLM.from_base(base(**fields), **overrides)


def test_a_loaded_base_whose_weights_are_not_those_of_its_config_is_refused():
    """Matrices that differ where the config ties them; and an adapter that is not merged, on its head or elsewhere."""
    apart = base(tie_word_embeddings=False)
    apart.config.tie_word_embeddings = True
    torch.nn.init.normal_(apart.lm_head.decoder.weight)
    with pytest.raises(UserError, match=r"its config ties lm_head.decoder.weight to .*, and they differ"):
        MATRobertaForMaskedLM.from_base(apart)
    for names in (["lm_head.dense"], ["query"]):
        adapted = base()
        get_peft_model(adapted, LoraConfig(r=2, target_modules=names))
        with pytest.raises(UserError, match=r"cannot start from .*weights that its config does not ask for.*merge"):
            MATRobertaForMaskedLM.from_base(adapted)


@pytest.mark.parametrize(
    ("before", "after"), [("double_mean", "mean"), ("mean", "double_mean"), *[("double_mean",) * 2]]
)
def test_another_merge_of_branches_is_told(before, after, caplog):
    trained = MATRobertaForMaskedLM.from_base(base(), attention_branches=2, branch_merge=before)
    caplog.clear()
    again = MATRobertaForMaskedLM.from_base(trained, branch_merge=after)
    with torch.no_grad():
        same = torch.allclose(again(**batch()).logits, trained.eval()(**batch()).logits, rtol=1e-3, atol=1e-4)
    assert same == (before == after)
    assert ("does not compute the function" in caplog.text) != same


def test_a_matrix_that_is_untied_is_a_copy():
    theirs = base()
    ours = MATRobertaForMaskedLM.from_base(theirs, tie_word_embeddings=False)
    assert ours.lm_head.weight.data_ptr() != ours.get_input_embeddings().weight.data_ptr()
    real = batch()["attention_mask"] == 1
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch()).logits[real], theirs(**batch()).logits[real], rtol=1e-3, atol=1e-4)


def test_an_adapter_of_the_head_is_in_the_loss():
    model = get_peft_model(new(MATRobertaForMaskedLM), LoraConfig(r=2, target_modules=["lm_head"]))
    torch.nn.init.ones_(model.base_model.model.lm_head.lora_B["default"].weight)
    labels = batch()["input_ids"].clone()
    labels[batch()["attention_mask"] == 0] = -100
    whole, masked = (model(**batch(), labels=labels, skip_logits=skip).loss for skip in (False, True))
    torch.testing.assert_close(masked, whole)
    masked.backward()
    assert model.base_model.model.lm_head.lora_A["default"].weight.grad.any()


def test_branches_of_networks_stay_joined_as_they_were_trained():
    """A single network can start with either value of `join_ffn`: only the way of dropping differs."""
    theirs, real = base(), batch()["attention_mask"] == 1
    for joined in (True, False):
        model = MATRobertaForMaskedLM.from_base(theirs, ffn_branches=2, join_ffn=joined, drop_branch=0.0)
        with pytest.raises(UserError, match=f"`join_ffn` cannot be {not joined}"):
            MATRobertaForMaskedLM.from_base(model, join_ffn=not joined)
        with torch.no_grad():
            torch.testing.assert_close(
                model(**batch()).logits[real], theirs(**batch()).logits[real], rtol=1e-4, atol=1e-4
            )


def test_other_architectures_are_refused(tmp_path):
    with pytest.raises(UserError, match="accepted: roberta, xlm-roberta, camembert, mat_roberta"):
        MATRobertaModel.from_base(hf_deepwide.MATModel(hf_deepwide.MATConfig(vocab_size=9, d_model=16)))
    with pytest.raises(UserError, match="cannot start from a int"):
        MATRobertaModel.from_base(3)


@pytest.mark.parametrize("cls", CLASSES)
def test_saved_models_load_by_the_auto_classes(cls, tmp_path):
    model = new(cls)
    model.save_pretrained(tmp_path)
    auto = dict(zip(CLASSES, (AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification), strict=True))[cls]
    again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is cls
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(again(**batch())[0], model(**batch())[0])
    body = AutoModel.from_pretrained(tmp_path)
    source = model if cls is MATRobertaModel else model.model
    with torch.no_grad():
        assert torch.equal(body(**batch())[0], source(**batch())[0])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradients_reach_every_weight(attention, checkpointing):
    """Gradients with sdpa and with recomputed activations equal the gradients with eager attention."""
    losses = []
    for implementation, recompute in (("eager", False), (attention, checkpointing)):
        model = new(MATRobertaForSequenceClassification, num_labels=2, drop_branch=0.3).train()
        model.set_attn_implementation(implementation)
        if recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        loss = model(**batch(), labels=torch.tensor([1, 0, 1])).loss
        loss.backward()
        losses.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-5)
    model.eval()(**batch(), labels=torch.tensor([1, 0, 1])).loss.backward()
    still = [name for name, p in model.named_parameters() if not p.grad.any()]
    assert all(name.endswith("k_proj.bias") for name in still), still


def test_the_loss_of_the_language_model_needs_only_masked_tokens():
    model = new(MATRobertaForMaskedLM)
    labels = batch()["input_ids"].clone()
    labels[:, ::2] = -100
    labels[batch()["attention_mask"] == 0] = -100
    out = model(**batch(), labels=labels)
    chosen = labels != -100
    p = out.logits[chosen].double().softmax(-1)
    expected = -p[torch.arange(len(p)), labels[chosen]].log().mean()
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert model(**batch(), labels=labels, skip_logits=True).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_vocabularies_are_resized():
    for cls in CLASSES:
        model = new(cls)
        model.resize_token_embeddings(50, mean_resizing=False)
        assert (model.config.vocab_size, model.get_input_embeddings().num_embeddings) == (50, 50)
        assert model(**batch())[0].shape[0] == 3


def test_parameters_are_robertas_plus_branches():
    """Each further branch adds four projections. The paper counts 1.5 times RoBERTa's size."""
    base_size = MATRobertaForMaskedLM(MATRobertaConfig(**SIZES, attention_branches=1)).num_parameters()
    theirs = base().num_parameters() - (2 + 1) * 16  # two positions that no token uses, and the token type
    assert base_size == theirs
    wide = MATRobertaForMaskedLM(MATRobertaConfig(**SIZES, attention_branches=3)).num_parameters()
    assert wide - base_size == 2 * 2 * 4 * (16 * 16 + 16)


def test_the_bias_of_an_untied_head_is_the_one_that_was_trained():
    theirs = base(tie_word_embeddings=False)
    torch.nn.init.normal_(theirs.lm_head.decoder.bias)
    ours = MATRobertaForMaskedLM.from_base(theirs)
    real = batch()["attention_mask"] == 1
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch()).logits[real], theirs(**batch()).logits[real], rtol=1e-3, atol=1e-4)
